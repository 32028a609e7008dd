"""What the training thread hands to the hub's threads: one logged thing."""

from __future__ import annotations

import threading
from typing import Any

from drivetrain.tracking.values import PendingValues

__all__ = ["KINDS", "Record"]

#: Kinds of records; "row" is what ``log`` makes.
KINDS = ("row", "config", "text", "images", "figure", "table", "histogram", "artifact", "summary")

_NO_OPTIONS: dict[str, Any] = {}


class Record:
    """One logged thing. Slotted and without checks, since each ``log`` call makes one.

    Args:
        kind: One of `KINDS`.
        name: Name of the image, table, ...; empty for "row", "config" and "summary".
        payload: By kind: a dict of plain values ("row", "config", "summary"); a str; a list of uint8 arrays ("images"); a figure;
            ``(columns, rows)`` ("table"); a 1-d float array ("histogram"); a path ("artifact").
        step: As given by the user.
        time: Seconds since the epoch.
        weight: About how many values it holds, for the bound of the queue.
        pending: Numbers of a row that are still being computed.
        options: ``log_kwargs`` for this tracker.

    Example:
        >>> Record("row", "", {"loss": 0.5}, 3, 0.0).weight
        1
    """

    __slots__ = ("kind", "name", "options", "payload", "pending", "step", "time", "weight")

    def __init__(
        self,
        kind: str,
        name: str,
        payload: Any,
        step: int | None,
        time: float,
        weight: int = 1,
        pending: PendingValues | None = None,
        options: dict[str, Any] = _NO_OPTIONS,
    ) -> None:
        self.kind = kind
        self.name = name
        self.payload = payload
        self.step = step
        self.time = time
        self.weight = weight
        self.pending = pending
        self.options = options

    def resolve(self, timeout: float | None = None) -> None:
        """Wait for values that are still being computed. What can't be read becomes a text that says why."""
        pending = self.pending
        if pending is None:
            return
        with (
            _resolving
        ):  # several trackers' threads share the record, and a future of a device isn't made for two readers
            if self.pending is None:
                return
            try:
                pending.fill(self.payload, timeout)
            except Exception as error:
                for key in pending.keys:
                    self.payload[key] = f"<unreadable: {type(error).__name__}: {error}>"
            self.pending = None


_resolving = threading.Lock()
