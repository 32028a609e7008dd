"""Counts the collectives that a piece of code really sends, those of C++ (DistributedDataParallel's reducer) included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from drivetrain.parallel._operators import COLLECTIVES

__all__ = ["count_collectives"]


def count_collectives(function: Callable[[], Any]) -> dict[str, int]:
    """Call a function and count the collectives that this process sent meanwhile, by name ("all_reduce", "broadcast", ...).

    Every collective of torch.distributed passes through the dispatcher as an operator ``c10d::...``, on any device and from any
    language; the profiler sees them.

    Args:
        function: Called once, without arguments.

    Example:
        >>> import torch
        >>> count_collectives(lambda: torch.ones(2).sum())
        {}
    """
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recording:
        function()
    found: Counter[str] = Counter()
    for event in recording.events() or ():
        space, _, operator = event.name.partition("::")
        if space == "c10d":
            found[COLLECTIVES["c10d"].get(operator, operator)] += 1
    return dict(found)
