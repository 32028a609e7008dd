"""A small selection of a product of settings in which every two values meet."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["pairwise"]


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Choose combinations so that each value of each axis meets each value of every other axis at least once.

    Greedy and deterministic: the combination that brings most new pairs is taken next.

    Args:
        axes: Values by the name of the axis.

    Returns:
        Combinations in the order in which they were chosen. At most the whole product; about the product of the two longest axes.

    Example:
        >>> chosen = pairwise({"a": [0, 1], "b": [0, 1], "c": [0, 1]})
        >>> len(chosen), chosen[0]
        (4, {'a': 0, 'b': 0, 'c': 0})
    """
    names = list(axes)
    spots = [range(len(axes[name])) for name in names]
    numbers: dict[tuple[int, int, int, int], int] = {}
    candidates = []
    for combination in itertools.product(*spots):
        mask = 0
        for (i, a), (j, b) in itertools.combinations(enumerate(combination), 2):
            mask |= 1 << numbers.setdefault((i, a, j, b), len(numbers))
        candidates.append((combination, mask))
    missing = (1 << len(numbers)) - 1
    chosen = candidates[:1] if len(names) < 2 else []
    if len(names) == 1:
        chosen = candidates
    while missing:
        best = max(candidates, key=lambda candidate: (candidate[1] & missing).bit_count())
        chosen.append(best)
        missing &= ~best[1]
    return [{name: axes[name][spot] for name, spot in zip(names, c, strict=True)} for c, _ in chosen]
