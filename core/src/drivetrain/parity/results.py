"""What a comparison finds, and how much two runs may differ by rounding alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["Cause", "Difference", "Tolerance"]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs part.

    Args:
        kind: What differs: "samples", "inputs", "module output", "loss", "gradient", "weights", ...
        step: Optimizer steps made before.
        name: Of the module, tensor, setting or metric.
        text: The numbers of both, as a clause.
        single: The number of one process.
        several: That of several.
        relative: How far they are apart, as a part of the larger.
        tolerance: How far they may be.
        type: Class of the module.
        count, of: How many tensors of how many differ.
    """

    kind: str
    step: int
    name: str
    text: str
    single: float | None = None
    several: float | None = None
    relative: float | None = None
    tolerance: float | None = None
    type: str = ""
    count: int = 1
    of: int = 1

    def among(self, count: int, of: int) -> Difference:
        """The same, as one of several."""
        return replace(self, count=count, of=of)


@dataclass(frozen=True, slots=True)
class Cause:
    """What a difference likely comes from.

    Args:
        key: A short name.
        text: The cause, as a sentence.
        remedy: What to do.
    """

    key: str
    text: str
    remedy: str


#: Relative differences that a sum in another order may make in the first step, by the narrowest dtype that takes part.
_BASE = {"float64": 1e-8, "float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
#: Of what is narrower still.
_NARROW = 1e-1


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far numbers of the two runs may be apart.

    Rounding adds up over steps, so the tolerance grows with them.

    Args:
        base: In the first step.
        gradients: Factor for gradients, which are sums of many narrow numbers.

    Example:
        >>> Tolerance.of("float32", "bfloat16").at(0), Tolerance.of("float32").at(1)
        (0.04, 0.0002)
    """

    base: float
    gradients: float = 1.0

    @classmethod
    def of(cls, *dtypes: str) -> Tolerance:
        """For the narrowest of some dtypes; names that aren't floating point don't count."""
        bases = [_BASE.get(d, _NARROW) for d in dtypes if d.startswith(("float", "bfloat"))]
        base = max(bases, default=_BASE["float32"])
        return cls(base, 2.0 if base > _BASE["float32"] else 1.0)

    def at(self, step: int) -> float:
        """After so many steps."""
        return self.base * (1 + step)
