"""Which samples belong to which rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drivetrain.specs import DataShardingSpec

__all__ = ["DataSharding"]


class DataSharding:
    """Turns the epoch's global order of batches into this rank's batches.

    Pure index arithmetic: every rank can compute every rank's share, so counts need no communication.

    Args:
        spec: The descriptor.
    """

    def __init__(self, spec: DataShardingSpec) -> None:
        self.spec = spec

    def shard(self, batches: Iterator[Sequence[int]], rank: int, world_size: int) -> Iterator[Sequence[int]]:
        """Yield this rank's batches.

        Args:
            batches: The epoch's batches of global sample indices, in order, equal on every rank.
            rank: This rank among those that hold different data.
            world_size: Number of those ranks.
        """
        raise NotImplementedError
