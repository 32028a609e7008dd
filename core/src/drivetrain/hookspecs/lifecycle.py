"""Hooks of the session's lifecycle: rare events, never inside a training step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.hookspecs._markers import hookspec

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator

__all__ = [
    "drivetrain_after_prepare",
    "drivetrain_after_start",
    "drivetrain_before_end",
    "drivetrain_before_prepare",
]


@hookspec
def drivetrain_after_start(accelerator: Accelerator) -> None:
    """An Accelerator is ready: processes have met, the plan is fixed.

    Called:
        At the end of the Accelerator's constructor.
    Result:
        None. An exception stops the operation on every rank.
    Ranks:
        Every rank.
    Since:
        API 1.

    Example:
        >>> from drivetrain.hookspecs import hookimpl
        >>> @hookimpl
        ... def drivetrain_after_start(accelerator):
        ...     print(accelerator.device)
    """
    raise NotImplementedError


@hookspec
def drivetrain_before_prepare(accelerator: Accelerator, objects: tuple[Any, ...]) -> None:
    """Objects are about to be prepared.

    Called:
        At the start of ``prepare``.
    Result:
        None. An exception stops the operation on every rank.
    Ranks:
        Every rank.
    Since:
        API 1.

    Example:
        >>> from drivetrain.hookspecs import hookimpl
        >>> @hookimpl
        ... def drivetrain_before_prepare(accelerator, objects):
        ...     print(len(objects), "objects")
    """
    raise NotImplementedError


@hookspec
def drivetrain_after_prepare(accelerator: Accelerator, objects: tuple[Any, ...]) -> None:
    """Objects were prepared; ``objects`` are the results, in the order given.

    Called:
        At the end of ``prepare``.
    Result:
        None. An exception stops the operation on every rank.
    Ranks:
        Every rank.
    Since:
        API 1.

    Example:
        >>> from drivetrain.hookspecs import hookimpl
        >>> @hookimpl
        ... def drivetrain_after_prepare(accelerator, objects):
        ...     print(len(objects), "objects")
    """
    raise NotImplementedError


@hookspec
def drivetrain_before_end(accelerator: Accelerator) -> None:
    """The session ends: trackers are still open, processes still meet.

    Called:
        At the start of ``end_training``.
    Result:
        None. An exception stops the operation on every rank.
    Ranks:
        Every rank.
    Since:
        API 1.

    Example:
        >>> from drivetrain.hookspecs import hookimpl
        >>> @hookimpl
        ... def drivetrain_before_end(accelerator):
        ...     print("bye from", accelerator.process_index)
    """
    raise NotImplementedError
