"""A backend that nobody asked for makes way when the model doesn't fit; the numbers stay those of plain PyTorch."""

import logging

import pytest
import torch

from drivetrain import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, PlanningOptions
from drivetrain.errors import ConfigurationError
from drivetrain.testing.training import Case, reference, train

WIDTH = 64


def block():
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * WIDTH, WIDTH))


def run(memory, asked=None):
    """Which backend is there after a model was prepared, and what was said."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("drivetrain").addHandler(handler)
    logging.getLogger("drivetrain").setLevel(logging.INFO)
    try:
        handlers = [] if memory is None else [PlanningOptions(device_memory=memory, headroom=0)]
        accelerator = Accelerator(cpu=True, kwargs_handlers=handlers, **(asked or {}))
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(block() for _ in range(4)))
        data = torch.utils.data.TensorDataset(torch.randn(16, WIDTH), torch.randn(16, WIDTH))
        loader = torch.utils.data.DataLoader(data, batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
        for x, y in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        weights = accelerator.get_state_dict(model)
        facts = accelerator.backend.spec.name, accelerator.backend.describe().get("sharding"), accelerator.explain()
        accelerator.end_training()
        return facts, weights, said
    finally:
        logging.getLogger("drivetrain").removeHandler(handler)


def test_what_fits_stays_and_what_does_not_is_sharded(ranks):
    whole, cut, short = (ranks.run(run, memory) for memory in (None, "2MB", "100kB"))
    for rank in range(2):
        (backend, _, text), _, said = whole[rank]
        assert (backend, said) == ("ddp", [])
        (backend, strategy, text), _, said = cut[rank]
        assert backend == "fsdp"
        assert strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
        assert "planned: the" in " ".join(text.split())
        assert "too large" in text
        (backend, _, _), _, _ = short[rank]
        assert backend == "ddp"
    said = " ".join(s for _, _, told in cut for s in told)
    assert said.count("instead of ddp, the") >= 1
    assert "memory may run out" in " ".join(s for _, _, told in short for s in told)
    for name, value in whole[0][1].items():
        torch.testing.assert_close(cut[0][1][name], value, atol=1e-6, rtol=1e-5)


def test_what_was_asked_for_stays(ranks):
    for (backend, _, _), _, said in ranks.run(run, "2MB", {"backend": "ddp"}):
        assert (backend, said) == ("ddp", [])


@pytest.mark.parametrize(
    ("memory", "strategies"), [("1GB", {"SHARD_GRAD_OP", "NO_SHARD", "FULL_SHARD"}), ("1.5MB", {"FULL_SHARD"})]
)
def test_the_strategy_is_found(ranks, memory, strategies):
    asked = {"fsdp_plugin": FullyShardedDataParallelPlugin(sharding_strategy="auto")}
    found = {strategy for (_, strategy, _), _, _ in ranks.run(run, memory, asked)}
    assert len(found) == 1
    assert found <= strategies


def test_numbers_of_a_strategy_that_was_found(ranks):
    case = Case()

    def make(gradient_accumulation_steps, **kwargs):
        plugin = FullyShardedDataParallelPlugin(sharding_strategy="auto")
        return Accelerator(
            cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=gradient_accumulation_steps, **kwargs
        )

    for result in ranks.run(train, case, make):
        assert result.largest_difference(reference(case, world_size=2)) < 1e-5


def test_a_mesh_says_it_already(ranks):
    def refused():
        plugin = FullyShardedDataParallelPlugin(sharding_strategy="auto")
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(dp_shard_size=2))
        with pytest.raises(ConfigurationError, match="Name a strategy"):
            accelerator.prepare(torch.nn.Linear(2, 2))
        accelerator.end_training()

    ranks.run(refused)
