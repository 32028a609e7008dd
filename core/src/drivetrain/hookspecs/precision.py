"""Hooks of precision."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs._markers import hookspec
from drivetrain.specs import PrecisionSpec

__all__ = ["drivetrain_register_precisions"]


@hookspec
def drivetrain_register_precisions() -> Iterable[PrecisionSpec]:
    """Offer precisions.

    Called:
        Once, at discovery, in every process, before torch is imported by core.
    Result:
        Descriptors; an empty iterable if there is nothing to offer here. Duplicated names are an error that names both distributions.
    Ranks:
        Every rank; must return the same on each.
    Since:
        API 1.

    Example:
        >>> from drivetrain.hookspecs import hookimpl
        >>> from drivetrain.specs import PrecisionSpec
        >>> @hookimpl
        ... def drivetrain_register_precisions():
        ...     return [PrecisionSpec(name="toy", target="toy.precision:ToyPrecision")]
    """
    raise NotImplementedError
