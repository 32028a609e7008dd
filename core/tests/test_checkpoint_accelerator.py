"""Checkpoints of whole training runs: stopped anywhere, even killed, and resumed at this or another world size."""

import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from drivetrain import Accelerator
from drivetrain.checkpoint import Manifest
from drivetrain.errors import CheckpointError, UnsupportedError
from drivetrain.testing.workers import RemoteError
from drivetrain.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, ProjectConfiguration, set_seed

ROWS, BATCH = 24, 2


class Run:
    """A training run over the plain rows of a data set, two rows per rank and micro-batch."""

    def __init__(self, folder, precision="no", accumulation=1, weighted=False, seed=0, rebuild=True):
        set_seed(seed)
        handlers = [] if rebuild else [DistributedDataParallelKwargs(find_unused_parameters=True)]
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision=precision,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False),
            project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=3),
            kwargs_handlers=handlers,
        )
        data = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1))
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        self.weighted = weighted
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.data = data
        self.micro = torch.zeros((), dtype=torch.int64)
        self.accelerator.register_for_checkpointing(self)

    def state_dict(self):
        return {"micro": self.micro}

    def load_state_dict(self, state):
        self.micro = state["micro"]

    def steps(self, micro_batches):
        """Losses of this rank's micro-batches."""
        losses = []
        size, rank = self.accelerator.num_processes, self.accelerator.process_index
        for _ in range(micro_batches):
            # The same global micro-batches at any world size that divides six rows.
            first = int(self.micro) * 6 % ROWS
            rows = self.data[first : first + 6][rank::size]
            with self.accelerator.accumulate(self.model):
                loss = self.model(rows).square().mean()
                self.accelerator.backward(loss, **({"weight": len(rows)} if self.weighted else {}))
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.micro = self.micro + 1
            losses.append(loss.item())
        return losses

    def weights(self):
        return [p.detach().clone() for p in self.accelerator.unwrap_model(self.model).parameters()]

    def close(self):
        self.accelerator._finish_checkpoints()


def straight(*args, **kwargs):
    run = Run(*args, **kwargs)
    losses = run.steps(20)
    result = losses, run.weights(), run.accelerator.step
    run.close()
    return result


def saved(at, *args, **kwargs):
    run = Run(*args, **kwargs)
    losses = run.steps(at)
    run.accelerator.save_state()
    run.close()
    return losses


def resumed(steps, *args, **kwargs):
    run = Run(*args, seed=77, **kwargs)
    run.steps(4)
    run.accelerator.load_state()
    losses = run.steps(steps)
    result = losses, run.weights(), run.accelerator.step
    run.close()
    return result


def runner(workers, size):
    return workers(size).run if size > 1 else lambda f, *a, **k: [f(*a, **k)]


def assert_equal(a, b):
    assert a[0] == b[0]
    assert a[2] == b[2]
    assert all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize(("accumulation", "at"), [(1, 10), (3, 9), (3, 10), (3, 11)])
def test_a_resumed_run_is_bit_identical(workers, tmp_path, size, precision, accumulation, at):
    run = runner(workers, size)
    # DDP rebuilds its buckets after the first backward; with three ranks that changes the order of sums.
    options = {"precision": precision, "accumulation": accumulation, "rebuild": size < 3}
    expected = run(straight, tmp_path, **options)
    before = run(saved, at, tmp_path, **options)
    after = run(resumed, 20 - at, tmp_path, **options)
    for rank in range(size):
        assert before[rank] == expected[rank][0][:at]
        assert_equal(after[rank], (expected[rank][0][at:], *expected[rank][1:]))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (3, 1)])
