"""Counts how often a piece of code reads a tensor's value on the host: on an accelerator each read waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["count_host_reads"]

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
}


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func in _READS
        return func(*args, **(kwargs or {}))


def count_host_reads(function: Callable[[], Any]) -> int:
    """Call a function and count the operators whose result the host has to wait for: ``item()``, ``bool(tensor)``, ``nonzero()``, ...

    Args:
        function: Called once, without arguments, in this thread.

    Example:
        >>> count_host_reads(lambda: torch.ones(2).sum().item())
        1
    """
    counter = _Counter()
    with counter:
        function()
    return counter.count
