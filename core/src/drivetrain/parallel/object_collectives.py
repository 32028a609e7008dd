"""Collectives on Python objects.

Objects travel as pickles, and unpickling runs what the sender put into it: these functions are for the ranks of one job, which run the same code and
trust each other and the network between them. Tensors on an accelerator arrive on the device of the same index; move them to the CPU first.

A pickle of up to 768 bytes travels in the operation's one frame (see `drivetrain.parallel.collectives`); otherwise one more collective follows. An
object that can't be pickled is an error on every rank, not only on its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.parallel._frames import INLINE, Frames, all_gather, exchange, tell_failure
from drivetrain.parallel._groups import call, control_device, members
from drivetrain.parallel._operation import check_rank

__all__ = ["all_gather_object", "broadcast_object_list", "gather_object"]


def gather_object(object: Any, *, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The items of every rank's list (or tuple), in the order of ranks, as one list on every rank.

    An object of another type counts as a list of itself, so that each rank contributes one item; this differs from Accelerate, which iterates
    over dicts and strings.

    Args:
        object: What this rank contributes; ranks may contribute different numbers of items.
        group: Process group; None for all ranks.

    Returns:
        The items; in a world of one, the list itself.

    Raises:
        DistributedOperationError: On every rank, if one of them called something else or can't pickle its object.

    Example:
        >>> gather_object(["a", 1])
        ['a', 1]
        >>> gather_object({"rank": 0})
        [{'rank': 0}]
    """
    items = object if isinstance(object, list) else list(object) if isinstance(object, tuple) else [object]
    if members(group)[1] == 1:
        return items
    return [item for part in all_gather_object(items, group=group, operation="gather_object") for item in part]


def all_gather_object(
    item: Any, *, group: dist.ProcessGroup | None = None, operation: str = "all_gather_object"
) -> list[Any]:
    """Every rank's object, by rank in ``group``, on every rank.

    Args:
        item: What this rank contributes.
        group: Process group; None for all ranks.
        operation: The name that an error message gives to this call.

    Raises:
        DistributedOperationError: On every rank, if one of them called something else or can't pickle its object.

    Example:
        >>> all_gather_object({"rank": 0})
        [{'rank': 0}]
    """
    world = members(group)[1]
    if world == 1:
        return [item]
    mine = _pickle(item, operation, group)
    frames = exchange(operation, payload=mine, group=group)
    rows: Iterable[torch.Tensor] = frames.inline
    if not frames.fits:
        device = control_device(group)
        longest = max(frames.payload_bytes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        output = torch.empty(world * longest, dtype=torch.uint8, device=device)
        all_gather(operation, output, padded.to(device), group)
        rows = output.cpu().view(world, longest)
    return [_unpickle(row[:size]) for row, size in zip(rows, frames.payload_bytes, strict=True)]


def broadcast_object_list(
    object_list: list[Any], from_process: int = 0, *, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Replace the items of every rank's list, in place, by those of one rank.

    Args:
        object_list: A list, equally long on every rank.
        from_process: The rank, in ``group``, whose items are sent.
        group: Process group; None for all ranks.

    Returns:
        ``object_list``.

    Raises:
        ConfigurationError: If there is no such rank.
        DistributedOperationError: On every rank, if one of them called something else, has a list of another length, or can't pickle it.
        TypeError: If ``object_list`` isn't a list.

    Example:
        >>> broadcast_object_list(["a", 1])
        ['a', 1]
    """
    rank, world = members(group)
    check_rank(from_process, world, "from_process")
    if world == 1:
        return object_list
    what = "broadcast_object_list"
    given: Any = object_list
    if not isinstance(given, list):
        error = TypeError(f"{what} needs a list, whose items it replaces, not a {type(given).__name__}.")
        tell_failure(what, error, group)
        raise error
    source = rank == from_process
    mine = _pickle(list(object_list), what, group) if source else None
    frames = exchange(what, layout=f"from {from_process}, {len(object_list)} items", payload=mine, group=group)
    if not source:
        received = _received(frames, what, from_process, group)
        if received.numel():  # nothing comes in a rehearsal alone: what this rank has stands for it
            object_list[:] = _unpickle(received)
    elif not frames.fits and mine is not None:
        call(what, group, dist.broadcast, mine.to(control_device(group)), group_src=from_process)
    return object_list


def _received(frames: Frames, what: str, from_process: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    size = frames.payload_bytes[from_process]
    if size <= INLINE:
        return frames.inline[from_process, :size]
    buffer = torch.empty(size, dtype=torch.uint8, device=control_device(group))
    call(what, group, dist.broadcast, buffer, group_src=from_process)
    return buffer


def _pickle(item: Any, what: str, group: dist.ProcessGroup | None) -> torch.Tensor:
    try:
        data = pickle.dumps(item)
    except Exception as error:
        tell_failure(what, error, group)
        raise
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpickle(data: torch.Tensor) -> Any:
    return pickle.loads(data.cpu().numpy().tobytes())
