"""Activations that are computed again: the same numbers, in less memory, under any backend."""

import copy
import gc

import pytest
import torch

from drivetrain import Accelerator, ActivationCheckpointing, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from drivetrain.errors import ConfigurationError
from drivetrain.memory import checkpoint_activations
from drivetrain.testing.training import whole


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, x, *, scale=1.0):
        return x + scale * self.dropout(self.second(torch.nn.functional.gelu(self.first(x))))


class Model(torch.nn.Module):
    def __init__(self, width=8, depth=4):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))
        self.head = torch.nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


BACKENDS = {
    "single": {"backend": "single"},
    "ddp": {"backend": "ddp"},
    "fsdp": {"fsdp_plugin": FullyShardedDataParallelPlugin()},
    **{f"ZeRO {stage}": {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=stage)} for stage in range(4)},
}


def train(settings, options, **kwargs):
    handlers = [] if options is None else [ActivationCheckpointing(**options)]
    accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, **settings, **kwargs)
    model = Model()
    names = list(model.state_dict())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    generator = torch.Generator().manual_seed(accelerator.process_index)
    torch.manual_seed(accelerator.process_index)  # for dropout
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8, generator=generator)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    state = accelerator.backend.model_state(model)
    assert list(state) == names
    weights = whole(state)
    accelerator.end_training()
    return losses, weights


CHOICES = [{}, {"every": 2}, {"classes": ["Block"], "keep": "matmuls"}, {"budget": 0.5}, {"offload": True}]


@pytest.mark.parametrize("options", CHOICES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_stay_the_same(workers, backend, options):
    world = 1 if backend == "single" else 2
    plain = workers(world).run(train, BACKENDS[backend], None)
    again = workers(world).run(train, BACKENDS[backend], options)
    for (losses, weights), (our_losses, our_weights) in zip(plain, again, strict=True):
        assert our_losses == losses
        assert all(torch.equal(our_weights[n], w) for n, w in weights.items())


@pytest.mark.parametrize("backend", ["single", "fsdp"])
def test_with_compiled_blocks_and_bf16(workers, backend):
    from drivetrain import TorchDynamoPlugin

    world = 1 if backend == "single" else 2
    compiled = {"dynamo_plugin": TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)}
    plain = workers(world).run(train, BACKENDS[backend], None, mixed_precision="bf16")
    again = workers(world).run(train, BACKENDS[backend], {}, mixed_precision="bf16", **compiled)
    for (losses, _), (our_losses, _) in zip(plain, again, strict=True):
        assert our_losses == pytest.approx(losses, rel=2e-2)


def kept(model, rows):
    """Bytes that are kept from forward to backward."""
    gc.collect()  # what earlier tests left would be freed in between, and be counted
    with torch.profiler.profile(profile_memory=True) as recording:
        out = model(rows).mean()
    events = recording.profiler.kineto_results.events()
    held = sum(e.nbytes() for e in events if e.name() == "[memory]")
    out.backward()
    return held


def test_less_is_kept():
    rows = torch.randn(64, 32)
    everything = kept(Model(32, 8), rows)
    shares = {}
    for name, options in {
        "all": {},
        "half": {"every": 2},
        "matmuls": {"keep": "matmuls"},
        "budget": {"budget": 0.5},
    }.items():
        model = Model(32, 8)
        checkpoint_activations(model, ActivationCheckpointing(**options))
        shares[name] = kept(model, rows) / everything
    assert shares["all"] < 0.25
    assert 0.45 < shares["half"] < 0.65
    assert shares["budget"] == pytest.approx(shares["half"], abs=0.01)
    assert shares["all"] < shares["matmuls"] < 0.8


def test_copies_and_evaluation():
    model = Model()
    checkpoint_activations(model, ActivationCheckpointing())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.blocks[0].first.weight += 1
    rows = torch.randn(2, 8)
    model.eval(), twin.eval()
    assert not torch.equal(model(rows), twin(rows))
    with torch.no_grad():
        assert not model(rows).requires_grad


def test_a_budget_spreads_what_is_kept():
    for budget, number in ((0.0, 8), (0.25, 6), (0.5, 4), (1.0, 0)):
        model = Model(4, 8)
        chosen = checkpoint_activations(model, ActivationCheckpointing(budget=budget))
        assert len(chosen) == number


@pytest.mark.parametrize(
    "make",
    [
        lambda: ActivationCheckpointing(budget=0.5, every=2),
        lambda: ActivationCheckpointing(offload=True, keep="matmuls"),
        lambda: checkpoint_activations(torch.nn.Linear(2, 2), ActivationCheckpointing()),
        lambda: checkpoint_activations(Model(), ActivationCheckpointing(classes=["Layer"])),
    ],
)
def test_what_cannot_be_is_refused(make):
    with pytest.raises(ConfigurationError):
        make()
