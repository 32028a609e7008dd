"""Bounds of tracking."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.config import Options

__all__ = ["TrackingOptions"]


@dataclass
class TrackingOptions(Options):
    """How long tracking may take, and how much may wait. Training itself never waits for a tracker; only starting, flushing and finishing do.

    Args:
        start_timeout: Seconds that ``init_trackers`` waits for runs to open. What is slower goes on starting in the background.
        flush_timeout: Seconds that a flush (at checkpoints, on exceptions and signals) waits before it puts what waits on disk.
        finish_timeout: Seconds that ``end_training`` waits.
        reduce_timeout: Seconds after which ``log(reduce=...)`` fails that some process hasn't called, if nothing has proved before that it never will.
        hang_timeout: Seconds after which a tracker's call counts as hanging: from then on its values go to disk.
        retry_after: Seconds after a failure until the tracker is tried again; doubles with each failure up to ``retry_at_most``.
        retry_at_most: See ``retry_after``.
        most_pending: Values that may wait in memory for one tracker; more than that go to disk.
        interval: Seconds for which values are collected before they are handed to the tracker.
        run_facts: Also log the configuration, the environment, the git commit, ``explain()``, checkpoints that were
            saved, and memory at checkpoints and with ``log_training``.
        spool_directory: Where values go that could not be delivered. Default: ``drivetrain-spool`` in the logging directory, or else here.

    Example:
        >>> TrackingOptions(finish_timeout=5.0).hang_timeout
        60.0
    """

    start_timeout: float = 30.0
    flush_timeout: float = 10.0
    finish_timeout: float = 30.0
    reduce_timeout: float = 600.0
    hang_timeout: float = 60.0
    retry_after: float = 1.0
    retry_at_most: float = 300.0
    most_pending: int = 200_000
    interval: float = 0.1
    run_facts: bool = False
    spool_directory: str | None = None
