"""Norms in every precision on every backend: what comes first, what gets another model's output, what is kept in float32."""

import itertools

import pytest
import torch
from torch import nn

from drivetrain import Accelerator, PrecisionKwargs
from drivetrain.errors import UnsupportedError

NORMS = {
    "layer": lambda: nn.LayerNorm(8),
    "rms": lambda: nn.RMSNorm(8),
    "group": lambda: nn.GroupNorm(2, 8),
    "batch": lambda: nn.BatchNorm1d(8),
    "instance": lambda: _by_channel(nn.InstanceNorm1d(2, affine=True)),
    "instance with statistics": lambda: _by_channel(nn.InstanceNorm1d(2, affine=True, track_running_stats=True)),
}
#: How far losses may be from float32's.
APART = {"no": 1e-6, "bf16": 0.02, "pure-bf16": 0.02, "fp16": 0.02}


def _by_channel(norm):
    return nn.Sequential(nn.Unflatten(1, (2, 4)), norm, nn.Flatten())


def make(norm):
    """A norm first, another model that starts with a norm after it."""
    torch.manual_seed(0)
    first = nn.Sequential(NORMS[norm](), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), NORMS[norm]())
    second = nn.Sequential(NORMS[norm](), nn.Linear(8, 8), NORMS[norm](), nn.Linear(8, 4))
    return first, second


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 8, generator=generator) for _ in range(3)]


def plain(norm):
    first, second = make(norm)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.05)
    losses = []
    for x in batches():
        loss = second(first(x)).pow(2).mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def losses_of(backend, precision, norm, keep=()):
    handlers = [PrecisionKwargs(keep_in_fp32=list(keep))] if precision != "no" else []
    accelerator = Accelerator(cpu=True, backend=backend, mixed_precision=precision, kwargs_handlers=handlers)
    first, second = make(norm)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.05)
    first, second, optimizer = accelerator.prepare(first, second, optimizer)
    losses = []
    for x in batches():
        loss = second(first(x)).pow(2).mean()  # the same rows on every rank
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return losses


def all_losses(precision):
    return {
        (backend, norm): losses_of(backend, precision, norm)
        for backend, norm in itertools.product(("ddp", "fsdp"), NORMS)
    }


@pytest.mark.parametrize("precision", ["no", "bf16", "pure-bf16", "fp16"])
def test_every_norm_trains(ranks, precision):
    for found in ranks.run(all_losses, precision):
        for (backend, norm), losses in found.items():
            fit = pytest.approx(plain(norm), rel=APART[precision])
            if precision != "fp16":  # in fp16 a first step may overflow, and is left out
                assert losses == fit, (backend, norm)
            else:
                assert losses[0] == pytest.approx(plain(norm)[0], rel=APART[precision]), (backend, norm)


class Seen(nn.Module):
    """Notes the dtype that its weight has while it computes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dtypes = set()

    def forward(self, x):
        self.dtypes.add((x.dtype, self.linear.weight.dtype))
        return self.linear(x)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.heads = nn.ModuleList([Seen(), Seen()])

    def forward(self, x):
        return sum(head(self.stem(x)) for head in self.heads)


def seen_dtypes(backend, precision, keep):
    handlers = [PrecisionKwargs(keep_in_fp32=keep)]
    accelerator = Accelerator(cpu=True, backend=backend, mixed_precision=precision, kwargs_handlers=handlers)
    model = Heads()
    found = [head.dtypes for head in model.heads]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 8)).sum())
    optimizer.step()
    gradients = {n.removeprefix("module."): p.grad.dtype for n, p in model.named_parameters()}
    accelerator.end_training()
    return found, gradients


@pytest.mark.parametrize("keep", [["heads.*"], ["heads"], ["Seen"]], ids=lambda k: k[0])
@pytest.mark.parametrize("precision", ["bf16", "pure-bf16"])
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_what_is_kept_computes_in_float32_with_float32_weights(ranks, backend, precision, keep):
    for found, gradients in ranks.run(seen_dtypes, backend, precision, keep):
        assert found == [{(torch.float32, torch.float32)}] * 2
        assert gradients["heads.0.linear.weight"] is torch.float32


def test_a_batch_norm_alone_trains(ranks):
    def run():
        accelerator = Accelerator(cpu=True, backend="fsdp", mixed_precision="bf16")
        model = nn.BatchNorm1d(8)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        accelerator.backward(model(batches()[0]).pow(2).mean())
        optimizer.step()
        accelerator.end_training()

    ranks.run(run)


def test_a_kept_module_whose_weight_is_gathered_elsewhere_is_refused(ranks):
    def run():
        handlers = [PrecisionKwargs(keep_in_fp32=["2"])]
        accelerator = Accelerator(cpu=True, backend="fsdp", mixed_precision="bf16", kwargs_handlers=handlers)
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        model[2].weight = model[0].weight
        with pytest.raises(UnsupportedError, match=r"2 of Sequential is to compute in float32 and shares a parameter"):
            accelerator.prepare(model)
        accelerator.end_training()

    ranks.run(run)
