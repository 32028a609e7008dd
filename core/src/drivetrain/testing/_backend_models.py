"""Trainings of another shape: several models and optimizers, uneven inputs, compiled models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from drivetrain.specs import Capability
from drivetrain.testing._backend_base import BackendKit, check_all_close
from drivetrain.testing._backend_training import TrainingTests
from drivetrain.testing.pytest_plugin import Workers
from drivetrain.testing.training import Case, Result, make_data, make_model, reference, train, whole

__all__ = ["ModelTests"]

_ROWS = 45
_BATCH = 4


def _two_models() -> tuple[list[torch.nn.Module], list[torch.optim.Optimizer]]:
    models = [make_model(), torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))]
    for i, p in enumerate(models[1].parameters()):
        torch.nn.init.constant_(p, 0.1 * (i + 1))
        p.data += 0.01 * torch.arange(p.numel()).view(p.shape)
    return models, [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]


def _losses(models: list[Any], x: torch.Tensor, *, alternate: bool) -> list[torch.Tensor]:
    """A loss through both models; or one for each of them alone."""
    if alternate:
        return [models[0](x).float().pow(2).mean(), mse_loss(models[1](x[:, :3]).float(), x[:, 3:])]
    return [mse_loss(models[1](models[0](x)).float(), x[:, 3:])]


def train_two(kit: BackendKit, steps: int, alternate: bool) -> list[dict[str, torch.Tensor]]:
    """On a rank: two models with an optimizer each, trained together or in turn (as a generator and a discriminator are)."""
    accelerator = kit.make_accelerator(gradient_accumulation_steps=steps)
    plain, given = _two_models()
    loader: Any = torch.utils.data.DataLoader(make_data(_ROWS), batch_size=_BATCH)  # type: ignore[arg-type]
    *models, first, second, loader = accelerator.prepare(*plain, *given, loader)
    optimizers = [first, second]
    for batch in loader:
        if alternate:
            for i, model in enumerate(models):
                with accelerator.accumulate(model):
                    accelerator.backward(_losses(models, batch["x"], alternate=True)[i])
                    optimizers[i].step()
                    optimizers[i].zero_grad()
            continue
        with accelerator.accumulate(*models):
            accelerator.backward(_losses(models, batch["x"], alternate=False)[0])
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    weights = [whole(accelerator.backend.model_state(m)) for m in models]
    accelerator.end_training()
    return weights


def plain_two(steps: int, alternate: bool, world_size: int) -> list[dict[str, torch.Tensor]]:
    """The same by hand."""
    models, optimizers = _two_models()
    x = torch.stack([row["x"] for row in make_data(_ROWS)])
    for rows in x.split(_BATCH * steps * world_size):
        for loss in _losses(models, rows, alternate=alternate):
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [{n: p.detach().clone() for n, p in m.named_parameters()} for m in models]


def train_uneven(kit: BackendKit, case: Case) -> dict[str, Any]:
    """On a rank: whole batches are dealt to the ranks, so that some get one batch less than others."""
    from drivetrain.data import DataLoaderConfiguration

    accelerator = kit.make_accelerator(
        gradient_accumulation_steps=case.accumulation, dataloader_config=DataLoaderConfiguration(even_batches=False)
    )
    model: Any = make_model()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    loader: Any = torch.utils.data.DataLoader(make_data(case.samples), batch_size=case.batch_size)  # type: ignore[arg-type]
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    batches = 0
    for _ in range(case.epochs):
        with accelerator.join_uneven_inputs([model]):
            for batch in loader:
                batches += 1
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.cross_entropy(model(batch["x"]).float(), batch["y"])
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    weights = whole(accelerator.backend.model_state(model))
    facts = {"weights": weights, "steps": accelerator.step, "batches": batches, "rate": optimizer.param_groups[0]["lr"]}
    accelerator.end_training()
    return facts


def train_compiled(kit: BackendKit, case: Case) -> tuple[Result, int]:
    """On a rank: the training with ``torch.compile``, and how many graphs were compiled."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    result = train(case, lambda **kwargs: kit.make_accelerator(dynamo_backend="eager", **kwargs))
    graphs = int(counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    return result, graphs


class ModelTests(TrainingTests):
    """Several models, uneven inputs, compiled models."""

    @pytest.mark.parametrize("alternate", [False, True], ids=["together", "in turn"])
    @pytest.mark.parametrize("steps", [1, 4])
    def test_two_models_and_two_optimizers(
        self, workers: Workers, world_size: int, steps: int, alternate: bool
    ) -> None:
        """Declared `Capability.MULTIPLE_MODELS`: trained through one loss, and each with a loss and windows of its own."""
        if not self.has(Capability.MULTIPLE_MODELS):
            return
        expected = plain_two(steps, alternate, world_size)
        for rank, result in enumerate(self.run(workers, world_size, train_two, steps, alternate)):
            for i, (ours, theirs) in enumerate(zip(result, expected, strict=True)):
                check_all_close(ours, theirs, self.tolerance["fp32"] * 10, f"rank {rank}: model {i + 1} of 2")

    @pytest.mark.parametrize("steps", [1, 2, 3])
    def test_uneven_inputs(self, workers: Workers, world_size: int, steps: int) -> None:
        """Declared `Capability.UNEVEN_INPUTS`: ranks run out of batches at different times.

        Windows end together, no row is lost, and afterwards every rank has the weights, the learning rate and the number of steps of the one
        that went furthest.
        """
        if not self.has(Capability.UNEVEN_INPUTS) or world_size == 1:
            return
        size = 4
        row = size * world_size
        full = 4 * row  # then one batch of rank 0's and nothing for the others
        case = Case(samples=full + size, batch_size=size, accumulation=steps, optimizer="sgd", max_norm=None)
        ends = [*range(steps * row, full, steps * row), full, full + size]
        expected = reference(case, world_size, windows=list(zip([0, *ends], ends, strict=False)))
        results = self.run(workers, world_size, train_uneven, case)
        assert [r["batches"] for r in results] == [10, *[8] * (world_size - 1)], "the loader didn't deal uneven batches"
        for rank, result in enumerate(results):
            assert result["steps"] == expected.steps, (
                f"rank {rank} counts {result['steps']} steps, not {expected.steps}"
            )
            assert result["rate"] == results[0]["rate"], f"rank {rank} goes on with another learning rate than rank 0"
            who = f"rank {rank}: after uneven inputs"
            check_all_close(result["weights"], expected.weights, self.tolerance["fp32"] * 10, who)

    def test_compiled_models(self, workers: Workers, world_size: int) -> None:
        """Declared `Capability.COMPILE`: the same numbers, and the model is compiled."""
        if not self.has(Capability.COMPILE):
            return
        case = Case(accumulation=2, epochs=1)
        expected = reference(case, world_size)
        for rank, (result, graphs) in enumerate(self.run(workers, world_size, train_compiled, case)):
            self.check(result, expected, self.tolerance["fp32"], f"rank {rank} of {world_size}, compiled")
            assert graphs, f"rank {rank}: nothing was compiled"
