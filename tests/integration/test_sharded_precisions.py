"""Precisions that change layers or parameters, under sharding: two ranks compute what replicas do."""

import importlib.util

import pytest
import torch

from drivetrain import Accelerator, AORecipeKwargs, PureBF16Kwargs

needed = [name for name in ("drivetrain_fsdp", "drivetrain_torchao") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(needed), reason=f"needs {', '.join(needed)}")


def train(backend, precision, handler):
    """Losses of four steps over the rows of two ranks, and what a weight is."""
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True,
        backend=backend,
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        kwargs_handlers=[handler],
    )
    layers = [torch.nn.Linear(64, 64) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    loader = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=16 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
    losses = []
    for _ in range(2):
        for x in loader:
            with accelerator.accumulate(model):
                loss = model(x).pow(2).mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    kinds = {type(m).__name__ for m in accelerator.unwrap_model(model)}
    accelerator.end_training()
    return losses, kinds


@pytest.mark.parametrize("gathered", [False, True])
def test_8_bit_layers(workers, gathered):
    """Weights are gathered in 8 bits, or not."""
    sharded = AORecipeKwargs(emulate=True, enable_fsdp_float8_all_gather=gathered)
    results = workers(2).run(train, "fsdp", "fp8", sharded)
    replicated = workers(2).run(train, "ddp", "fp8", AORecipeKwargs(emulate=True))
    for losses, kinds in results:
        assert any("Float8Linear" in kind for kind in kinds), kinds
        assert losses[-1] < losses[0]
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(replicated[0][0]), rtol=0.02, atol=0)


@pytest.mark.parametrize("weights", ["master", "stochastic"])
def test_bf16_weights(workers, weights):
    """The optimizer's float32 weights are shards, too."""
    results = workers(2).run(train, "fsdp", "pure-bf16", PureBF16Kwargs(weights=weights))
    replicated = workers(2).run(train, "ddp", "pure-bf16", PureBF16Kwargs(weights=weights))
    for losses, _ in results:
        assert losses[-1] < losses[0]
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(replicated[0][0]), rtol=0.02, atol=0)
