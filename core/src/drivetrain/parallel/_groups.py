"""What the collectives ask about a process group, and what they say when one of its ranks is gone."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from drivetrain._places import is_users
from drivetrain.errors import DistributedOperationError

__all__ = [
    "call",
    "caller",
    "communication_device",
    "control_device",
    "describe_failure",
    "global_ranks",
    "is_lost_connection",
    "members",
]

#: Seconds that a rank waits, after a failed collective, to learn which other ranks saw the failure too.
GRACE = 2.0


def members(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in ``group`` and the number of ranks in it; ``(0, 1)`` without torch.distributed.

    Raises:
        DistributedOperationError: If this process isn't in ``group``, or is one of several that haven't met yet.

    Example:
        >>> members(None)
        (0, 1)
    """
    if not dist.is_available() or not dist.is_initialized():
        world_size = os.environ.get("WORLD_SIZE", "1")
        if world_size.isdigit() and int(world_size) > 1:
            raise DistributedOperationError(
                f"A collective was called in a job of {world_size} processes (WORLD_SIZE) that has no process group: it was ended, or "
                "not made yet. Make an `Accelerator` or a `PartialState` first."
            )
        return 0, 1
    rank = dist.get_rank(group)
    if rank < 0:
        raise DistributedOperationError(
            f"Rank {dist.get_rank()} called a collective on a process group that it isn't in. "
            "Call it only on the group's ranks, or make the group with all of them."
        )
    return rank, dist.get_world_size(group)


def global_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Ranks of the job that are in ``group``, by rank in the group."""
    return list(dist.get_process_group_ranks(group)) if dist.is_initialized() else [0]


def control_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where small messages between ranks live: the CPU where the group can, so that no device is waited for."""
    types = _device_types(dist.get_backend_config(group))
    return torch.device("cpu" if "cpu" in types else types[0])


def communication_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Where a tensor on ``device`` is sent from: there, or on `control_device` where the group can't."""
    if device.type in _device_types(dist.get_backend_config(group)):
        return device
    return control_device(group)


@functools.lru_cache(maxsize=32)
def _device_types(config: str) -> tuple[str, ...]:
    return tuple(part.partition(":")[0] for part in config.split(","))


def call(what: str, group: dist.ProcessGroup | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a collective of torch; name what failed and, where it can be known, the rank that is gone.

    Raises:
        DistributedOperationError: If it fails.
    """
    try:
        return function(*args, group=group, **kwargs)
    except RuntimeError as error:
        raise DistributedOperationError(describe_failure(what, group, error)) from error


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error comes from the communication library: torch has classes for some of them."""
    return isinstance(error, dist.DistError) or any(
        name in str(error) for name in ("gloo/transport", "NCCL", "ncclInternalError")
    )


def describe_failure(what: str, group: dist.ProcessGroup | None, error: BaseException) -> str:
    """The message for a collective that failed. Waits up to `GRACE` seconds for the other ranks' word.

    Each rank whose collective fails leaves a note in the rendezvous store: what it did, and where. A rank that leaves none died, raised elsewhere or is
    stuck.
    """
    rank = dist.get_rank()
    reason = str(error).strip() or type(error).__name__
    others = [r for r in global_ranks(group) if r != rank]
    here = f"{what} at {caller()}"
    elsewhere: dict[int, str] = {}
    try:
        notes = _notes(rank, others, here)
    except RuntimeError:
        suspect = (
            "the rendezvous store can't be reached any more, so the process that hosts it (rank 0 or the launcher) is gone. "
            "Look at its output for the first error."
        )
    else:
        silent = [r for r in others if r not in notes]
        names = f"rank{'s' if len(silent) > 1 else ''} {', '.join(map(str, silent))}"
        elsewhere = {r: note for r, note in notes.items() if note.partition(" at ")[0] != what}
        if silent:
            suspect = (
                f"{names} died, raised or stayed away from this call. Look at their output for the first error; if they only took "
                "long, give `InitProcessGroupKwargs(timeout=...)` more seconds."
            )
        elif elsewhere:
            suspect = "the ranks weren't in the same call: look for a branch or a loop's end that they don't share."
        else:
            suspect = "every rank saw this call fail, so the network between them or the timeout is to blame."
    lines = [f"{what} failed on rank {rank}: {suspect}", f"  rank {rank}: {here}"]
    lines += [f"  rank {r}: {note}" for r, note in sorted(elsewhere.items())]
    return "\n".join([*lines, f"The communication library says: {reason}"])


def caller() -> str:
    """File and line of the user's code that called into this distribution."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _notes(rank: int, others: list[int], note: str) -> dict[int, str]:
    """What the other ranks whose collective failed, too, say that they did."""
    store = dist.distributed_c10d._get_default_store()
    store.set(_key(rank), note)
    deadline = time.monotonic() + GRACE
    silent = others
    while silent and time.monotonic() < deadline:
        silent = [r for r in silent if not store.check([_key(r)])]
        if silent:
            time.sleep(0.05)
    return {r: store.get(_key(r)).decode(errors="replace") for r in others if r not in silent}


def _key(rank: int) -> str:
    return f"drivetrain/failed/{rank}"
