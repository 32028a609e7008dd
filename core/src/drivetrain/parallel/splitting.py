"""Each rank's part of a list, tuple, dict, tensor or data set, without communication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from drivetrain.errors import ConfigurationError
from drivetrain.parallel._containers import container_of

__all__ = ["split_between_processes", "split_bounds"]


def split_bounds(length: int, rank: int, world: int) -> tuple[int, int]:
    """Start and end of a rank's part of ``length`` items: sizes differ by one at most, the first ranks have the larger ones.

    Example:
        >>> [split_bounds(5, rank, 3) for rank in range(3)]
        [(0, 2), (2, 4), (4, 5)]
    """
    size, extra = divmod(length, world)
    start = rank * size + min(rank, extra)
    return start, start + size + (rank < extra)


def split_between_processes(inputs: Any, rank: int, world: int, *, apply_padding: bool = False) -> Any:
    """The part of ``inputs`` that belongs to a rank.

    With fewer items than ranks, a rank that would have none gets the last item. Without items there is nothing to give: every rank gets
    the empty input.

    Args:
        inputs: A list, tuple, tensor (rows), data set, or anything else with a length that can be sliced; or a dict of such, all of the
            same length (its values may be dicts again). A data set with ``features`` and ``select(indices)`` is asked for its part, a
            map-style data set of torch becomes a ``Subset``.
        rank: The rank.
        world: Number of ranks. One gets everything.
        apply_padding: Repeat the last item of the shorter parts, so that all are equally long.

    Returns:
        An object like ``inputs``, which isn't changed.

    Raises:
        ConfigurationError: If the values of a dict have different lengths.
        TypeError: If ``inputs`` can't be split.

    Example:
        >>> split_between_processes(["a", "b", "c"], rank=1, world=2)
        ['c']
        >>> split_between_processes({"x": ["a", "b", "c"]}, rank=1, world=2, apply_padding=True)
        {'x': ['c', 'c']}
    """
    if world == 1:
        return inputs
    lengths: dict[str, int] = {}
    _lengths(inputs, "", lengths)
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{path}: {n}" for path, n in lengths.items())
        raise ConfigurationError(
            f"All values of a dict must have the same length to be split between processes; got {listed}."
        )
    length = next(iter(lengths.values()), 0)
    start, end = split_bounds(length, rank, world)
    if start >= length:
        start, end = max(length - 1, 0), length
    padding = -(-length // world) - (end - start) if apply_padding and length else 0
    return _take(inputs, start, end, padding)


def _lengths(value: Any, path: str, lengths: dict[str, int]) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _lengths(item, f"{path}[{key!r}]", lengths)
        return
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
        where = f" at {path}" if path else ""
        raise TypeError(
            f"A {type(value).__name__}{where} can't be split between processes. Pass a list, tuple, tensor, data set or a dict of them."
        )
    lengths[path] = len(value)


def _take(value: Any, start: int, end: int, padding: int) -> Any:
    if isinstance(value, Mapping):
        rules = container_of(value)
        assert rules is not None, "every mapping has rules"
        return rules.rebuild(value, [_take(item, start, end, padding) for item in value.values()])
    if isinstance(value, torch.Tensor):
        part = value[start:end]
        return part if not padding else torch.cat([part, part[-1:].expand(padding, *part.shape[1:])])
    indices = [*range(start, end), *[end - 1] * padding]
    if hasattr(value, "select") and hasattr(value, "features"):  # a table: a slice of it would be a dict of columns
        return value.select(indices)
    if isinstance(value, torch.utils.data.Dataset):
        return torch.utils.data.Subset(value, indices)
    part = value[start:end]
    if not padding:
        return part
    if isinstance(part, list):
        return part + [part[-1]] * padding
    if isinstance(part, tuple):
        return part + (part[-1],) * padding
    if hasattr(part, "take") and hasattr(part, "dtype"):  # numpy
        return part.take([*range(end - start), *[end - start - 1] * padding], axis=0)
    return [*part, *[part[-1]] * padding]
