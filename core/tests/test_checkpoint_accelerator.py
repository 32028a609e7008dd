"""Checkpoints of whole training runs: stopped anywhere, even killed, and resumed at this or another world size."""

import itertools
import os
import signal
import tempfile
import traceback
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from drivetrain import Accelerator
from drivetrain._plugins import get_registry
from drivetrain.checkpoint import Manifest
from drivetrain.errors import CheckpointError, UnsupportedError
from drivetrain.testing.pairwise import pairwise
from drivetrain.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin, ProjectConfiguration, set_seed

ROWS, BATCH = 24, 2


class Run:
    """A training run over the plain rows of a data set, two rows per rank and micro-batch."""

    def __init__(self, folder, precision="no", accumulation=1, weighted=False, seed=0, rebuild=True, backend=None):
        set_seed(seed)
        handlers = [] if rebuild else [DistributedDataParallelKwargs(find_unused_parameters=True)]
        self.accelerator = Accelerator(
            cpu=True,
            backend=backend,
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


def assert_equal(a, b):
    assert a[0] == b[0]
    assert a[2] == b[2]
    assert all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory):
    """What forked ranks would each import for themselves."""
    import drivetrain_ddp.backend  # noqa: F401

    folder = tmp_path_factory.mktemp("imported")
    saved(2, folder)
    resumed(1, folder, precision="fp16")


def forked(size, function, *args, **kwargs):
    """Run on ranks that are forked from this process, which costs no import of torch. Results by rank; None from one that was killed."""
    with tempfile.TemporaryDirectory() as folder:
        pids = {}
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = be_rank(rank, size, folder, function, *args, **kwargs)
                finally:
                    os._exit(code)
            pids[pid] = rank
        codes = {}
        while len(codes) < size:
            pid, status = os.wait()
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] == -signal.SIGKILL:  # as a launcher does: the others can't go on
                for other in pids.keys() - codes.keys():
                    os.kill(other, signal.SIGKILL)
        assert set(codes.values()) <= {0} or -signal.SIGKILL in codes.values(), codes
        results = [Path(folder, str(rank)) for rank in range(size)]
        return [torch.load(p, weights_only=True) if p.exists() else None for p in results]


def be_rank(rank, size, folder, function, *args, **kwargs):
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # not asked: the ranks meet at a file
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        result = function(*args, **kwargs)
    except BaseException:
        traceback.print_exc()
        return 1
    torch.save(result, Path(folder, f"{rank}.part"))
    Path(folder, f"{rank}.part").rename(Path(folder, str(rank)))
    return 0


def saved_and_killed(at, folder, **kwargs):
    """A checkpoint after ``at`` micro-batches; then the last rank is killed in the middle of a later save."""
    run = Run(folder, **kwargs)
    losses = run.steps(at)
    run.accelerator.save_state()
    torch.save(losses, Path(folder, f"losses_{run.accelerator.process_index}"))
    run.steps(4)
    if run.accelerator.is_last_process:
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
    run.accelerator.save_state()
    raise AssertionError("the kill didn't come")


AXES = {"size": [1, 2, 3], "precision": ["no", "bf16", "fp16"], "window": [(1, 10), (3, 9), (3, 10), (3, 11)]}
IN_CI = pairwise(AXES)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in IN_CI else pytest.mark.full, id="-".join(map(str, case.values())))
        for case in (dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values()))
    ],
)
def test_killed_in_a_later_save_a_run_goes_on_bit_for_bit(tmp_path, case):
    size, (accumulation, at) = case["size"], case["window"]
    # DDP rebuilds its buckets after the first backward; with three ranks that changes the order of sums.
    options = {"precision": case["precision"], "accumulation": accumulation, "rebuild": size < 3}
    expected = forked(size, straight, tmp_path, **options)
    assert None in forked(size, saved_and_killed, at, tmp_path, **options)
    assert len(list((tmp_path / "checkpoints").glob("checkpoint_*"))) == 1
    after = forked(size, resumed, 20 - at, tmp_path, **options)
    for rank in range(size):
        assert torch.load(tmp_path / f"losses_{rank}", weights_only=True) == expected[rank][0][:at]
        assert_equal(after[rank], (expected[rank][0][at:], *expected[rank][1:]))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (3, 1)])
