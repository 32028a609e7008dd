"""Norms on one device: the numbers of plain autocast, whatever dtype comes in and whichever model it comes from."""

import pytest
import torch
from torch import nn

from drivetrain import Accelerator
from drivetrain.interfaces.norms import keeps_statistics

NORMS = {
    "layer": lambda: nn.LayerNorm(8),
    "rms": lambda: nn.RMSNorm(8),
    "group": lambda: nn.GroupNorm(2, 8),
    "batch": lambda: nn.BatchNorm1d(8),
    "batch without weights": lambda: nn.BatchNorm1d(8, affine=False),
    "instance": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, affine=True), nn.Flatten()),
}


def make(norm):
    """A model that starts and ends with a norm, and one that starts with a norm and is fed by it."""
    torch.manual_seed(0)
    first = nn.Sequential(NORMS[norm](), nn.Linear(8, 8), nn.GELU(), NORMS[norm]())
    return first, nn.Sequential(NORMS[norm](), nn.Linear(8, 4))


def rows(dtype):
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).to(dtype)


def gradients(*models):
    return {f"{i}.{n}": p.grad for i, m in enumerate(models) for n, p in m.named_parameters() if p.grad is not None}


def of_autocast(norm, x, dtype, *, frozen):
    first, second = make(norm)
    first.requires_grad_(not frozen)
    with torch.autocast("cpu", dtype):
        between = first(x)
    with torch.autocast("cpu", dtype):
        loss = second(between.float()).float().pow(2).mean()
    loss.backward()
    return loss.detach(), gradients(first, second)


def of_ours(norm, x, precision, *, frozen):
    accelerator = Accelerator(cpu=True, backend="single", mixed_precision=precision)
    first, second = make(norm)
    first.requires_grad_(not frozen)
    first, second = accelerator.prepare(first, second)
    loss = second(first(x)).pow(2).mean()
    accelerator.backward(loss)
    found = loss.detach(), gradients(first, second)
    accelerator.end_training()
    return found


@pytest.mark.parametrize("frozen", [False, True], ids=["both", "a-frozen-teacher"])
@pytest.mark.parametrize("fed", [torch.float32, torch.bfloat16], ids=["float32-rows", "bfloat16-rows"])
@pytest.mark.parametrize("norm", NORMS)
def test_bf16_is_plain_autocast(norm, fed, frozen):
    loss, expected = of_autocast(norm, rows(fed), torch.bfloat16, frozen=frozen)
    ours, found = of_ours(norm, rows(fed), "bf16", frozen=frozen)
    assert ours == loss
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize("fed", [torch.float32, torch.bfloat16], ids=["float32-rows", "bfloat16-rows"])
@pytest.mark.parametrize("norm", NORMS)
def test_pure_bf16_is_near_to_float32(norm, fed):
    first, second = make(norm)
    reference = second(first(rows(fed).float())).pow(2).mean()
    loss, found = of_ours(norm, rows(fed), "pure-bf16", frozen=False)
    assert loss.item() == pytest.approx(reference.item(), rel=0.02)
    kept = {
        f"{i}.{n}.{p}"
        for i, m in enumerate((first, second))
        for n, module in m.named_modules()
        if keeps_statistics(module)
        for p, _ in module.named_parameters()
    }
    assert {n for n, g in found.items() if g.dtype is torch.float32} == kept
