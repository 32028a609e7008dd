"""A prepared learning-rate scheduler: steps once per optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from drivetrain._engine.accumulation import Accumulator
    from drivetrain._engine.optimizer import PreparedOptimizer

__all__ = ["PreparedScheduler"]


class PreparedScheduler:
    """Steps once per optimizer step, whatever the number of processes and micro-batches; skipped steps don't count.

    Args:
        scheduler: The scheduler that does the work.
        optimizers: Prepared optimizers whose steps it follows; its own one if that is among them.
        accumulator: Knows where windows end.
        step_with_optimizer: False: it steps whenever it is told to.
        repeats: Steps in place of one: Accelerate's stepping. A schedule that says when it ends isn't stepped beyond that, and one that
            follows a metric steps once.

    Example:
        >>> # made by accelerator.prepare(scheduler); the scheduler itself stays reachable as `.scheduler`
        >>> PreparedScheduler.__name__
        'PreparedScheduler'
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: list[PreparedOptimizer],
        *,
        accumulator: Accumulator,
        step_with_optimizer: bool = True,
        repeats: int = 1,
    ) -> None:
        self.scheduler = scheduler
        own = getattr(scheduler, "optimizer", None)
        self.optimizers = [o for o in optimizers if own is o or own is o.optimizer] or list(optimizers)
        self._accumulator = accumulator
        self._step_with_optimizer = step_with_optimizer
        self._by_metric = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self._more = 0 if self._by_metric else repeats - 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step, if the optimizer did.

        A scheduler that follows a metric (``ReduceLROnPlateau``) also steps outside of ``accumulate`` blocks, after an epoch.
        """
        if self._step_with_optimizer:
            accumulator = self._accumulator
            follows = accumulator.inside is not None or not self._by_metric
            if follows and accumulator.adjust_scheduler and not accumulator.sync_gradients:
                return
            if follows and (accumulator.may_skip or accumulator.guard is not None):
                for optimizer in self.optimizers:
                    if optimizer.step_was_skipped:
                        return
        if not self._more:
            self.scheduler.step(*args, **kwargs)
            return
        for _ in range(self._more + 1):
            if self.scheduler.last_epoch < getattr(self.scheduler, "total_steps", float("inf")):
                self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state dict."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.scheduler.load_state_dict(state_dict)

    def get_last_lr(self) -> list[float]:
        """Learning rate of each group."""
        rates: list[float] = self.scheduler.get_last_lr()
        return rates
