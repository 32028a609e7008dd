"""Notices schedules that were made for Accelerate, where a scheduler steps once per process and optimizer step."""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from drivetrain._engine.scheduler import PreparedScheduler

__all__ = ["ScheduleCheck", "known_total", "made_at"]

_NAMES = ("num_training_steps", "total_steps", "max_steps", "num_steps", "total_iters", "T_max")


def known_total(scheduler: Any) -> tuple[str, int] | None:
    """After how many steps a schedule ends, and the name of the argument that says so; None if it doesn't end.

    Example:
        >>> import functools, torch
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> known_total(torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40))
        ('T_max', 40)
        >>> known_total(torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(lambda step, num_training_steps: 1.0, num_training_steps=9)))
        ('num_training_steps', 9)
        >>> known_total(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)) is None
        True
    """
    for name in ("total_steps", "T_max", "total_iters"):
        total = getattr(scheduler, name, None)
        if isinstance(total, int) and total > 0:
            return name, total
    if isinstance(scheduler, torch.optim.lr_scheduler.SequentialLR):
        last = known_total(scheduler._schedulers[-1])
        return None if last is None else (last[0], scheduler._milestones[-1] + last[1])
    for function in getattr(scheduler, "lr_lambdas", ()):
        found = {**getattr(function, "keywords", {}), **_closure(function)}
        for name in _NAMES:
            if isinstance(found.get(name), int):
                return name, found[name]
    return None


def _closure(function: Any) -> dict[str, Any]:
    inner = function.func if isinstance(function, functools.partial) else function
    if not inspect.isfunction(inner):
        return {}
    return dict(inspect.getclosurevars(inner).nonlocals)


def made_at(scheduler: Any) -> str:
    """File and line of the user's script where a scheduler given to `prepare` was made; where it was prepared, if that can't be found."""
    frame = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] == "drivetrain":
        frame = frame.f_back
    if frame is None:
        return "the script"
    path, line = frame.f_code.co_filename, frame.f_lineno
    for name in [n for n, value in frame.f_locals.items() if value is scheduler]:
        for number in range(line, 0, -1):
            text = linecache.getline(path, number)
            if re.match(rf"\s*{re.escape(name)}\s*(:[^=]+)?=[^=]", text) and "prepare" not in text:
                return f"{Path(path).name}:{number}"
    return f"{Path(path).name}:{line}"


class ScheduleCheck:
    """Compares what schedules were made for with the optimizer steps that are planned, or were taken. Warns once.

    Args:
        processes: Number of processes.
        main: Whether this is the one that warns.
    """

    def __init__(self, processes: int, *, main: bool) -> None:
        self._processes = processes
        self._main = main
        self._made: list[tuple[PreparedScheduler, str]] = []

    def add(self, scheduler: PreparedScheduler) -> None:
        """A scheduler was prepared."""
        self._made.append((scheduler, made_at(scheduler.scheduler)))

    def forget(self) -> None:
        """Prepared objects go away."""
        self._made.clear()

    def planned(self, epochs: int, loaders: Sequence[Any], micro_batches: int) -> None:
        """Training is about to take so many epochs over one of these loaders, with so many micro-batches per step."""
        for loader in loaders:
            with contextlib.suppress(TypeError):  # a loader without a length
                steps = math.ceil(len(loader) / micro_batches)
                self._compare(steps * epochs, epochs, f"planned ({epochs} epochs of {steps})")

    def taken(self, steps: int, epochs: int) -> None:
        """Training has ended after so many steps."""
        if steps:
            self._compare(steps, max(epochs, 1), "that training took, if it wasn't stopped early")

    def _compare(self, steps: int, epochs: int, said: str) -> None:
        n = self._processes
        for scheduler, place in list(self._made):
            known = known_total(scheduler.scheduler)
            # Steps of an epoch may have been rounded before they were multiplied.
            if known is None or abs(known[1] - n * steps) > n * epochs or known[1] <= steps * (1 + n) / 2:
                continue
            self._made.clear()
            if self._main:
                name, total = known
                warnings.warn(
                    f"The {type(scheduler.scheduler).__name__} of {place} has {name}={total}, {n} times the {steps} optimizer steps {said}: so it ends at "
                    f"1/{n} of its way. Accelerate steps a scheduler once per process, and scripts multiply its length by their number, or take that of a "
                    f"loader that isn't divided yet; here it steps once per optimizer step. Give it {name}={total // n} in {place}, or set "
                    "Accelerator(step_scheduler_per_process=True).",
                    stacklevel=3,
                )
            return
