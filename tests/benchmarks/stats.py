"""Estimates with 95 % intervals from interleaved blocks.

Block i of every series was measured next to block i of the others, so the blocks are resampled together: what slowed the
machine down for a moment slowed down all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


def median(series: Sequence[float]) -> Interval:
    """The median of one series."""
    return _bootstrap(lambda s: np.median(s[0], axis=-1), series)


def ratio(series: Sequence[float], base: Sequence[float]) -> Interval:
    """How many times ``base`` is ``series``: the quotient of their medians."""
    return _bootstrap(lambda s: np.median(s[0], axis=-1) / np.median(s[1], axis=-1), series, base)


def paired_ratio(series: Sequence[float], base: Sequence[float]) -> Interval:
    """How many times ``base`` is ``series``, from the differences of neighbouring blocks: for ratios near 1 on a busy machine."""
    return _bootstrap(lambda s: 1 + np.median(s[0] - s[1], axis=-1) / np.median(s[1], axis=-1), series, base)


def overhead(series: Sequence[float], base: Sequence[float]) -> Interval:
    """What ``series`` costs over ``base``: the median of the differences."""
    return _bootstrap(lambda s: np.median(s[0] - s[1], axis=-1), series, base)


def overhead_ratio(series: Sequence[float], other: Sequence[float], base: Sequence[float]) -> Interval:
    """The overhead of ``series`` over ``base`` as a part of the overhead of ``other``."""
    return _bootstrap(lambda s: np.median(s[0] - s[2], axis=-1) / np.median(s[1] - s[2], axis=-1), series, other, base)


def _bootstrap(statistic: Callable[[np.ndarray], np.ndarray], *series: Sequence[float]) -> Interval:
    data = np.asarray(series, dtype=float)
    blocks = data.shape[1]
    chosen = np.random.default_rng(0).integers(0, blocks, (RESAMPLES, blocks))
    low, high = np.quantile(statistic(data[:, chosen]), [0.025, 0.975])
    return Interval(float(statistic(data)), float(low), float(high))
