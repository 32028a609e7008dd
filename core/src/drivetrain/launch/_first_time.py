"""Machines that are replaced while others still end: none may meet the machine 0 of the start before.

A replacement finds that one's store under the name that its successor will have, and what its predecessor left in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousHandler

__all__ = ["first_time"]


def first_time(
    make: Callable[[], RendezvousHandler], *, machine: int, seconds: float, pause: float = 1.0
) -> RendezvousHandler:
    """A rendezvous in which this machine hasn't taken part yet.

    Args:
        make: Connects to machine 0.
        machine: Rank of this machine.
        seconds: How long to wait for a new machine 0; after that whatever there is counts.
        pause: Seconds between two tries.

    Raises:
        RuntimeError, RendezvousError: If there is no machine 0 to connect to.

    Example:
        >>> from drivetrain.launch._agent import Loopback
        >>> first_time(lambda: Loopback(0, "run"), machine=0, seconds=5.0).get_run_id()
        'run'
    """
    end = time.monotonic() + seconds
    while True:
        try:
            handler = make()
            if not _used(handler, machine) or time.monotonic() > end:
                return handler
        except (RuntimeError, RendezvousError):  # machine 0 went away in the middle of it
            if time.monotonic() > end:
                raise
        time.sleep(pause)


def _used(handler: RendezvousHandler, machine: int) -> bool:
    """Whether the machine 0 that was found is one of an earlier start."""
    if handler.get_backend() == "static":
        return int(handler.next_rendezvous().store.add(f"machine-{machine}", 1)) > 1
    return handler.is_closed()
