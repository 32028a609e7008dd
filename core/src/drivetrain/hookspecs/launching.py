"""Hooks of launching."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs._markers import hookspec
from drivetrain.specs import LauncherSpec

__all__ = ["drivetrain_register_launchers"]


@hookspec
def drivetrain_register_launchers() -> Iterable[LauncherSpec]:
    """Offer ways to start a job's processes.

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
        >>> from drivetrain.specs import LauncherSpec
        >>> @hookimpl
        ... def drivetrain_register_launchers():
        ...     return [LauncherSpec(name="toy", target="toy.launcher:ToyLauncher")]
    """
    raise NotImplementedError
