"""Sharded state: stored by its shards, weights as other tools read them, readable at any world size and in any layout."""

import itertools
import json
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from drivetrain.checkpoint import CheckpointManager, verify
from drivetrain.checkpoint.layout import Piece, make_plan, piece_key
from drivetrain.checkpoint.store import TensorStore, pieces_metadata
from drivetrain.errors import CheckpointError, UnsupportedError
from drivetrain.interfaces import TensorReader
from drivetrain.specs import ProcessInfo
from drivetrain.testing.sessions import PlainSession

ROWS = 12
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight"]


def process():
    if not dist.is_initialized():
        return ProcessInfo()
    rank, size = dist.get_rank(), dist.get_world_size()
    return ProcessInfo(rank=rank, world_size=size, local_rank=rank, local_world_size=size, cluster="test")


def build(mesh_shape=None, seed=0):
    """A model with rows that no number of ranks divides, one of them a single row; sharded if there are ranks."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1), torch.nn.Linear(1, 3, bias=False)
    )
    if dist.is_initialized():
        shape = mesh_shape or (dist.get_world_size(),)
        names = ("replicate", "shard")[-len(shape) :]
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return PlainSession([model], [optimizer], process=process())


def train(session, steps):
    losses = []
    (model,), ((optimizer, _),) = session.models, session.optimizers
    rank, size = session.process.rank, session.process.world_size
    for _ in range(steps):
        x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(session.step))[rank::size]
        loss = model(x).square().sum() * size / ROWS
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        session.step += 1
        total = loss.detach() / size
        if size > 1:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses


def save(directory, steps, mesh_shape=None, blocking=True):
    session = build(mesh_shape)
    losses = train(session, steps)
    manager = CheckpointManager(session)
    manager.save_state(directory, blocking=blocking)
    after = train(session, 3)
    manager.close()
    return losses, after


def load(directory, steps, mesh_shape=None, warm=True):
    session = build(mesh_shape, seed=9)
    if warm:
        train(session, 1)
    manager = CheckpointManager(session)
    manager.load_state(directory)
    losses = train(session, steps)
    manager.close()
    return losses


def runner(workers, size):
    return workers(size).run if size > 1 else lambda f, *a: [f(*a)]


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("blocking", [True, False])
def test_sharded_training_resumes_bit_for_bit(ranks, tmp_path, blocking, warm):
    losses, after = ranks.run(save, tmp_path / "c", 3, None, blocking)[0]
    assert losses + after == ranks.run(lambda: train(build(), 6))[0]
    assert ranks.run(load, tmp_path / "c", 3, None, warm)[0] == after


@pytest.mark.parametrize(
    ("before", "after"), [((2,), (1,)), ((2,), (3,)), ((1,), (2,)), ((3,), (2,)), ((1, 2), (2, 1)), ((2, 1), (3,))]
)
def test_any_layout_goes_on_at_any_other(workers, tmp_path, before, after):
    expected = train(build(), 6)
    runner(workers, math.prod(before))(save, tmp_path / "c", 3, before if math.prod(before) > 1 else None)
    for losses in runner(workers, math.prod(after))(load, tmp_path / "c", 3, after if math.prod(after) > 1 else None):
        assert losses == pytest.approx(expected[3:], rel=1e-5)


def test_weights_are_whole_for_other_tools_and_moments_stay_with_their_ranks(ranks, tmp_path):
    path = tmp_path / "c"
    ranks.run(save, path, 3)
    assert {p.name for p in path.iterdir()} == {
        "manifest.json", "state.json", "rank_00000.json", "rank_00001.json", "model.safetensors",
        "optimizer.rank_00000.safetensors", "optimizer.rank_00001.safetensors",
    }  # fmt: skip
    assert verify(path).ok
    session = build()
    session.models[0].load_state_dict(load_file(path / "model.safetensors"))
    stored = 0
    for rank in range(2):
        with safe_open(path / f"optimizer.rank_0000{rank}.safetensors", "pt") as file:
            table = json.loads(file.metadata()["drivetrain.pieces"])
            for key in file.keys():  # noqa: SIM118
                stored += math.prod(file.get_slice(key).get_shape())
                assert key in table
    assert stored == 2 * sum(p.numel() for p in session.models[0].parameters())


def test_hybrid_shards_are_written_once(workers, tmp_path):
    workers(2).run(save, tmp_path / "c", 2, (2, 1))
    names = [p.name for p in (tmp_path / "c").glob("optimizer*.safetensors")]
    assert names == ["optimizer.safetensors"]


def test_tensors_sharded_by_columns_and_twice(workers, tmp_path):
    """What tensor parallel models hold; saved under one layout and read under another."""

    class Holder:
        def __init__(self, placements, fill):
            from torch.distributed.tensor import distribute_tensor

            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
            self.full = torch.arange(35.0).reshape(5, 7) if fill else torch.zeros(5, 7)
            model = torch.nn.Module()
            model.weight = torch.nn.Parameter(distribute_tensor(self.full, mesh, placements))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
            model.weight.grad = distribute_tensor(self.full * 2, mesh, placements)
            optimizer.step()
            self.session = PlainSession([model], [optimizer], process=process())

        def values(self):
            (model,), ((optimizer, _),) = self.session.models, self.session.optimizers
            momentum = optimizer.state[model.weight]["momentum_buffer"]
            return model.weight.full_tensor().detach(), momentum.full_tensor(), momentum.placements

    def run(fill, kind):
        from torch.distributed.tensor import Replicate, Shard

        placements = [Replicate() if kind is None else Shard(kind)]
        holder = Holder(placements, fill)
        manager = CheckpointManager(holder.session)
        if fill:
            manager.save_state(tmp_path / "c")
        else:
            manager.load_state(tmp_path / "c")
            weight, momentum, found = holder.values()
            assert torch.equal(weight, torch.arange(35.0).reshape(5, 7))
            assert torch.equal(momentum, 2 * weight)
            assert list(found) == placements
        manager.close()

    for before in (0, 1, None):
        workers(2).run(run, True, before)
        for size, after in ((2, 1), (2, 0), (3, 1), (3, None)):
            workers(size).run(run, False, after)


def test_a_save_inside_a_window_keeps_sharded_gradients(workers, tmp_path):
    def run(load):
        session = build()
        rank, size = session.process.rank, session.process.world_size

        def micro(step):
            x = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))[rank::size]
            session.models[0](x).square().sum().backward()

        manager = CheckpointManager(session)
        if load:
            manager.load_state(tmp_path / "c")
        else:
            micro(0)
            session.mid_window = True
            manager.save_state(tmp_path / "c")
        micro(1)
        grads = [p.grad.full_tensor() if size > 1 else p.grad for p in session.models[0].parameters()]
        manager.close()
        return [g.clone() * size for g in grads]  # sums over ranks: FSDP takes the mean

    expected = workers(2).run(run, False)[0]
    for size in (1, 2, 3):
        for a, b in zip(runner(workers, size)(run, True)[0], expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


# -- the arithmetic, without processes -------------------------------------------------------------------------------------


@st.composite
def partitions(draw):
    """A shape, cut into a grid of blocks that several ranks hold."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    blocks = [((), ())]
    for cut in cuts:
        blocks = [((*o, a), (*s, b - a)) for o, s in blocks for a, b in itertools.pairwise(cut)]
    world = draw(st.integers(1, 5))
    holders = [draw(st.sets(st.integers(0, world - 1), min_size=1)) for _ in blocks]
    return shape, blocks, world, holders


