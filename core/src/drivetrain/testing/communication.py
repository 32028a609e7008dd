"""Counts the collectives that a piece of code really sends, those of C++ (DistributedDataParallel's reducer) included."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

__all__ = ["count_collectives"]

#: torch's operators by the collective that they are.
_OPERATORS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
}


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
            found[_OPERATORS.get(operator, operator)] += 1
    return dict(found)
