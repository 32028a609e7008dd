"""Cutting what was logged to what a system takes: by kind, by length, by number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

__all__ = ["chunks", "join_text", "numbers_and_texts", "split_text"]

T = TypeVar("T")

#: Between a long text's name and the number of its part.
_MARK = ".part"


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """The items in order, at most ``size`` at a time.

    Example:
        >>> list(chunks([1, 2, 3], 2))
        [[1, 2], [3]]
    """
    for start in range(0, len(items), size):
        yield items[start : start + size]


def numbers_and_texts(
    values: Mapping[str, Any], *, keeps_infinity: bool = True, largest: float = math.inf
) -> tuple[dict[str, float | int], dict[str, str]]:
    """A row's numbers, and what must be stored as text.

    Args:
        values: A row.
        keeps_infinity: Whether the system stores infinities; else they are texts.
        largest: The largest number that it stores; larger ones are texts.

    Example:
        >>> numbers_and_texts({"a": 1, "b": "x", "c": True, "d": float("inf")}, keeps_infinity=False)
        ({'a': 1, 'c': 1}, {'b': 'x', 'd': 'inf'})
    """
    numbers: dict[str, float | int] = {}
    texts: dict[str, str] = {}
    for name, value in values.items():
        kind = type(value)
        if kind is float:
            if (keeps_infinity or not math.isinf(value)) and (not math.isfinite(value) or abs(value) <= largest):
                numbers[name] = value
            else:
                texts[name] = repr(value)
        elif kind is str:
            texts[name] = value
        elif kind is bool:
            numbers[name] = int(value)
        elif abs(value) <= min(largest, 1e308):
            numbers[name] = value
        else:
            texts[name] = str(value)
    return numbers, texts


def split_text(name: str, text: str, limit: int) -> dict[str, str]:
    """A text in parts that the system takes: the first under its name, further ones under ``name.part2``, ``name.part3``, ...

    Example:
        >>> split_text("note", "abcde", 2)
        {'note': 'ab', 'note.part2': 'cd', 'note.part3': 'e'}
    """
    parts = list(chunks(text, limit)) or [""]
    return {name if i == 0 else f"{name}{_MARK}{i + 1}": str(part) for i, part in enumerate(parts)}


def join_text(parts: Mapping[str, str]) -> dict[str, str]:
    """The inverse of `split_text` for many texts at once.

    Example:
        >>> join_text({"note": "ab", "note.part2": "cd", "other": "x"})
        {'note': 'abcd', 'other': 'x'}
    """
    joined: dict[str, str] = {}
    for name, text in parts.items():
        base, mark, number = name.rpartition(_MARK)
        if not (mark and number.isdigit() and base in parts):
            joined[name] = text
    for name in joined:
        count = 2
        while (part := f"{name}{_MARK}{count}") in parts:
            joined[name] += parts[part]
            count += 1
    return joined