@settings(max_examples=200, deadline=None)
@given(partitions(), st.data())
def test_every_block_is_written_once_and_any_region_is_read_back(partition, data):
    shape, blocks, world, holders = partition
    whole = torch.arange(math.prod(shape)).reshape(shape)
    held = {r: [] for r in range(world)}
    for (offsets, sizes), who in zip(blocks, holders, strict=True):
        for rank in who:
            held[rank].append(Piece("optimizer", "w", "int64", shape, offsets, sizes))
    files = []
    for rank in range(world):
        pieces = make_plan(held, rank=rank, models=()).pieces.get("optimizer", [])
        tensors = {piece_key(p): whole[tuple(map(slice, p.offsets, map(sum, zip(p.offsets, p.sizes))))] for p in pieces}  # noqa: B905
        files.append(TensorReader(tensors, pieces_metadata(pieces)))
    assert sum(len(f.names()) for f in files) == len(blocks)
    store = TensorStore(files)
    assert torch.equal(store.read("w"), whole)
    start = [data.draw(st.integers(0, n)) for n in shape]
    size = [data.draw(st.integers(0, n - s)) for n, s in zip(shape, start, strict=True)]
    region = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
    assert torch.equal(store.read("w", start, size), whole[region])
    assert torch.equal(store.read("w", start, size, shared=True), whole[region])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 4 * 10**8), min_size=1, max_size=30), st.integers(1, 8))
def test_replicated_tensors_are_shared_out_evenly(sizes, world):
    pieces = [Piece("model" if i % 2 else "optimizer", f"t{i}", "uint8", (n,), None, (n,)) for i, n in enumerate(sizes)]
    plans = [make_plan(dict.fromkeys(range(world), pieces), rank=r, models=["model"]) for r in range(world)]
    shards = plans[0].models["model"]
    assert all(p.models == plans[0].models for p in plans)
    written = [p.name for plan in plans for p in plan.pieces.get("optimizer", [])]
    assert sorted(written + [n for s in shards for n in s.names]) == sorted(p.name for p in pieces)
    loads = [
        sum(s.nbytes for s in shards if s.owner == r) + sum(p.nbytes for p in plans[r].pieces.get("optimizer", []))
        for r in range(world)
    ]
    biggest = max([s.nbytes for s in shards] + sizes)
    writers = sum(1 for load in loads if load)
    if writers:
        assert max(loads) <= sum(sizes) / min(world, max(1, sum(sizes) // (64 * 10**6))) + biggest


def test_parts_that_nobody_holds_or_that_are_not_in_the_files_are_errors():
    piece = Piece("optimizer", "w", "float32", (4,), (2,), (2,))
    with pytest.raises(UnsupportedError, match="w of optimizer is sharded over processes of several machines"):
        make_plan({0: [piece]}, rank=0, models=())
    store = TensorStore([TensorReader({"w@2": torch.ones(2)}, pieces_metadata([piece]))])
    with pytest.raises(CheckpointError, match="parts of w are not in the checkpoint: 2 of 4"):
        store.read("w")
    with pytest.raises(CheckpointError, match="no tensor 'v'"):
        store.read("v")
    with pytest.raises(CheckpointError, match="table of pieces is damaged"):
        TensorStore([TensorReader({"w@2": torch.ones(2)}, {"drivetrain.pieces": '{"w@2": 3}'})])
