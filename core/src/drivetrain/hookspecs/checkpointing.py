"""Hooks of checkpointing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from drivetrain.hookspecs._markers import hookspec
from drivetrain.specs import CheckpointFormatSpec

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator

__all__ = [
    "drivetrain_after_load",
    "drivetrain_after_save",
    "drivetrain_before_load",
    "drivetrain_before_save",
    "drivetrain_register_checkpoint_formats",
]


@hookspec
def drivetrain_register_checkpoint_formats() -> Iterable[CheckpointFormatSpec]:
    """Offer checkpoint formats.

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
        >>> from drivetrain.specs import CheckpointFormatSpec
        >>> @hookimpl
        ... def drivetrain_register_checkpoint_formats():
        ...     return [CheckpointFormatSpec(name="toy", target="toy.format:ToyFormat")]
    """
    raise NotImplementedError


@hookspec
def drivetrain_before_save(accelerator: Accelerator, directory: Path) -> None:
    """A checkpoint is about to be written.

    Called:
        At the start of ``save_state``, before any state is collected.
    Result:
        None. An exception stops the operation on every rank.
    Ranks:
        Every rank.
    Since:
        API 1.

    Example:
        >>> from drivetrain.hookspecs import hookimpl
        >>> @hookimpl
        ... def drivetrain_before_save(accelerator, directory):
        ...     print("saving to", directory)
    """
    raise NotImplementedError


@hookspec
def drivetrain_after_save(accelerator: Accelerator, directory: Path) -> None:
    """A checkpoint is whole.

    Called:
        After the commit of ``save_state``.
    Result:
        None. An exception stops the operation on every rank.
    Ranks:
        Every rank.
    Since:
        API 1.

    Example:
        >>> from drivetrain.hookspecs import hookimpl
        >>> @hookimpl
        ... def drivetrain_after_save(accelerator, directory):
        ...     print("saved", directory)
    """
    raise NotImplementedError


@hookspec
def drivetrain_before_load(accelerator: Accelerator, directory: Path) -> None:
    """A checkpoint is about to be read.

    Called:
        At the start of ``load_state``, after the checkpoint was verified.
    Result:
        None. An exception stops the operation on every rank.
    Ranks:
        Every rank.
    Since:
        API 1.

    Example:
        >>> from drivetrain.hookspecs import hookimpl
        >>> @hookimpl
        ... def drivetrain_before_load(accelerator, directory):
        ...     print("loading", directory)
    """
    raise NotImplementedError


@hookspec
def drivetrain_after_load(accelerator: Accelerator, directory: Path) -> None:
    """All state was restored.

    Called:
        At the end of ``load_state``.
    Result:
        None. An exception stops the operation on every rank.
    Ranks:
        Every rank.
    Since:
        API 1.

    Example:
        >>> from drivetrain.hookspecs import hookimpl
        >>> @hookimpl
        ... def drivetrain_after_load(accelerator, directory):
        ...     print("loaded", directory)
    """
    raise NotImplementedError
