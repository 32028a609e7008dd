"""Hooks of experiment tracking."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs._markers import hookspec
from drivetrain.specs import TrackerSpec

__all__ = ["drivetrain_register_trackers"]


@hookspec
def drivetrain_register_trackers() -> Iterable[TrackerSpec]:
    """Offer experiment trackers.

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
        >>> from drivetrain.specs import TrackerSpec
        >>> @hookimpl
        ... def drivetrain_register_trackers():
        ...     return [TrackerSpec(name="toy", target="toy.tracker:ToyTracker")]
    """
    raise NotImplementedError
