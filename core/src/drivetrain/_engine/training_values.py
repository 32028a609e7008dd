"""What ``log_training`` adds to the user's values: learning rates, gradient norm, loss scale, throughput."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator

__all__ = ["TrainingValues"]


class TrainingValues:
    """Values of one Accelerator's training; remembers when it was asked last."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._time = 0.0

    def collect(self, accelerator: Accelerator, items: float | None) -> dict[str, Any]:
        """Values by name. Tensors are as they are: they may still be being computed."""
        return {
            **_learning_rates(accelerator),
            **_gradient_norm(accelerator),
            **_loss_scale(accelerator),
            **self._throughput(accelerator.step, items),
        }

    def _throughput(self, step: int, items: float | None) -> dict[str, float]:
        now, before = time.perf_counter(), self._time
        steps = None if self._step is None else step - self._step
        self._step, self._time = step, now
        if steps is None or now <= before or steps < 0:  # the first time, and after a checkpoint was loaded
            return {}
        rates = {"steps_per_second": steps / (now - before)}
        return rates if items is None else {**rates, "items_per_second": items / (now - before)}


def _learning_rates(accelerator: Accelerator) -> dict[str, Any]:
    """``lr``; with several parameter groups ``lr/0``, ``lr/1``, ..., those of all optimizers in order."""
    rates = [group["lr"] for optimizer in accelerator._optimizers for group in optimizer.param_groups if "lr" in group]
    return {"lr": rates[0]} if len(rates) == 1 else {f"lr/{i}": rate for i, rate in enumerate(rates)}


def _gradient_norm(accelerator: Accelerator) -> dict[str, Any]:
    """That which the last ``clip_grad_norm_`` returned."""
    return {} if accelerator._norm is None else {"grad_norm": accelerator._norm}


def _loss_scale(accelerator: Accelerator) -> dict[str, Any]:
    """As a tensor where torch has one: asking for the number waits for the device."""
    scaler = accelerator.scaler
    if scaler is None:
        return {}
    scale = getattr(scaler, "_scale", None)
    return {"loss_scale": scaler.get_scale() if scale is None else scale}
