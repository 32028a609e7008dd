"""Checkpoints of several processes: replicated models, agreement on failures, what each rank has for itself."""

import errno
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from drivetrain.checkpoint import CheckpointManager, Manifest, ProjectConfiguration, SafetensorsFormat
from drivetrain.errors import CheckpointError
from drivetrain.specs import CheckpointFormatSpec, ProcessInfo
from drivetrain.testing.sessions import PlainSession, plain_backend
from drivetrain.testing.workers import RemoteError

ROWS = 12


def process(node_rank=0):
    if not dist.is_initialized():
        return ProcessInfo()
    rank, size = dist.get_rank(), dist.get_world_size()
    return ProcessInfo(
        rank=rank, world_size=size, local_rank=rank, local_world_size=size, node_rank=node_rank, cluster="test"
    )


class Shuffle:
    """A loader whose state differs by rank."""

    def __init__(self, rank):
        self.order = [rank * 100]

    def state_dict(self):
        return {"order": self.order}

    def load_state_dict(self, state):
        self.order = state["order"]


def wrap(model):
    if not dist.is_initialized():
        return model
    return torch.nn.parallel.DistributedDataParallel(model)


def build(seed=0, who=None, **kwargs):
    who = who or process()
    torch.manual_seed(seed)
    model = wrap(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    torch.manual_seed(1000 * seed + who.rank)
    np.random.seed(seed + who.rank)
    backend = plain_backend(who)
    backend.unwrap = lambda m: getattr(m, "module", m)
    return PlainSession(
        [model], [optimizer], [scheduler], loaders=[Shuffle(who.rank)], process=who, backend=backend, **kwargs
    )


def rows(step):
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))


def train(session, steps):
    """Global losses: each rank has its share of the rows."""
    losses = []
    (model,), ((optimizer, _),), (scheduler,) = session.models, session.optimizers, session.schedulers
    rank, size = session.process.rank, session.process.world_size
    for _ in range(steps):
        optimizer.zero_grad()
        share = rows(session.step)[rank::size]
        loss = model(share).square().sum() * size / ROWS
        loss.backward()
        optimizer.step()
        scheduler.step()
        session.step += 1
        total = loss.detach() / size
        if size > 1:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses


def straight(steps):
    return train(build(), steps)


def train_and_save(directory, steps, blocking=True):
    session = build()
    losses = train(session, steps)
    manager = CheckpointManager(session)
    manager.save_state(directory, blocking=blocking)
    after = train(session, 2)
    manager.close()
    draws = torch.rand(2).tolist(), np.random.rand()
    return losses, after, draws


def load_and_train(directory, steps):
    session = build(seed=5)
    train(session, 1)
    manager = CheckpointManager(session)
    manager.load_state(directory)
    draws = torch.rand(2).tolist(), np.random.rand()
    losses = train(session, steps)
    manager.close()
    return losses, draws, session.loaders[0].order


@pytest.mark.parametrize("blocking", [True, False])
def test_two_ranks_resume_bit_for_bit(ranks, tmp_path, blocking):
    expected = ranks.run(straight, 8)[0]
    saved = ranks.run(train_and_save, tmp_path / "c", 4, blocking)
    resumed = ranks.run(load_and_train, tmp_path / "c", 4)
    for rank in range(2):
        losses, after, draws = saved[rank]
        assert losses + after == expected[:6]
        assert resumed[rank][0] == expected[4:]
        assert resumed[rank][1] == draws  # nothing was drawn between the save and the draws
        assert resumed[rank][2] == [rank * 100]
    assert saved[0][2] != saved[1][2]
    assert {p.name for p in (tmp_path / "c").iterdir()} == {
        "manifest.json", "state.json", "model.safetensors", "optimizer.safetensors", "rank_00000.json", "rank_00001.json",
    }  # fmt: skip


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (1, 2), (3, 2)])
def test_another_world_size_goes_on_with_the_same_losses(workers, tmp_path, before, after):
    expected = straight(8)
    run = workers(before).run if before > 1 else lambda f, *a: [f(*a)]
    run(train_and_save, tmp_path / "c", 4)
    run = workers(after).run if after > 1 else lambda f, *a: [f(*a)]
    for rank, (losses, _, order) in enumerate(run(load_and_train, tmp_path / "c", 4)):
        assert losses == pytest.approx(expected[4:], rel=1e-5)
        assert order == [0], rank  # at another world size everyone goes on from the first rank's loader state


