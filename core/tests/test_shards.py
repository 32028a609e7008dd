"""Flat shards: state that engines cut anywhere is stored where it is, and read in any other layout."""

import itertools
import json
import math

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from drivetrain.checkpoint import CheckpointManager, verify
from drivetrain.interfaces import Shards
from drivetrain.interfaces.backend import Backend
from drivetrain.specs import ProcessInfo
from drivetrain.testing.sessions import PlainSession, plain_backend

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@given(shapes, st.lists(st.integers(0, 300), max_size=4))
def test_ranges_are_cut_into_disjoint_rectangles(shape, cuts):
    count = math.prod(shape)
    whole = torch.arange(float(count)).reshape(shape)
    edges = [0, *sorted(c % (count + 1) for c in cuts), count]
    again = torch.full(shape, -1.0)
    for start, stop in itertools.pairwise(edges):
        shards = Shards.of_range(whole.flatten()[start:stop], start=start, shape=shape)
        assert torch.equal(shards.flat(), whole.flatten()[start:stop])
        assert len(shards.blocks) <= max(2 * len(shape) - 1, 1)
        for block in shards.blocks:
            region = tuple(slice(o, o + n) for o, n in zip(block.offsets, block.values.shape, strict=True))
            assert bool((again[region] == -1).all())
            again[region] = block.values
    assert torch.equal(again, whole)


def test_like_reads_the_same_places():
    whole = torch.arange(12.0).reshape(3, 4)
    shards = Shards.of_range(torch.zeros(7), start=3, shape=(3, 4))
    read = shards.like(
        lambda offsets, sizes: whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    )
    assert torch.equal(read.flat(), whole.flatten()[3:10])
    assert torch.equal(read.full_tensor().flatten(), torch.tensor([0.0] * 3 + [*range(3, 10)] + [0.0] * 2))


# -- through checkpoints ---------------------------------------------------------------------------------------------------


def process():
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return ProcessInfo(rank=rank, world_size=size, local_rank=rank, local_world_size=size, cluster="test")


class FlatBackend(Backend):
    """Whole parameters, and an optimizer of this rank's range of all of them joined: as ZeRO's first stage."""

    def setup_range(self, model):
        self.parameters = list(model.parameters())
        joined = parameters_to_vector(self.parameters).detach()
        edge = joined.numel() // self.context.process.world_size
        rank, last = self.context.process.rank, self.context.process.world_size - 1
        self.start, stop = rank * edge, joined.numel() if rank == last else (rank + 1) * edge
        self.flat = joined[self.start : stop].clone()
        return torch.optim.AdamW([self.flat], lr=0.05)

    def shards(self, flat):
        """A tensor as long as the range, by parameter."""
        result, position = {}, 0
        for parameter in self.parameters:
            first = min(max(self.start - position, 0), parameter.numel())
            last = min(max(self.start + len(flat) - position, 0), parameter.numel())
            values = flat[position + first - self.start : position + last - self.start] if first < last else flat[:0]
            result[parameter] = Shards.of_range(values, start=first, shape=parameter.shape)
            position += parameter.numel()
        return result

    def join(self, values):
        return torch.cat([values[p].flat() for p in self.parameters])

    def model_state(self, model):
        shards = self.shards(self.flat)
        return {name: shards[p] for name, p in model.named_parameters()}

    def load_model_state(self, model, state, *, strict=True):
        by_parameter = {p: state[name] for name, p in model.named_parameters()}
        self.flat.copy_(self.join(by_parameter))
        with torch.no_grad():
            for parameter, value in by_parameter.items():
                parameter.copy_(value.full_tensor())
        return [], []

    def state_layout(self, parameter):
        return self.shards(self.flat)[parameter]

    def optimizer_state(self, optimizer, models):
        names = self.parameter_names(models)
        state = {names[id(p)]: {} for p in self.parameters}
        for key, value in optimizer.state[self.flat].items():
            parts = self.shards(value) if value.ndim else dict.fromkeys(self.parameters, value)
            for parameter, part in parts.items():
                state[names[id(parameter)]][key] = part
        (group,) = optimizer.param_groups
        return {"state": state, "param_groups": [{**group, "params": [names[id(p)] for p in self.parameters]}]}

    def load_optimizer_state(self, optimizer, models, state):
        names = self.parameter_names(models)
        values = {p: state["state"][names[id(p)]] for p in self.parameters}
        first = values[self.parameters[0]]
        optimizer.state[self.flat] = {
            key: self.join({p: v[key] for p, v in values.items()}) if isinstance(value, Shards) else value
            for key, value in first.items()
        }

    def step(self, optimizer):
        joined = parameters_to_vector([p.grad for p in self.parameters])
        self.flat.grad = joined[self.start : self.start + len(self.flat)].clone()
        optimizer.step()
        whole = torch.zeros_like(joined)
        whole[self.start : self.start + len(self.flat)] = self.flat
        if dist.is_initialized():
            dist.all_reduce(whole)
        vector_to_parameters(whole, self.parameters)


def build(seed=0, plain=False):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    if plain:
        return PlainSession([model], [torch.optim.AdamW(model.parameters(), lr=0.05)])
    base = plain_backend(process())
    backend = FlatBackend(base.spec, base.context)
    return PlainSession([model], [backend.setup_range(model)], process=process(), backend=backend)


def train(session, steps):
    """Every rank has all rows: the numbers are those of one process."""
    (model,), ((optimizer, _),) = session.models, session.optimizers
    for _ in range(steps):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(session.step))
        model.zero_grad()
        model(x).square().mean().backward()
        session.backend.step(optimizer) if isinstance(session.backend, FlatBackend) else optimizer.step()
        session.step += 1
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def save(directory):
    session = build()
    train(session, 3)
    manager = CheckpointManager(session)
    manager.save_state(directory)
    manager.close()


def load(directory, plain=False):
    session = build(seed=9, plain=plain)
    manager = CheckpointManager(session)
    manager.load_state(directory)
    manager.close()
    return train(session, 3)


def test_flat_shards_go_on_in_any_layout(workers, tmp_path):
    expected = train(build(plain=True), 6)
    path = tmp_path / "c"
    workers(2).run(save, path)
    assert verify(path).ok
    results = [*workers(2).run(load, path), *workers(3).run(load, path), load(path), load(path, plain=True)]
    for result in results:
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value)


def test_weights_are_whole_and_each_rank_stores_its_part_of_the_moments(ranks, tmp_path):
    path = tmp_path / "c"
    ranks.run(save, path)
    trained = train(build(plain=True), 3)
    weights = load_file(path / "model.safetensors")
    assert weights.keys() == trained.keys()
    for name, value in trained.items():
        torch.testing.assert_close(weights[name], value)
    stored = []
    for rank in range(2):
        with safe_open(path / f"optimizer.rank_0000{rank}.safetensors", "pt") as file:
            assert json.loads(file.metadata()["drivetrain.pieces"])
            stored.append(sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys()))  # noqa: SIM118
    total = sum(p.numel() for p in trained.values())
    assert sum(stored) == 2 * total
    assert stored == [2 * (total // 2), 2 * (total - total // 2)]