def test_a_window_that_one_world_opened_is_closed_by_another(tmp_path, before, after, weighted):
    options = {"accumulation": 4, "weighted": weighted}
    (expected,) = forked(1, straight, tmp_path, **options)
    forked(before, saved, 10, tmp_path, **options)
    for _, weights, step in forked(after, resumed, 10, tmp_path, **options):
        assert step == expected[2] == 5
        for a, b in zip(weights, expected[1], strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def some_more(folder, backend=None, start=None, directory=None):
    """Mean losses up to micro-batch 12: of a fresh run that saves after ``start``, or of one that goes on. The first that it has is counted from 0."""
    run = Run(folder, accumulation=2, backend=backend)
    if start is not None:
        run.steps(start)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.accelerator.save_state(directory)
    else:
        run.steps(2)
        run.accelerator.load_state(directory)
        assert run.accelerator.step == int(run.micro) // 2
    first = int(run.micro)
    losses = torch.tensor(run.steps(12 - first))
    if run.accelerator.num_processes > 1:
        dist.all_reduce(losses)
    run.close()
    return first, losses / run.accelerator.num_processes


#: Every installed backend, with one process more than it needs where it takes several.
PLACES = [
    (name, size) for name in sorted(get_registry().specs("backend")) for size in ([1] if name == "single" else [2, 3])
]


def test_what_any_backend_saved_at_any_size_goes_on_under_any_other(tmp_path):
    """Inside a window: after 7 micro-batches of windows of 2, or after 8 where the backend can save at the window's end only."""
    _, reference = forked(1, some_more, tmp_path, start=7, directory=tmp_path / "reference")[0]
    for name, size in PLACES:
        for _, losses in forked(size, some_more, tmp_path, name, start=7, directory=tmp_path / f"{name}{size}"):
            assert torch.allclose(losses, reference, rtol=1e-5), (name, size)
    for (before, n), (after, m) in itertools.product(PLACES, repeat=2):
        for first, losses in forked(m, some_more, tmp_path, after, directory=tmp_path / f"{before}{n}"):
            assert first in (7, 8)
            assert torch.allclose(losses, reference[first - 7 :], rtol=1e-4), (before, n, after, m)


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


def test_weights_have_the_plain_model_s_names_under_ddp_and_compile(tmp_path):
    def save():
        accelerator = Accelerator(cpu=True, dynamo_backend="eager")
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        accelerator.save_state(tmp_path / str(accelerator.num_processes))
        accelerator._finish_checkpoints()

    for size in (1, 2):
        forked(size, save)
        stored = load_file(tmp_path / str(size) / "model.safetensors")
        assert sorted(stored) == ["0.bias", "0.weight", "1.bias", "1.weight"]
        names = load_file(tmp_path / str(size) / "optimizer.safetensors")
        assert "optimizer[0].state.0.weight.momentum_buffer" in names


class Adapted(torch.nn.Module):
    """A frozen model inside, and a small trained part beside it, as adapters of large models are."""

    def __init__(self):
        super().__init__()
        self.base_model = torch.nn.Linear(4, 3).requires_grad_(False)
        self.adapter = torch.nn.Sequential(torch.nn.Linear(4, 1, bias=False), torch.nn.Linear(1, 3, bias=False))

    def forward(self, x):
        return self.base_model(x) + self.adapter(x)


def adapted(folder, save=None):
    torch.manual_seed(0 if save else 5)
    accelerator = Accelerator(cpu=True)
    model = Adapted()
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(trained, lr=0.1))
    losses = []
    if not save:
        accelerator.load_state(folder)
    for i in range(3 if save else 2):
        loss = model(torch.full((2, 4), float(accelerator.step))).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if save and i == 0:
            accelerator.save_state(folder)
    accelerator._finish_checkpoints()
    return losses


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_adapters_on_a_frozen_model(tmp_path, before, after):
    (expected, *_) = forked(before, adapted, tmp_path / "c", save=True)
    stored = load_file(tmp_path / "c" / "model.safetensors")
    assert sorted(stored) == ["adapter.0.weight", "adapter.1.weight", "base_model.bias", "base_model.weight"]
    for losses in forked(after, adapted, tmp_path / "c"):
        assert torch.allclose(torch.tensor(losses), torch.tensor(expected[1:]), rtol=1e-5)


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
def test_an_epoch_goes_on_where_it_was_left(tmp_path, size, stop, where):
    whole = forked(size, epochs, tmp_path)
    first = forked(size, epochs, tmp_path, stop=max(1, stop // size), where=where)
    second = forked(size, epochs, tmp_path, resume=True)
    for rank in range(size):
        together = {**first[rank][0], **second[rank][0]}
        if where == "before validation":  # the training part of the epoch was over: it goes on with the next one
            del whole[rank][0][0, "validation"]
        assert together == whole[rank][0]
        assert not first[rank][0].keys() & second[rank][0].keys()
        assert all(torch.equal(a, b) for a, b in zip(second[rank][1], whole[rank][1], strict=True))