def test_large_replicated_states_are_written_by_all_ranks(ranks, tmp_path):
    def save():
        model = torch.nn.Linear(4096, 8192, bias=False)  # 134 MB
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        manager = CheckpointManager(PlainSession([model], [optimizer], process=process()))
        manager.save_state(tmp_path / "c")
        manager.close()
        return model.weight[0, :4].tolist()

    values = ranks.run(save)
    names = {p.name for p in (tmp_path / "c").iterdir()}
    assert {"model.safetensors", "optimizer.safetensors"} <= names
    assert load_file(tmp_path / "c" / "model.safetensors")["weight"][0, :4].tolist() == values[0]


def fail_on(rank, blocking=True, how="state"):
    class Custom:
        def state_dict(self):
            if dist.get_rank() == rank and how == "state":
                return {"f": lambda: 0}
            return {}

        def load_state_dict(self, state):
            if dist.get_rank() == rank and how == "load":
                raise ValueError("planted")

    class Full(SafetensorsFormat):
        def write(self, path, tensors, metadata):
            if dist.get_rank() == rank and how == "write":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            return super().write(path, tensors, metadata)

    session = build(custom_objects=[Custom()])
    train(session, 1)
    # every rank writes tensors: an own state that is too large for its JSON
    session.loaders[0].order = torch.zeros(100_000)
    spec = CheckpointFormatSpec(name="safetensors", suffix=".safetensors")
    return session, CheckpointManager(session, format=Full(spec))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("how", ["state", "write"])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_failure_on_one_rank_fails_everywhere_and_leaves_the_previous_checkpoint(
    ranks, tmp_path, rank, how, blocking
):
    def run():
        train_and_save(tmp_path / "c", 1)
        _, manager = fail_on(rank, blocking, how)
        try:
            manager.save_state(tmp_path / "c", blocking=blocking)
            manager.wait()
        except CheckpointError as error:
            return str(error)
        finally:
            manager.close()

    texts = ranks.run(run)
    word = "a lambda" if how == "state" else "No space left on device"
    assert all(word in text for text in texts), texts
    assert f"rank {rank}: " in texts[1 - rank]
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert Manifest.read(tmp_path / "c").counters["step"] == 1
    ranks.run(load_and_train, tmp_path / "c", 1)


