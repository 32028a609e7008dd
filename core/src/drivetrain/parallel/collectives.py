"""Collectives on nested structures of tensors.

Every function takes any nested structure (see `drivetrain.parallel.structure`) and a keyword ``group``, a process group of torch or None for
all ranks; in a world of one it changes nothing. Values that aren't tensors stay what they are on each rank. Results carry no gradient.

No disagreement between ranks can hang them or mix up their bytes: each call starts with a frame of 1 KiB that says what the rank is about to do
(see `drivetrain.parallel._frames`). If ranks call different operations, or with different structures, dtypes or shapes, all of them raise the same
`DistributedOperationError`, which lists what each rank did and where. The price is one small collective per call on the CPU's backend (no device is
waited for), independent of the number of tensors. What follows it, for a structure of any number of tensors:

====================================  =======================================================================
up to 768 bytes on the CPU            nothing: the frame carries the values
gather, broadcast; up to 4 MiB        one collective per device type (the tensors are packed)
gather, broadcast; more               one per tensor (not packed)
reduce with "sum" or "mean"           one per device type and dtype of accumulation
reduce with "max" or "min"            as gather
pad_across_processes                  nothing; it pads locally
====================================  =======================================================================

More than 28 tensors cost `gather` and `pad_across_processes` one more small collective for the sizes.

Ranks inside ``group`` are numbered from 0; for the whole job that is the rank itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.errors import ConfigurationError, DistributedOperationError
from drivetrain.parallel._frames import Frames, all_gather, exchange
from drivetrain.parallel._groups import call, communication_device, global_ranks, members
from drivetrain.parallel._operation import all_inline, check_rank, inline, prepare, replace
from drivetrain.parallel._packing import PACK_LIMIT, Leaf, align, pack, unpack
from drivetrain.parallel.structure import map_tensors

__all__ = ["broadcast", "gather", "reduce"]

_REDUCTIONS = ("mean", "sum", "max", "min", "none")


# -- gather ----------------------------------------------------------------------------------------------------------------


def gather(tensor: Any, *, group: dist.ProcessGroup | None = None, debug: bool | None = None) -> Any:
    """Every rank's tensors, concatenated along dimension 0 in the order of ranks, on every rank.

    Ranks may have different numbers of rows, also none; a 0-d tensor counts as one row. Dtypes and devices are kept.

    Args:
        tensor: Any nested structure.
        group: Process group; None for all ranks.
        debug: Whether different numbers of rows are an error, as in Accelerate's debug mode. None: the variable DRIVETRAIN_DEBUG
            decides. It is enough that one rank asks for it.

    Raises:
        DistributedOperationError: On every rank, if they disagree (see the module) or one fails.
        TypeError: If ``tensor`` is neither a tensor nor a container.

    Example:
        >>> gather({"loss": torch.tensor([1.0]), "name": "a"})  # one process: as it is
        {'loss': tensor([1.]), 'name': 'a'}
    """
    if members(group)[1] == 1:
        return tensor
    leaves = prepare("gather", tensor, group)
    layout = ",".join([leaf.describe(shape=_rows_and(leaf)) for leaf in leaves])
    rows = [leaf.rows for leaf in leaves]
    payload, total = inline([leaf.tensor for leaf in leaves])
    frames = exchange(
        "gather",
        layout=layout,
        sizes=rows,
        payload=payload,
        payload_bytes=total,
        flag=int(_debug(debug)),
        group=group,
    )
    if any(frames.flags) and any(list(other) != rows for other in frames.sizes):
        raise DistributedOperationError(_uneven_text(leaves, frames.sizes, group))
    results = _gather_leaves("gather", leaves, frames, group)
    return replace(tensor, leaves, results)


def _rows_and(leaf: Leaf) -> str:
    if not leaf.tensor.ndim:
        return "[]"
    return f"[*,{','.join(map(str, leaf.row_shape))}]" if leaf.tensor.ndim > 1 else "[*]"


def _gather_leaves(
    what: str, leaves: Sequence[Leaf], frames: Frames, group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    if all_inline(leaves, frames):
        return _concatenate(leaves, frames.sizes, frames.inline)
    results: list[torch.Tensor | None] = [None] * len(leaves)
    for part in _parts(leaves, max(frames.payload_bytes)):
        sizes = [tuple([rows[i] for i in part]) for rows in frames.sizes]
        for i, result in zip(part, _gather_part(what, [leaves[i] for i in part], sizes, group), strict=True):
            results[i] = result
    return [r for r in results if r is not None]


def _gather_part(
    what: str, leaves: Sequence[Leaf], sizes: Sequence[Sequence[int]], group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    """Gather tensors of one device type with one collective, padded to the rank that has most; none if nobody has any."""
    device = leaves[0].tensor.device
    wire = communication_device(group, device)
    totals = [_total(leaves, rows) for rows in sizes]
    even = len(leaves) == 1 and all(rows == sizes[0] for rows in sizes)
    block = leaves[0].row_bytes * sizes[0][0] if even else max(totals)
    output = torch.empty(len(sizes) * block, dtype=torch.uint8, device=wire)
    if block:
        all_gather(what, output, pack([leaf.tensor for leaf in leaves], size=block, device=wire), group)
    if even:  # the blocks follow each other without a gap: the output is the result
        shape = (len(sizes) * sizes[0][0], *leaves[0].row_shape)
        return [output.view(leaves[0].tensor.dtype).view(shape).to(device)]
    return [t.to(device) for t in _concatenate(leaves, sizes, output.view(len(sizes), block))]


def _concatenate(leaves: Sequence[Leaf], sizes: Sequence[Sequence[int]], buffers: torch.Tensor) -> list[torch.Tensor]:
    """The gathered tensors out of ``[world, bytes]`` packed buffers."""
    first = sizes[0]
    if not any(rows != first for rows in sizes):  # every part starts at the same place on each rank
        results = []
        offset = 0
        for leaf, n in zip(leaves, first, strict=True):
            size = n * leaf.row_bytes
            part = buffers[:, offset : offset + size].contiguous().view(leaf.tensor.dtype)
            results.append(part.view(len(sizes) * n, *leaf.row_shape))
            offset += align(size)
        return results
    ranks = []
    for rows, buffer in zip(sizes, buffers, strict=True):
        likes = [(leaf.tensor.dtype, (n, *leaf.row_shape)) for leaf, n in zip(leaves, rows, strict=True)]
        ranks.append(unpack(buffer, likes))
    return [torch.cat(pieces) for pieces in zip(*ranks, strict=True)]


def _total(leaves: Sequence[Leaf], rows: Sequence[int]) -> int:
    return sum([align(leaf.row_bytes * n) for leaf, n in zip(leaves, rows, strict=True)])


def _parts(leaves: Sequence[Leaf], largest: int) -> Iterable[list[int]]:
    """Indices of leaves that travel together: all of one device type, or, if there is much to send, each by itself."""
    if largest > PACK_LIMIT:
        return [[i] for i in range(len(leaves))]
    types: dict[str, list[int]] = {}
    for i, leaf in enumerate(leaves):
        types.setdefault(leaf.tensor.device.type, []).append(i)
    return types.values()


def _uneven_text(leaves: Sequence[Leaf], sizes: Sequence[Sequence[int]], group: dist.ProcessGroup | None) -> str:
    lines = []
    for rank, rows in zip(global_ranks(group), sizes, strict=True):
        shapes = [f"{leaf.path}{[n, *leaf.row_shape]}" for leaf, n in zip(leaves, rows, strict=True)]
        lines.append(f"  rank {rank}: {', '.join(shapes)}")
    return (
        "The ranks' tensors have different numbers of rows, which gather refuses in debug mode:\n"
        + "\n".join(lines)
        + "\nUse `pad_across_processes` first, or switch debug mode off to get the rows that there are."
    )


# -- reduce ----------------------------------------------------------------------------------------------------------------


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0, *, group: dist.ProcessGroup | None = None) -> Any:
    """Combine every rank's tensors element by element; all ranks get the result, bit for bit the same.

    float16 and bfloat16 are summed in float32 and rounded once. A mean of integers or bools is a tensor of the default float dtype, a sum of
    bools an int64 tensor, at every world size; integers keep their dtype otherwise (and wrap around as it does), unless there is a ``scale``.

    Args:
        tensor: Any nested structure. Shapes must be equal on all ranks.
        reduction: "mean", "sum", "max", "min", or "none", which returns ``tensor``.
        scale: The result is multiplied by it.
        group: Process group; None for all ranks.

    Returns:
        The structure with new tensors in place of the old ones.

    Raises:
        ConfigurationError: For another reduction.
        DistributedOperationError: On every rank, if they disagree (see the module) or one fails.
        TypeError: If ``tensor`` is neither a tensor nor a container, or for the maximum of complex numbers.

    Example:
        >>> reduce([torch.tensor([1, 2]), "a"], "mean", scale=2.0)
        [tensor([2., 4.]), 'a']
    """
    if reduction not in _REDUCTIONS:
        raise ConfigurationError(
            f"reduction={reduction!r} isn't known; use one of {', '.join(map(repr, _REDUCTIONS))}."
        )
    if reduction == "none":
        return tensor
    world = members(group)[1]
    if world == 1:
        return map_tensors(lambda t: _finish(_accumulator(t, reduction).clone(), t.dtype, reduction, scale, 1), tensor)
    leaves = prepare("reduce", tensor, group, lambda leaf: _accumulator(leaf.tensor, reduction))
    terms = [_accumulator(leaf.tensor, reduction) for leaf in leaves]
    payload, total = inline(terms)
    layout = ",".join([leaf.describe(shape=str(list(leaf.tensor.shape))) for leaf in leaves])
    frames = exchange(
        "reduce",
        layout=f"{reduction},{scale},{layout}",
        payload=payload,
        payload_bytes=total,
        group=group,
    )
    if all_inline(leaves, frames):
        sums = _combine(terms, list(frames.inline), reduction)
    elif reduction in ("max", "min"):
        sums = _extremes(terms, reduction, group)
    else:
        sums = _all_reduce(terms, group)
    results = [_finish(s, leaf.tensor.dtype, reduction, scale, world) for s, leaf in zip(sums, leaves, strict=True)]
    return replace(tensor, leaves, results)


def _accumulator(tensor: torch.Tensor, reduction: str) -> torch.Tensor:
    """What is added up (or compared) for a tensor: wide enough, and of a dtype that any backend knows."""
    tensor = tensor.detach()
    dtype = tensor.dtype
    extreme = reduction in ("max", "min")
    if dtype.is_complex:
        if extreme:
            raise TypeError(f"Complex numbers have no {reduction}. Reduce their absolute values.")
        return tensor
    if dtype.is_floating_point:
        return tensor.to(torch.float32) if dtype.itemsize < 4 else tensor
    return tensor if extreme and dtype in (torch.bool, torch.uint64) else tensor.to(torch.int64)


def _finish(value: torch.Tensor, dtype: torch.dtype, reduction: str, scale: float, world: int) -> torch.Tensor:
    if reduction == "mean":
        value = value / world
    if scale != 1.0:
        value = value * scale
    if dtype.is_floating_point or dtype.is_complex:
        return value.to(dtype)
    counted = dtype == torch.bool and reduction == "sum"
    return value if counted or value.dtype.is_floating_point else value.to(dtype)


def _combine(terms: Sequence[torch.Tensor], buffers: list[torch.Tensor], reduction: str) -> list[torch.Tensor]:
    """Combine packed ranks locally, in the order of ranks."""
    likes = [(term.dtype, tuple(term.shape)) for term in terms]
    ranks = [unpack(buffer, likes) for buffer in buffers]
    combined = []
    for values in zip(*ranks, strict=True):
        stacked = torch.stack(values)
        if reduction == "max":
            combined.append(stacked.amax(0))
        elif reduction == "min":
            combined.append(stacked.amin(0))
        else:
            combined.append(stacked.sum(0, dtype=stacked.dtype))
    return combined


def _extremes(terms: Sequence[torch.Tensor], reduction: str, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Gather and compare locally: backends differ in what they make of NaN, torch's ``amax`` keeps it."""
    leaves = [Leaf("", term.reshape(1, *term.shape)) for term in terms]
    sizes = [[1] * len(leaves)] * members(group)[1]
    results: list[torch.Tensor | None] = [None] * len(leaves)
    for part in _parts(leaves, _total(leaves, sizes[0])):
        part_sizes = [[1] * len(part)] * len(sizes)
        for i, stacked in zip(part, _gather_part("reduce", [leaves[i] for i in part], part_sizes, group), strict=True):
            results[i] = stacked.amax(0) if reduction == "max" else stacked.amin(0)
    return [r for r in results if r is not None]


