"""Sizes that a configuration of ZeRO says. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Sizes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes in elements that a configuration says.

    Args:
        bucket: Of reductions.
        prefetch: Of what is gathered ahead at stage 3.
        persistent: Smaller parameters stay whole at stage 3.
        live: Gathered parameters that may stay at stage 3.

    Example:
        >>> Sizes(bucket=10).live
        1000000000
    """

    bucket: int
    prefetch: int = 50_000_000
    persistent: int = 100_000
    live: int = 1_000_000_000
