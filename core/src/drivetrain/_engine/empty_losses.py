"""Losses over no items: they must be finite, since NaN times zero is NaN in all gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain._engine.accumulation import Accumulator

__all__ = ["EmptyLosses"]

_TEXT = (
    "backward(loss, weight=0): the loss over no items is {}, which would make all gradients NaN. Make it finite: sum / max(items, 1), "
    "or the sum with backward(sum, weight=items, reduction='sum')."
)


class EmptyLosses:
    """Looks at losses that are weighted with zero.

    Args:
        accumulator: Whose losses.
    """

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator
        self._found: torch.Tensor | None = None  # whether one was not finite, in this window
        self._before: Any = None  # the same of the window before, being read

    def check(self, loss: torch.Tensor, weight: Any) -> None:
        """Check one. Weights on an accelerator aren't waited for: what is found is told when the next window ends.

        Raises:
            ConfigurationError: If it isn't finite.
        """
        if not isinstance(weight, torch.Tensor) or weight.device.type == "cpu":
            if not weight and not bool(loss.isfinite().all()):
                raise ConfigurationError(_TEXT.format(float(loss.detach().sum())))
            return
        found = (weight == 0).reshape(()).logical_and(loss.detach().isfinite().all().logical_not())
        self._found = found if self._found is None else self._found.logical_or(found)
        if self._accumulator.sync_gradients:
            if self._before is not None and self._before.result()[0]:
                raise ConfigurationError(_TEXT.format("not finite"))
            self._before, self._found = self._accumulator.backend.read_later([self._found]), None