def _all_reduce(terms: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Sum over ranks: one all-reduce per device type and dtype."""
    kinds: dict[tuple[str, torch.dtype], list[int]] = {}
    for i, term in enumerate(terms):
        kinds.setdefault((term.device.type, term.dtype), []).append(i)
    results: list[torch.Tensor | None] = [None] * len(terms)
    for part in kinds.values():
        device = terms[part[0]].device
        wire = communication_device(group, device)
        flat = torch.cat([terms[i].reshape(-1) for i in part]).to(wire)
        buffer = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
        if buffer.numel():
            call("reduce", group, dist.all_reduce, buffer)
        flat = flat.to(device)
        for i, value in zip(part, torch.split(flat, [terms[i].numel() for i in part]), strict=True):
            results[i] = value.view(terms[i].shape)
    return [r for r in results if r is not None]


# -- broadcast -------------------------------------------------------------------------------------------------------------


def broadcast(tensor: Any, from_process: int = 0, *, group: dist.ProcessGroup | None = None) -> Any:
    """Give every rank the values that one rank has.

    The other ranks' tensors are overwritten in place, as with ``torch.distributed.broadcast``, and returned; where a tensor can't be
    written (an expanded one, one of inference mode), a new one takes its place in what is returned.

    Args:
        tensor: Any nested structure. Shapes must be equal on all ranks.
        from_process: The rank, in ``group``, whose values are sent.
        group: Process group; None for all ranks.

    Raises:
        ConfigurationError: If there is no such rank.
        DistributedOperationError: On every rank, if they disagree (see the module) or one fails.
        TypeError: If ``tensor`` is neither a tensor nor a container.

    Example:
        >>> broadcast((torch.ones(1), "a"))
        (tensor([1.]), 'a')
    """
    rank, world = members(group)
    check_rank(from_process, world, "from_process")
    if world == 1:
        return tensor
    leaves = prepare("broadcast", tensor, group)
    source = rank == from_process
    payload, total = inline([leaf.tensor for leaf in leaves])
    layout = ",".join([leaf.describe(shape=str(list(leaf.tensor.shape))) for leaf in leaves])
    frames = exchange(
        "broadcast",
        layout=f"from {from_process},{layout}",
        payload=payload if source else None,
        payload_bytes=total,
        group=group,
    )
    if all_inline(leaves, frames):
        values = unpack(frames.inline[from_process], _likes(leaves)) if not source else []
    else:
        values = _broadcast_leaves(leaves, total, from_process, source, group)
    if source:
        return tensor
    return replace(tensor, leaves, [_overwrite(leaf.tensor, v) for leaf, v in zip(leaves, values, strict=True)])


def _broadcast_leaves(
    leaves: Sequence[Leaf], total: int, from_process: int, source: bool, group: dist.ProcessGroup | None
) -> list[torch.Tensor]:
    results: list[torch.Tensor | None] = [None] * len(leaves)
    for part in _parts(leaves, total):
        tensors = [leaves[i].tensor for i in part]
        wire = communication_device(group, tensors[0].device)
        size = sum([align(t.numel() * t.element_size()) for t in tensors])
        buffer = pack(tensors, size=size, device=wire) if source else torch.empty(size, dtype=torch.uint8, device=wire)
        if size:
            call("broadcast", group, dist.broadcast, buffer, group_src=from_process)
        for i, value in zip(part, unpack(buffer, _likes([leaves[i] for i in part])), strict=True):
            results[i] = value
    return [r for r in results if r is not None]


def _likes(leaves: Sequence[Leaf]) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    return [(leaf.tensor.dtype, tuple(leaf.tensor.shape)) for leaf in leaves]


def _overwrite(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    try:
        with torch.no_grad():
            return tensor.copy_(value)
    except RuntimeError:  # memory that several elements share, or a tensor of inference mode
        return value.to(tensor.device, copy=True)


def _debug(debug: bool | None) -> bool:
    if debug is not None:
        return debug
    return os.environ.get("DRIVETRAIN_DEBUG", "").lower() in ("1", "true", "yes", "on")