def test_a_window_that_one_world_opened_is_closed_by_another(workers, tmp_path, before, after, weighted):
    options = {"accumulation": 4, "weighted": weighted}
    expected = straight(tmp_path, **options)
    runner(workers, before)(saved, 10, tmp_path, **options)
    for _, weights, step in runner(workers, after)(resumed, 10, tmp_path, **options):
        assert step == expected[2] == 5
        for a, b in zip(weights, expected[1], strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def killed_in_a_later_save(folder, rank):
    run = Run(folder)
    run.steps(10)
    run.accelerator.save_state()
    run.steps(3)
    if run.accelerator.process_index == rank:
        real, left = os.fsync, [3]

        def fsync(fd):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            real(fd)

        os.fsync = fsync
    run.accelerator.save_state()


def test_killed_in_the_middle_of_a_later_save_nothing_is_lost(workers, tmp_path):
    expected = workers(2).run(straight, tmp_path)
    with pytest.raises(RemoteError, match="exit code -9"):
        workers(2).run(killed_in_a_later_save, tmp_path, 0)
    after = workers(2).run(resumed, 10, tmp_path)
    for rank in range(2):
        assert_equal(after[rank], (expected[rank][0][10:], *expected[rank][1:]))


def test_numbers_limit_and_background(tmp_path):
    run = Run(tmp_path)
    for i in range(5):
        run.steps(1)
        path = run.accelerator.save_state(blocking=bool(i % 2), metadata={"i": i})
        assert Path(path).name == f"checkpoint_{i}"
    assert run.accelerator.wait_for_checkpoint() == path
    assert run.accelerator.wait_for_checkpoint() is None
    folder = tmp_path / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint_2", "checkpoint_3", "checkpoint_4"]
    assert Manifest.read(folder / "checkpoint_4").metadata == {"i": 4}
    assert Manifest.read(folder / "checkpoint_4").counters["step"] == 5
    other = Run(tmp_path)
    assert other.accelerator.load_state() == path
    assert other.accelerator.step == 5


def test_another_precision_takes_over(tmp_path):
    saved(3, tmp_path, precision="fp16")
    for precision in ("no", "bf16", "fp16"):
        run = Run(tmp_path, precision=precision)
        run.accelerator.load_state()
        assert run.accelerator.step == 3
        assert run.model[0].weight.dtype is torch.float32
        run.steps(2)
    saved(3, tmp_path, precision="no")
    Run(tmp_path, precision="fp16").accelerator.load_state()


def test_weights_have_the_plain_model_s_names_under_ddp_and_compile(workers, tmp_path):
    def save():
        accelerator = Accelerator(cpu=True, dynamo_backend="eager")
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        accelerator.save_state(tmp_path / str(accelerator.num_processes))
        accelerator._finish_checkpoints()

    for size in (1, 2):
        runner(workers, size)(save)
        stored = load_file(tmp_path / str(size) / "model.safetensors")
        assert sorted(stored) == ["0.bias", "0.weight", "1.bias", "1.weight"]
        names = load_file(tmp_path / str(size) / "optimizer.safetensors")
        assert "optimizer[0].state.0.weight.momentum_buffer" in names


def test_errors_reach_the_script(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(UnsupportedError, match="pickles, which checkpoints never hold"):
        run.accelerator.save_state(safe_serialization=False)
    with pytest.raises(CheckpointError, match="lack them: item 1"):
        run.accelerator.register_for_checkpointing(run, 3)
    with pytest.raises(CheckpointError, match="there is no whole checkpoint"):
        run.accelerator.load_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.accelerator.save_state()
    assert not dist.is_initialized()


def epochs(folder, *, stop=None, where="loop", resume=False):
    """Losses by (epoch, batch) over a shuffled, prepared loader with dropout; saves after ``stop`` batches, and ends."""
    set_seed(3 + resume)
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True),
    )
    data = torch.utils.data.TensorDataset(torch.randn(22, 4, generator=torch.Generator().manual_seed(1)))
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    generator = torch.Generator().manual_seed(9 + resume)
    loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True, generator=generator)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    validation = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=6))
    if resume:
        accelerator.load_state()
    losses = {}
    done = 0
    try:
        for epoch in accelerator.epochs(3):
            for (batch,) in loader:
                with accelerator.accumulate(model):
                    loss = model(batch).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                losses[epoch, loader.batch.index] = loss.item(), batch.sum().item()
                done += 1
                if done == stop and where == "loop":
                    accelerator.save_state()
                    return losses, None
            if done == stop and where == "before validation":
                accelerator.save_state()
                return losses, None
            losses[epoch, "validation"] = sum(batch.sum().item() for (batch,) in validation)
            if done == stop and where == "end of epoch":
                accelerator.save_state()
                return losses, None
            if done == stop:
                break
        if stop:
            accelerator.save_state()
    finally:
        accelerator._finish_checkpoints()
    return losses, [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("stop", "where"),
    [
        (1, "loop"),
        (4, "loop"),
        (6, "loop"),
        (8, "loop"),
        (8, "before validation"),
        (8, "end of epoch"),
        (8, "after a break"),
        (16, "end of epoch"),
    ],
)
def test_an_epoch_goes_on_where_it_was_left(workers, tmp_path, size, stop, where):
    run = runner(workers, size)
    whole = run(epochs, tmp_path)
    first = run(epochs, tmp_path, stop=max(1, stop // size), where=where)
    second = run(epochs, tmp_path, resume=True)
    for rank in range(size):
        together = {**first[rank][0], **second[rank][0]}
        if where == "before validation":  # the training part of the epoch was over: it goes on with the next one
            del whole[rank][0][0, "validation"]
        assert together == whole[rank][0]
        assert not first[rank][0].keys() & second[rank][0].keys()
        assert all(torch.equal(a, b) for a, b in zip(second[rank][1], whole[rank][1], strict=True))
