"""The ranks that hold different data, and what their loaders tell each other: a few small objects per epoch, none per batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from drivetrain.errors import DistributedOperationError
from drivetrain.parallel.object_collectives import all_gather_object, broadcast_object_list

__all__ = ["Ranks"]


class Ranks:
    """This process among the ranks that hold different data.

    Args:
        index: This process's rank among them.
        size: How many there are.
        group: Their process group; None for all processes.

    Example:
        >>> Ranks(0, 1).broadcast("seed")
        'seed'
    """

    __slots__ = ("group", "index", "size")

    def __init__(self, index: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        self.index = index
        self.size = size
        self.group = group

    @classmethod
    def of(cls, group: dist.ProcessGroup | None = None) -> Ranks:
        """The ranks of a process group; one rank where torch.distributed isn't running."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1)
        return cls(dist.get_rank(group), dist.get_world_size(group), group)

    @property
    def connected(self) -> bool:
        """Whether these ranks can talk to each other."""
        return self.size == 1 or (dist.is_available() and dist.is_initialized())

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank. Travels as a pickle: the process group is trusted.

        Raises:
            DistributedOperationError: If a rank is gone or does something else, or there is no process group.
        """
        if self.size == 1:
            return value
        self.require()
        return broadcast_object_list([value], group=self.group)[0]

    def call_on_first(self, function: Callable[[], Any], what: str) -> Any:
        """Call a function on rank 0; return its result on every rank.

        Raises:
            DistributedOperationError: On the other ranks, if it raises on rank 0, with its message. Rank 0 raises the error itself.
        """
        if self.size == 1:
            return function()
        if self.index > 0:
            ok, value = self.broadcast(None)
            if not ok:
                raise DistributedOperationError(f"{what} failed on rank 0: {value}")
            return value
        try:
            value = function()
        except Exception as error:
            self.broadcast((False, f"{type(error).__name__}: {error}"))
            raise
        self.broadcast((True, value))
        return value

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        if self.size == 1:
            return [value]
        self.require()
        return all_gather_object(value, group=self.group, operation="prepare_data_loader")

    def require(self) -> None:
        """Raise if these ranks can't talk to each other.

        Raises:
            DistributedOperationError: With what to do.
        """
        if not self.connected:
            raise DistributedOperationError(
                f"{self.size} ranks need a process group to agree on the data. Start the script with `drivetrain launch` or torchrun, "
                "or pass data_seed and a loader whose sampler is torch's own."
            )
