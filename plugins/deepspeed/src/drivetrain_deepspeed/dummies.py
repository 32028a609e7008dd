"""Placeholders for an optimizer and a scheduler that DeepSpeed builds from its configuration. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from drivetrain.config import nearest
from drivetrain.errors import ConfigurationError

__all__ = ["DummyOptim", "DummyScheduler"]


class DummyOptim:
    """Stands for the optimizer of the DeepSpeed configuration until ``prepare`` returns that one.

    What the configuration's section ``optimizer`` leaves at "auto" is taken from here; without that section it is AdamW. What is given here and
    differs from a number there is an error.

    Args:
        params: The parameters, or groups of them, as every torch optimizer takes them.
        lr: Learning rate; 0.001 if neither this nor the configuration says one.
        weight_decay: Weight decay; 0 if neither says one.
        **kwargs: ``betas`` and ``eps``.

    Raises:
        ConfigurationError: For other keywords: they belong into the configuration.

    Example:
        >>> import torch
        >>> DummyOptim(torch.nn.Linear(2, 2).parameters(), lr=0.01).facts()
        {'config_optimizer': True, 'learning_rate': 0.01}
    """

    drivetrain_kind = "optimizer"

    def __init__(
        self, params: Iterable[Any], lr: float | None = None, weight_decay: float | None = None, **kwargs: Any
    ) -> None:
        _check("DummyOptim", kwargs, ("betas", "eps"), "optimizer.params")
        self.params = params if isinstance(params, list) else list(params)
        self.lr = 0.001 if lr is None else lr
        self.weight_decay = 0 if weight_decay is None else weight_decay
        self.kwargs = kwargs
        self._given = {
            "learning_rate": lr,
            "weight_decay": weight_decay,
            "betas": kwargs.get("betas"),
            "eps": kwargs.get("eps"),
        }

    def facts(self) -> dict[str, Any]:
        """What it says, as fields of `drivetrain_deepspeed.config.Facts`."""
        return {"config_optimizer": True, **{k: v for k, v in self._given.items() if v is not None}}


class DummyScheduler:
    """Stands for the scheduler of the DeepSpeed configuration until ``prepare`` returns that one.

    What the configuration's section ``scheduler`` leaves at "auto" is taken from here; without that section, the rate rises linearly over
    ``warmup_num_steps`` and then falls linearly to 0, or stays if ``total_num_steps`` isn't known.

    Args:
        optimizer: The optimizer, or its placeholder.
        total_num_steps: Optimizer steps in all, whatever the number of processes.
        warmup_num_steps: Optimizer steps until the rate is reached.
        lr_scheduler_callable: Makes the scheduler, given the optimizer that DeepSpeed built; then the configuration has no scheduler.

    Raises:
        ConfigurationError: For other keywords: they belong into the configuration.

    Example:
        >>> DummyScheduler(None, total_num_steps=100, warmup_num_steps=10).facts()
        {'config_scheduler': True, 'total_num_steps': 100, 'warmup_num_steps': 10}
    """

    drivetrain_kind = "scheduler"

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        _check("DummyScheduler", kwargs, (), "scheduler.params")
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.lr_scheduler_callable = lr_scheduler_callable
        self.kwargs = kwargs

    def facts(self) -> dict[str, Any]:
        """What it says, as fields of `drivetrain_deepspeed.config.Facts`."""
        if self.lr_scheduler_callable is not None:
            return {"client_scheduler": True}
        steps = {"total_num_steps": self.total_num_steps, "warmup_num_steps": self.warmup_num_steps}
        return {"config_scheduler": True, **{k: v for k, v in steps.items() if v is not None}}


def _check(who: str, given: Iterable[str], known: tuple[str, ...], section: str) -> None:
    for name in given:
        if name not in known:
            hint = nearest(name, known)
            raise ConfigurationError(
                f"{who} has no {name!r}.{hint if 'Did you mean' in hint else ''} Write it into the DeepSpeed configuration, under {section}."
            )
