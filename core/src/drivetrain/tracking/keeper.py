"""Who empties the queues of trackers that hang or are slow."""

from __future__ import annotations

import threading
import time

from drivetrain.tracking.worker import Lane

__all__ = ["Keeper"]


class Keeper:
    """Moves the queues of lanes in trouble to their spools. Its thread lives only while there are such lanes.

    Example:
        >>> Keeper().idle
        True
    """

    def __init__(self) -> None:
        self._lanes: list[Lane] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def idle(self) -> bool:
        """Whether no lane is in trouble."""
        return not self._lanes

    def watch(self, lane: Lane) -> None:
        """Take care of a lane until its trouble is over."""
        with self._lock:
            if lane.troubled:
                return
            lane.troubled = True
            self._lanes.append(lane)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="drivetrain-tracking-keeper", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            for lane in list(self._lanes):
                self._care(lane)
            with self._lock:
                if not self._lanes:
                    self._thread = None
                    return
            time.sleep(0.2)

    def _care(self, lane: Lane) -> None:
        busy = lane.busy
        if busy:
            lane.warn(
                "hung",
                "The tracker %r hangs. Training goes on; its values are kept in %s until it answers.",
                lane.name,
                lane.spool.path,
            )
        elif lane.full:
            lane.warn(
                "slow",
                "The tracker %r is slower than values come. Those that don't fit into memory wait in %s.",
                lane.name,
                lane.spool.path,
            )
        lane.spill()
        if not busy:
            with self._lock:
                self._lanes.remove(lane)
                lane.troubled = False
