"""Training on a batch while other ranks have none: an error, where it would be a wait for ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.errors import DistributedOperationError

if TYPE_CHECKING:
    from drivetrain._engine.accumulation import Accumulator

__all__ = ["UnevenGuard"]


class UnevenGuard:
    """Watches models while a loader hands out batches that not all ranks have.

    A backend may communicate in the forward already, so that is where training is stopped; evaluation goes on.

    Args:
        accumulator: Knows whether ranks are joined.
        models: The prepared models; the list may grow.
    """

    def __init__(self, accumulator: Accumulator, models: Sequence[torch.nn.Module]) -> None:
        self._accumulator = accumulator
        self._models = models
        self._handles: dict[int, list[Any]] = {}

    def watch(self, loader: Any) -> None:
        """From now on, ``loader``'s batches aren't had by all ranks."""

        def check(module: torch.nn.Module, inputs: Any) -> None:
            if not (module.training and torch.is_grad_enabled()) or self._accumulator.joining or loader.batch is None:
                return
            ranks = ", ".join(map(str, loader.batch.absent))
            raise DistributedOperationError(
                f"Rank {ranks} has no batch {loader.batch.index} of this epoch, and the ranks that have one would wait for its gradients for ever. "
                "Train inside `with accelerator.join_uneven_inputs([model]):`, or let all ranks have the same number of batches "
                "(DataLoaderConfiguration(even_batches=True))."
            )

        self._handles[id(loader)] = [model.register_forward_pre_hook(check, prepend=True) for model in self._models]

    def release(self, loader: Any) -> None:
        """``loader``'s loop has ended."""
        for handle in self._handles.pop(id(loader), ()):
            handle.remove()
