"""What the training engine and the metrics know about the present batch, without asking other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

__all__ = ["BatchInfo", "Round", "WindowPlan"]


@dataclass(frozen=True, slots=True)
class Round:
    """The batches that all ranks get at one step. Each tuple has one number of samples per rank.

    Args:
        rows: Samples that count in training, the weight of the rank's mean loss.
        new: Samples that aren't repeated ones, each rank's first: those that metrics keep.
        received: Samples in the batch that the rank receives; 0 if it receives none.

    Example:
        >>> Round(rows=(1, 0), new=(1, 0), received=(1, 1)).repeats
        True
    """

    rows: tuple[int, ...]
    new: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def repeats(self) -> bool:
        """Whether some rank receives a repeated sample."""
        return self.new != self.received


class BatchInfo(msgspec.Struct):
    """The batch that a loader has just yielded.

    Args:
        index: Its place in the epoch on this rank, from 0.
        rows: Samples of it that count in training: 0 for a repeated row that fills a rank up. None if unknown.
        rank_rows: The same for every rank that holds different data, by rank; None if unknown.
        is_last: Whether it is this rank's last of the epoch.
        round: What is known about samples received and repeated, for metrics; None if unknown.
        ended: Ranks that are known to have no more batches where ``round`` is unknown.

    Example:
        >>> BatchInfo(0, 4, (4, 3), False, None).rank_rows
        (4, 3)
    """

    index: int
    rows: int | None
    rank_rows: tuple[int, ...] | None
    is_last: bool
    round: Round | None
    ended: tuple[int, ...] = ()

    @property
    def absent(self) -> tuple[int, ...]:
        """Ranks that have no batch at this step, as far as known.

        Example:
            >>> BatchInfo(0, 4, (4, 0), True, Round((4, 0), (4, 0), (4, 0))).absent
            (1,)
        """
        if self.round is None:
            return self.ended
        return tuple(rank for rank, count in enumerate(self.round.received) if count == 0)


class WindowPlan(NamedTuple):
    """An accumulation window that starts with the present batch.

    Args:
        size: Micro-batches in it: as asked, or fewer where this rank's data or another's ends. Equal on all ranks that still have data.
        global_rows: Samples in it that count, over all its micro-batches and ranks.

    Example:
        >>> WindowPlan(size=2, global_rows=14).size
        2
    """

    size: int
    global_rows: int
