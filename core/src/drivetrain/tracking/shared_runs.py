"""How trackers that run on every rank come to the same run: the main process tells its run ids through the job's store."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from drivetrain.errors import TrackerError

__all__ = ["RunBoard"]

_numbers = itertools.count()


class RunBoard:
    """Run ids of one hub's starts, for all ranks.

    Hubs are numbered in the order in which they are made, and so are their starts: both must be the same on all ranks that take part.

    Example:
        >>> board = RunBoard()
        >>> board.publish({"toy": "run-1"}), board.fetch("toy", timeout=0.0)
        (None, None)
    """

    def __init__(self) -> None:
        self._prefix = f"drivetrain/tracking-runs/{next(_numbers)}"
        self._starts = 0

    def next_start(self) -> None:
        """A new start of the hub."""
        self._starts += 1

    def publish(self, run_ids: Mapping[str, str]) -> None:
        """Tell the other ranks, if there is a process group."""
        store = _store()
        if store is not None and run_ids:
            store.set(f"{self._prefix}/{self._starts}", json.dumps(dict(run_ids)))

    def fetch(self, name: str, timeout: float) -> str | None:
        """The id of a tracker's run, as the main process told it; None without a process group.

        Raises:
            TrackerError: If it doesn't in time.
        """
        store, key = _store(), f"{self._prefix}/{self._starts}"
        if store is None:
            return None
        limit = time.monotonic() + timeout
        while not store.check([key]):
            if time.monotonic() > limit:
                raise TrackerError(
                    f"The tracker {name!r} runs on every process, but the main one hasn't started it within {timeout:g} s: call init_trackers() on "
                    "every process."
                )
            time.sleep(0.01)
        found: dict[str, str] = json.loads(store.get(key))
        return found.get(name)


def _store() -> Any:
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()
