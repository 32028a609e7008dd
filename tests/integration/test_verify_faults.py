"""Faults planted in small training loops: `drivetrain verify` names where the runs part, and why."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain import Accelerator, DistributedDataParallelKwargs
from drivetrain.parity import Recorder, compare_records, recording
from drivetrain.parity.merging import Run
from drivetrain.parity.record import read_record
from drivetrain.utils import set_seed

STEPS = 4


def record(script, directory, options, layouts):
    """What ``drivetrain verify`` does in each process."""
    import torch.distributed as dist

    set_seed(dist.get_rank() if dist.is_initialized() else 0)
    with recording(Recorder(directory, steps=STEPS, layouts=layouts)):
        script(**options)


def compare(ranks, script, folder, **options):
    """The report on a training loop, on two ranks and in this process."""
    ranks.run(record, script, folder / "several", options, None)
    layouts = Run(read_record(folder / "several")).layouts
    with torch.random.fork_rng():
        record(script, folder / "single", options, layouts)
    report = compare_records(folder / "single", folder / "several")
    print(report.text())
    return report


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.extra = nn.Linear(8, 8)

    def forward(self, x, extra=True):
        hidden = self.norm(self.first(x).tanh())
        return self.head(hidden + self.extra(hidden) if extra else hidden)


def data(count=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)


class Augmented(Dataset):
    """Noise from a generator that nobody seeds."""

    def __init__(self):
        self.x, self.y = data()
        self.noise = np.random.default_rng()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + torch.tensor(self.noise.normal(size=6), dtype=torch.float32), self.y[i]


def train(fault=None):
    """A healthy loop with one fault."""
    unused = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[unused] if fault in UNUSED else None)
    world, rank = accelerator.num_processes, accelerator.process_index
    if fault != "weights-of-a-rank":
        set_seed(7)
    model = Net()
    if fault == "batch-norm":
        model.norm = nn.BatchNorm1d(8)
    lr = 0.1 * world if fault == "rate-scaled" else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    if fault == "unseeded-sampler":
        order = np.random.default_rng().permutation(64)
        dataset = TensorDataset(*(t[order] for t in data()))
    else:
        dataset = Augmented() if fault == "random-augmentation" else TensorDataset(*data())
    generator = torch.Generator().manual_seed(rank) if fault == "unprepared-loader" else None
    raw = DataLoader(dataset, batch_size=4, shuffle=True, generator=generator)
    original = model
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = raw if fault in ("unprepared-loader", "not-sharded") else accelerator.prepare(raw)
    if fault != "scheduler-steps":
        scheduler = accelerator.prepare(scheduler)
    if fault == "weights-of-a-rank":
        nn.init.normal_(original.head.weight)
    if fault == "frozen-on-a-rank" and rank == 1:
        original.head.requires_grad_(False)
    for i, (x, y) in enumerate(loader):
        if fault == "rank-out-of-step" and rank == 1 and i == 1:
            continue
        if fault == "mode-of-a-rank":
            model.train(rank == 0)
        with accelerator.accumulate(model):
            called = original if fault == "forward-past-the-wrapper" else model
            logits = called(x, extra=not (fault == "branch-of-a-rank" and rank == 1))
            accelerator.backward(loss_of(fault, logits, y))
            if fault == "gradient-of-a-rank" and rank == 1:
                original.head.weight.grad.mul_(1.5)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            if fault == "clipped-by-a-rank":
                nn.utils.clip_grad_value_(model.parameters(), 0.01 * (1 + rank))
            optimizer.step()
            for _ in range(world if fault == "scheduler-steps" else 1):
                scheduler.step()
            optimizer.zero_grad()
        if fault == "metric-of-one-rank":
            accelerator.log({"accuracy": (logits.softmax(-1)[:, 0]).mean().item()})


def loss_of(fault, logits, y):
    if fault == "sum-of-losses":
        return nn.functional.cross_entropy(logits, y, reduction="sum")
    if fault == "mean-of-means":
        return nn.functional.cross_entropy(logits, y, ignore_index=0)
    if fault == "loss-over-the-batch":
        scores = logits @ logits.T
        return nn.functional.cross_entropy(scores, torch.arange(len(y)))
    return nn.functional.cross_entropy(logits, y)


#: Faults that leave a parameter without a gradient on one rank, where ddp would wait for it.
UNUSED = ("branch-of-a-rank", "frozen-on-a-rank")

#: Fault: what differs, its name, and the step.
FAULTS = {
    "batch-norm": ("module output", "norm", 0),
    "unseeded-sampler": ("inputs", "0", 0),
    "not-sharded": ("rows", "", 0),
    "unprepared-loader": ("rows", "", 0),
    "random-augmentation": ("inputs", "0", 0),
    "mean-of-means": ("loss", "", 0),
    "sum-of-losses": ("loss", "", 0),
    "loss-over-the-batch": ("loss", "", 0),
    "rate-scaled": ("setting", "lr", 0),
    "scheduler-steps": ("setting", "lr", 1),
    "gradient-of-a-rank": ("gradients differ between ranks", "head.weight", 0),
    "forward-past-the-wrapper": ("gradients differ between ranks", "extra.bias", 0),
    "weights-of-a-rank": ("initial weights differ between ranks", "head.weight", 0),
    "rank-out-of-step": ("samples", "", 1),
    "branch-of-a-rank": ("calls", "extra", 0),
    "frozen-on-a-rank": ("frozen parameters", "head.bias", 0),
    "clipped-by-a-rank": ("used gradients differ between ranks", "extra.bias", 0),
    "mode-of-a-rank": ("modules in evaluation", "", 0),
    "metric-of-one-rank": ("metric of one rank", "accuracy", 1),
}


def test_a_healthy_loop_has_no_fault(ranks, tmp_path):
    report = compare(ranks, train, tmp_path)
    assert report.parity
    assert report.training.steps == STEPS


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(ranks, tmp_path, fault):
    kind, name, step = FAULTS[fault]
    report = compare(ranks, train, tmp_path, fault=fault)
    found, cause = report.metrics[0] if fault == "metric-of-one-rank" else (report.training.difference, report.cause)
    assert (cause.key, found.kind, found.name, found.step) == (fault, kind, name, step)
