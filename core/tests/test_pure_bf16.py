"""bf16 weights: float32 steps, what checkpoints hold, rounding by chance."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain import Accelerator, PrecisionKwargs, PureBF16Kwargs
from drivetrain._builtin.pure_bf16 import MASTER, round_by_chance
from drivetrain._plugins import get_registry
from drivetrain.errors import UnsupportedError
from drivetrain.testing.precision import PrecisionConformance


class TestPureBFloat16(PrecisionConformance):
    spec = get_registry().get("precision", "pure-bf16")
    autocast = torch.bfloat16
    tolerance = 5e-2
    closures = False


class TestStochastic(TestPureBFloat16):
    options = {"PureBF16Kwargs": PureBF16Kwargs(weights="stochastic")}
    tolerance = 0.1


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.batch = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.batch(self.norm(self.body(x))))


def start(weights="master", optimizer=torch.optim.AdamW, keep=(), **settings):
    torch.manual_seed(0)
    handlers = [PureBF16Kwargs(weights=weights), PrecisionKwargs(keep_in_fp32=list(keep))]
    accelerator = Accelerator(cpu=True, mixed_precision="pure-bf16", kwargs_handlers=handlers)
    model = Net()
    return accelerator, *accelerator.prepare(model, optimizer(model.parameters(), **settings))


def train(accelerator, model, optimizer, steps):
    for _ in range(steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(accelerator.step))
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()


def test_what_is_kept_in_float32():
    accelerator, model, _ = start(keep=["norm", "head"])
    dtypes = {name.split(".")[0]: p.dtype for name, p in model.named_parameters()}
    assert dtypes == {"body": torch.bfloat16, "norm": torch.float32, "batch": torch.float32, "head": torch.float32}
    assert model.batch.running_mean.dtype is torch.float32
    assert model(torch.ones(2, 8)).dtype is torch.float32
    text = " ".join(accelerator.explain().split())
    assert "head float32 (keep_in_fp32)" in text and "float32 weights in the optimizer's state" in text


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_small_steps_add_up_as_in_float32(optimizer, settings):
    """A hundred steps of 1/10000 of the weight: lost one by one in bf16, and 1 % together."""
    accelerator, model, prepared = start(optimizer=optimizer, lr=1e-4, weight_decay=0.0, **settings)
    with torch.no_grad():
        model.head.weight.fill_(1.0)
    for _ in range(100):
        model.head.weight.grad = torch.ones_like(model.head.weight)
        prepared.step()
    assert model.head.weight.dtype is torch.bfloat16
    assert model.head.weight.float().mean().item() == pytest.approx(0.99, abs=2e-3)
    master = prepared.state[model.head.weight][MASTER]
    assert master.dtype is torch.float32 and master.mean().item() == pytest.approx(0.99, abs=1e-5)


def test_masters_follow_weights_that_are_changed_from_outside():
    accelerator, model, optimizer = start(optimizer=torch.optim.SGD, lr=1e-4)
    train(accelerator, model, optimizer, 2)
    with torch.no_grad():
        model.head.weight.fill_(2.0)
    model.head.weight.grad = torch.zeros_like(model.head.weight)
    optimizer.step()
    assert torch.equal(model.head.weight, torch.full_like(model.head.weight, 2.0))


@pytest.mark.parametrize("weights", ["master", "stochastic"])
def test_a_resumed_training_is_the_same_bit_for_bit(tmp_path, weights):
    first = start(weights)
    train(*first, 3)
    first[0].save_state(tmp_path / "state")
    train(*first, 5)
    second = start(weights)
    second[0].load_state(tmp_path / "state")
    train(*second, 5)
    for a, b in zip(first[1].parameters(), second[1].parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(first[1].parameters(), second[1].parameters(), strict=True):
        mine, theirs = first[2].state[a], second[2].state[b]
        assert mine.keys() == theirs.keys() and (MASTER in mine) == (weights == "master" and a.dtype is torch.bfloat16)
        assert all(torch.equal(mine[k], theirs[k]) and mine[k].dtype is torch.float32 for k in mine)


def test_an_optimizers_own_state_dict_keeps_float32():
    accelerator, model, optimizer = start()
    train(accelerator, model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    other = start()
    other[2].load_state_dict(saved)
    for s in other[2].state.values():
        assert {v.dtype for v in s.values()} == {torch.float32}


def test_a_closure_is_refused():
    _, model, optimizer = start()
    with pytest.raises(UnsupportedError, match="step without a closure"):
        optimizer.step(lambda: model(torch.ones(2, 8)).mean())


@settings(max_examples=30)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20), st.integers(0, 99)
)
def test_rounding_gives_a_neighbour(values, seed):
    given = torch.tensor(values, dtype=torch.float32)
    rounded = round_by_chance(given, torch.Generator().manual_seed(seed)).float()
    below = (given.view(torch.int32) & -(1 << 16)).view(torch.float32)
    above = ((below.view(torch.int32)) + (1 << 16)).view(torch.float32)
    exact = given == below
    assert bool(((rounded == below) | (~exact & ((rounded == above) | (above.isnan() | above.isinf())))).all())


def test_rounding_leaves_what_is_not_finite():
    values = torch.tensor([float("inf"), -float("inf"), float("nan")])
    rounded = round_by_chance(values, torch.Generator())
    assert rounded[:2].tolist() == [float("inf"), -float("inf")] and rounded[2].isnan()


def on_ranks(weights):
    """Weights after a training in which the ranks have different rows."""
    torch.manual_seed(3)
    accelerator, model, optimizer = start(weights)
    for i in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * i + accelerator.process_index))
        accelerator.backward(model(x).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    result = [p.detach() for p in accelerator.unwrap_model(model).parameters()]
    accelerator.end_training()
    return result


@pytest.mark.parametrize("weights", ["master", "stochastic"])
def test_ranks_stay_equal(workers, weights):
    first, second = workers(2).run(on_ranks, weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
