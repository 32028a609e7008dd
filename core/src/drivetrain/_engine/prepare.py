"""What kind of thing an object given to ``prepare`` is, and what was made of it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

__all__ = ["PreparedObjects", "kind_of"]


def kind_of(thing: Any) -> str:
    """Sort an object: "model", "optimizer", "scheduler", "loader", or "other", which passes through as it is.

    A backend's placeholder says what it stands for with the attribute ``drivetrain_kind``.

    Example:
        >>> import torch
        >>> kind_of(torch.nn.Linear(1, 1)), kind_of("text")
        ('model', 'other')
    """
    declared = getattr(type(thing), "drivetrain_kind", None)
    if declared is not None:
        return str(declared)
    if isinstance(thing, torch.nn.Module):
        return "model"
    if isinstance(thing, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(thing, DataLoader):
        return "loader"
    if isinstance(thing, torch.optim.lr_scheduler.LRScheduler) or _steps_an_optimizer(thing):
        return "scheduler"
    return "other"


def _steps_an_optimizer(thing: Any) -> bool:
    return isinstance(getattr(thing, "optimizer", None), torch.optim.Optimizer) and callable(
        getattr(thing, "step", None)
    )


class PreparedObjects:
    """What was prepared, in order, by kind; and which result belongs to which original, so that twice is the same as once.

    Example:
        >>> objects = PreparedObjects()
        >>> objects.add("model", "original", "prepared")
        >>> objects.find("original"), objects.find("prepared"), objects.find("else")
        ('prepared', 'prepared', None)
    """

    def __init__(self) -> None:
        self.by_kind: dict[str, list[Any]] = {"model": [], "optimizer": [], "scheduler": [], "loader": []}
        self.trained = 0  # models that aren't only evaluated
        self._results: dict[int, tuple[Any, Any]] = {}  # id -> (the object, to keep the id its own; the result)

    def add(self, kind: str, original: Any, result: Any) -> None:
        """Note a result."""
        self.by_kind[kind].append(result)
        self._results[id(original)] = (original, result)
        self._results[id(result)] = (result, result)

    def find(self, thing: Any) -> Any:
        """The result made of ``thing`` (or ``thing``, if it is one), else None."""
        entry = self._results.get(id(thing))
        return None if entry is None else entry[1]

    def clear(self) -> None:
        """Forget all."""
        for results in self.by_kind.values():
            results.clear()
        self._results.clear()
        self.trained = 0
