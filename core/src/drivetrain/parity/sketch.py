"""Small fingerprints of tensors from which the distance of two tensors can be told, without either.

A *sketch* of x is its squared norm and some sums of its elements with signs that follow from an element's position (a count sketch: Charikar,
Chen and Farach-Colton 2002). Sketching is linear, so S(a) - S(b) = S(a - b), and the mean square of that is that of ``|a - b|``. Parts of a tensor on several
ranks are sketched where they are, and add up.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from drivetrain.checkpoint.tensors import is_sharded, local_blocks

__all__ = ["named_tensors", "sketch", "sketch_rows"]

#: Sums per part of a tensor, and per row of a batch.
BUCKETS, ROW_SUMS = 32, 4
#: Elements that are worked on at a time.
CHUNK = 1 << 20
_PRIME = 0x9E3779B97F4A7C15 - (1 << 64)


def sketch(value: Any, *, decades: bool = False) -> dict[str, Any]:
    """What this rank holds of a tensor: a plain one, a DTensor or `Shards`.

    Args:
        value: The tensor.
        decades: Also count how many elements there are of each power of ten.

    Returns:
        ``{"shape", "dtype", "parts": [{"at", "size", "square", "sums"}]}``: place and sketch of each rectangle, in float64; with ``decades``,
        ``{"-3": elements between 0.001 and 0.01, ...}`` in each part, without zeros.

    Example:
        >>> whole = sketch(torch.tensor([3.0, 4.0]))
        >>> whole["parts"][0]["square"], len(whole["parts"][0]["sums"])
        (25.0, 32)
    """
    shape = tuple(value.shape)
    blocks = [(b.offsets, b.values) for b in local_blocks(value)] if is_sharded(value) else [((0,) * len(shape), value)]
    return {
        "shape": list(shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "parts": [
            {**_part(offsets, block.detach(), shape), **({"decades": _decades(block.detach())} if decades else {})}
            for offsets, block in blocks
            if block.numel()
        ],
    }


def _decades(block: torch.Tensor) -> dict[str, int]:
    counts: Counter[int] = Counter()
    flat = block.reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        values = flat[start : start + CHUNK].to(torch.float64).abs()
        exponents = values[(values > 0) & values.isfinite()].log10().floor().to(torch.int64)
        found, numbers = exponents.unique(return_counts=True)
        counts.update(dict(zip(found.tolist(), numbers.tolist(), strict=True)))
    return {str(exponent): count for exponent, count in sorted(counts.items())}


def _part(offsets: Sequence[int], block: torch.Tensor, shape: Sequence[int]) -> dict[str, Any]:
    sums = torch.zeros(BUCKETS, dtype=torch.float64, device=block.device)
    square = torch.zeros((), dtype=torch.float64, device=block.device)
    flat = block.reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        values = flat[start : start + CHUNK].to(torch.float64)
        here = torch.arange(start, start + values.numel(), device=block.device)
        mixed = _mix(_global_positions(here, offsets, tuple(block.shape), shape))
        sums.index_add_(0, (mixed >> 8) & (BUCKETS - 1), values * _signs(mixed))
        square += values.square().sum()
    return {"at": list(offsets), "size": list(block.shape), "square": square.item(), "sums": sums.tolist()}


def _global_positions(
    here: torch.Tensor, offsets: Sequence[int], size: Sequence[int], shape: Sequence[int]
) -> torch.Tensor:
    """Positions in the whole tensor, counted row by row, of positions in a rectangle of it."""
    if tuple(size) == tuple(shape):
        return here
    positions = torch.zeros_like(here)
    stride = 1
    for offset, length, whole in zip(reversed(offsets), reversed(size), reversed(shape), strict=True):
        positions += (here % length + offset) * stride
        here = here // length
        stride *= whole
    return positions


def _mix(positions: torch.Tensor) -> torch.Tensor:
    """Bits that look random, of each position."""
    mixed = (positions + 1) * _PRIME
    mixed = (mixed ^ (mixed >> 29)) * _PRIME
    return mixed ^ (mixed >> 32)


def _signs(mixed: torch.Tensor) -> torch.Tensor:
    return ((mixed & 1) * 2 - 1).to(torch.float64)


@functools.lru_cache(maxsize=16)
def _row_signs(start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Signs of the columns ``start`` to ``stop`` of any row, (columns, ROW_SUMS)."""
    mixed = _mix(torch.arange(start, stop, device=device))
    return torch.stack([_signs(mixed >> (13 * i)) for i in range(ROW_SUMS)], dim=1)


def sketch_rows(value: torch.Tensor, rows: int | None) -> dict[str, Any] | None:
    """A sketch of each row of a batch.

    Args:
        value: A tensor in which one dimension is the batch's rows, or its first is a multiple of them (rows of tokens).
        rows: Number of rows of the batch.

    Returns:
        ``{"shape": shape of a row, "squares": [rows], "sums": [rows x 4]}``, or None where the rows can't be found.

    Example:
        >>> sketch_rows(torch.tensor([[1.0, 2.0], [0.0, 0.0]]), 2)["squares"]
        [5.0, 0.0]
        >>> sketch_rows(torch.ones(5), 2) is None
        True
    """
    split = _by_rows(value.detach(), rows)
    if split is None:
        return None
    table, shape = split
    sums = torch.zeros(table.shape[0], ROW_SUMS, dtype=torch.float64, device=table.device)
    squares = torch.zeros(table.shape[0], dtype=torch.float64, device=table.device)
    width = max(1, CHUNK // max(table.shape[0], 1))
    for start in range(0, table.shape[1], width):
        values = table[:, start : start + width].to(torch.float64)
        sums += values @ _row_signs(start, start + values.shape[1], table.device)
        squares += values.square().sum(1)
    return {"shape": shape, "squares": squares.tolist(), "sums": sums.tolist()}


def _by_rows(value: torch.Tensor, rows: int | None) -> tuple[torch.Tensor, list[int]] | None:
    """A tensor as (rows, rest), and the shape of a row."""
    if not rows or value.ndim == 0 or value.is_complex() or value.is_sparse:
        return None
    if value.ndim > 2 and value.shape[0] == value.shape[1] == rows:
        return None  # batch first or sequence first
    for dim in range(min(value.ndim, 2)):
        if value.shape[dim] == rows:
            moved = value.movedim(dim, 0)
            return moved.reshape(rows, -1), list(moved.shape[1:])
    if value.shape[0] and value.shape[0] % rows == 0:
        return value.reshape(rows, -1), [value.shape[0] // rows, *value.shape[1:]]
    return None


def named_tensors(data: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors of a nested structure by their paths.

    Example:
        >>> [name for name, _ in named_tensors(({"x": torch.ones(1)}, torch.ones(1)))]
        ['0.x', '1']
    """
    if isinstance(data, torch.Tensor):
        if not is_sharded(data) and not data.is_meta:
            yield name, data
        return
    items: Any = ()
    if isinstance(data, Mapping):
        items = data.items()
    elif isinstance(data, (list, tuple)):
        items = enumerate(data)
    for key, value in items:
        yield from named_tensors(value, f"{name}.{key}" if name else str(key))
