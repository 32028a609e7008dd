"""Hooks of the command line."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs._markers import hookspec
from drivetrain.specs import CommandSpec

__all__ = ["drivetrain_register_commands"]


@hookspec
def drivetrain_register_commands() -> Iterable[CommandSpec]:
    """Offer subcommands of ``drivetrain``.

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
        >>> from drivetrain.specs import CommandSpec
        >>> @hookimpl
        ... def drivetrain_register_commands():
        ...     return [CommandSpec(name="toy", target="toy.cli:toy", summary="Does a toy's work.")]
    """
    raise NotImplementedError
