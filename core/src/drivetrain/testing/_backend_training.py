"""Numbers: a training under the backend equals one in plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain.testing._backend_base import BackendKit, check_close
from drivetrain.testing.pytest_plugin import Workers
from drivetrain.testing.training import Case, Result, reference, train

__all__ = ["TrainingTests"]


def run_case(kit: BackendKit, case: Case) -> Result:
    """On a rank: train."""
    return train(case, kit.make_accelerator)


class TrainingTests(BackendKit):
    """Losses, gradients, norms, rates and weights."""

    def check(self, got: Result, expected: Result, tolerance: float, who: str) -> None:
        """Compare field by field, so that the message says what differs first."""
        assert got.steps == expected.steps, f"{who}: {got.steps} optimizer steps, and {expected.steps} in plain PyTorch"
        for name in ("losses", "rates", "norms"):
            ours, theirs = torch.tensor(getattr(got, name)), torch.tensor(getattr(expected, name))
            assert ours.shape == theirs.shape, f"{who}: {len(ours)} {name}, and {len(theirs)} in plain PyTorch"
            check_close(ours, theirs, 1e-9 if name == "rates" else tolerance, f"{who}: {name} by window")
        for name in ("gradients", "weights"):
            ours, theirs = getattr(got, name), getattr(expected, name)
            assert list(ours) == list(theirs), f"{who}: the names of {name} are {list(ours)}, not {list(theirs)}"
            for key in ours:
                check_close(ours[key], theirs[key], tolerance, f"{who}: {name} of {key}")

    def test_training_equals_plain_pytorch(self, workers: Workers, situation: dict[str, Any]) -> None:
        """Losses, gradient norms and learning rates of each window, first gradients, final weights; on every rank."""
        settings = dict(situation)
        world_size, precision = settings.pop("world_size"), settings.pop("precision")
        case = Case(**settings, accelerator={"mixed_precision": precision})
        dtype = self.autocast.get(precision)
        expected = reference(case, world_size, autocast=None if dtype is None else getattr(torch, dtype))
        results = self.run(workers, world_size, run_case, case)
        for rank, result in enumerate(results):
            self.check(result, expected, self.tolerance[precision], f"rank {rank} of {world_size}")
            assert all(torch.equal(w, results[0].weights[n]) for n, w in result.weights.items()), (
                f"the weights of rank {rank} aren't those of rank 0"
            )