def test_a_failure_while_loading_is_seen_by_every_rank(ranks, tmp_path):
    def run():
        _, manager = fail_on(1, how="load")
        manager.save_state(tmp_path / "c")
        try:
            manager.load_state(tmp_path / "c")
        except (CheckpointError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            manager.close()

    first, second = ranks.run(run)
    assert second == "ValueError: planted"
    assert first.startswith("CheckpointError: restoring")
    assert "rank 1: ValueError: planted" in first


def test_a_rank_that_dies_while_it_writes_fails_the_save_and_the_next_one_cleans_up(ranks, tmp_path):
    def run(victim):
        class Deadly(SafetensorsFormat):
            def write(self, path, tensors, metadata):
                if dist.get_rank() == victim:
                    os._exit(9)
                return super().write(path, tensors, metadata)

        session = build()
        train(session, 1)
        session.loaders[0].order = torch.zeros(100_000)
        spec = CheckpointFormatSpec(name="safetensors", suffix=".safetensors")
        CheckpointManager(session, format=Deadly(spec)).save_state(tmp_path / "c")

    ranks.run(train_and_save, tmp_path / "c", 2)
    for victim in (1, 0):
        with pytest.raises(RemoteError, match="exit code 9") as caught:
            ranks.run(run, victim)
        assert "lost contact with another rank" in caught.value.failures[1 - victim]
        assert Manifest.read(tmp_path / "c").counters["step"] == 2
    assert len(list(tmp_path.iterdir())) == 2  # the dead leader's directory
    ranks.run(train_and_save, tmp_path / "c", 3)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_directories_that_are_not_shared_are_an_error_that_says_so(ranks, tmp_path):
    def run():
        directory = tmp_path / str(dist.get_rank()) / "c"
        manager = CheckpointManager(build(), visibility_timeout=0.2)
        real = Path.exists
        try:
            if dist.get_rank() == 1:  # as if on another machine
                Path.exists = lambda self: False if "saving" in self.name else real(self)
            manager.save_state(directory)
        except CheckpointError as error:
            return str(error)
        finally:
            Path.exists = real
            manager.close()

    for text in ranks.run(run):
        assert "the directory isn't shared" in text
        assert "save_on_each_node" in text
    assert not any(p for p in tmp_path.rglob("*") if p.is_file())


def test_save_on_each_node_makes_a_checkpoint_per_machine(ranks, tmp_path):
    def run(load):
        who = process(node_rank=dist.get_rank())
        project = ProjectConfiguration(
            project_dir=tmp_path / f"node{who.node_rank}", automatic_checkpoint_naming=True, save_on_each_node=True
        )
        session = build(who=who)
        manager = CheckpointManager(session, project=project)
        try:
            if load:
                manager.load_state()
                return train(session, 2)
            train(session, 3)
            manager.save_state()
            return train(session, 2)
        finally:
            manager.close()

    expected = ranks.run(run, False)
    for node in range(2):
        path = tmp_path / f"node{node}" / "checkpoints" / "checkpoint_0"
        assert {p.name for p in path.iterdir()} == {
            "manifest.json", "state.json", "model.safetensors", "optimizer.safetensors", f"rank_0000{node}.json",
        }  # fmt: skip
        assert Manifest.read(path).ranks == (node,)
    assert ranks.run(run, True) == expected


def test_a_background_save_does_not_meet_the_collectives_of_the_training(ranks, tmp_path):
    def run():
        session = build()
        project = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True, total_limit=2)
        manager = CheckpointManager(session, project=project)
        for _ in range(6):
            train(session, 3)
            manager.save_state(blocking=False)
            assert not manager.failed
        train(session, 3)
        manager.close()
        return session.step

    assert ranks.run(run) == [21, 21]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_4", "checkpoint_5"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Manifest.read(tmp_path / "checkpoints" / "checkpoint_5").counters["step"] == 18


def window(directory, load):
    """Three micro-batches per window, gradients kept local; the save comes after two."""
    session = build()
    model, optimizer = session.models[0], session.optimizers[0][0]
    inner = session.backend.unwrap(model)
    rank, size = session.process.rank, session.process.world_size

    def micro(step, sync=False):
        share = rows(step)[rank::size]
        loss = inner(share).square().sum()
        loss.backward()
        session.window["items"] = session.window.get("items", 0.0) + len(share)

    manager = CheckpointManager(session)
    if load:
        train(session, 1)
        manager.load_state(directory)
    else:
        micro(0), micro(1)
        session.mid_window = True
        manager.save_state(directory)
    micro(2)
    items = torch.tensor(session.window["items"])
    if size > 1:
        dist.all_reduce(items)
        for p in inner.parameters():
            dist.all_reduce(p.grad)
    for p in inner.parameters():
        p.grad /= items
    optimizer.step()
    manager.close()
    return items.item(), [p.detach().clone() for p in inner.parameters()]


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_save_inside_a_window_of_two_ranks_is_finished_by_any_number(workers, tmp_path, after):
    expected = workers(2).run(window, tmp_path / "c", False)[0]
    run = workers(after).run if after > 1 else lambda f, *a: [f(*a)]
    for items, weights in run(window, tmp_path / "c", True):
        assert items == pytest.approx(36)
        for a, b in zip(weights, expected[1], strict=True):
            assert torch.equal(a, b) if after == 2 else torch.allclose(a, b, rtol=1e-5, atol=1e-7)
