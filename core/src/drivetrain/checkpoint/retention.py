"""Which old checkpoints go when a new one is whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.naming import Found
from drivetrain.checkpoint.plain import decode
from drivetrain.errors import ConfigurationError

__all__ = ["Keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """A rule for which checkpoints of a run to keep. One that any part of the rule wants is kept; the newest always is.

    Args:
        last: How many of the newest; None for one where another part of the rule says what to keep besides, and else for all.
        every: Those whose step is a multiple of this, for ever.
        best: How many of the best by ``metric``.
        metric: A name in the ``metadata`` given to ``save_state``.
        mode: Whether a lower ("min") or higher ("max") value is better.

    Example:
        >>> Keep(last=2, every=1000, best=1, metric="loss").mode
        'min'
    """

    last: int | None = None
    every: int | None = None
    best: int | None = None
    metric: str = ""
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("last", "every", "best"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"Keep: {name} must be at least 1; it is {value}")
        if (self.best is None) != (not self.metric):
            raise ConfigurationError("Keep: best and metric go together")
        if self.mode not in ("min", "max"):
            raise ConfigurationError(f"Keep: mode must be 'min' or 'max'; it is {self.mode!r}")

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is ever removed."""
        return self.last is None and self.every is None and self.best is None

    def expired(self, present: Sequence[tuple[Found, Manifest]], *, run: str) -> list[Found]:
        """Which of a folder's checkpoints to remove, oldest first. Those of other runs stay.

        Args:
            present: The checkpoints, in any order.
            run: Id of the run that asks.
        """
        own = sorted((e for e in present if e[1].run == run), key=lambda e: e[0].number)
        if self.keeps_all:
            return []
        kept = {found for found, _ in own[-(self.last or 1) :]}
        if self.every is not None:
            kept |= {found for found, m in own if int(m.counters.get("step", 1)) % self.every == 0}
        if self.best is not None:
            sign = 1 if self.mode == "min" else -1
            scored = [(sign * value, -found.number, found) for found, m in own if (value := self._value(m)) is not None]
            kept |= {found for _, _, found in sorted(scored)[: self.best]}
        return [found for found, _ in own if found not in kept]

    def _value(self, manifest: Manifest) -> float | None:
        value = decode(manifest.metadata, lambda name: None).get(self.metric)
        return None if value is None or value != value else float(value)
