"""Names of automatically named checkpoints: ``checkpoint_<n>``, and which of them is the newest whole one."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from drivetrain.checkpoint.location import Directory, Location, locate
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.errors import CheckpointError

__all__ = ["Found", "checkpoint_name", "list_checkpoints", "newest_checkpoint", "next_number", "usable_checkpoints"]

_NAME = re.compile(r"checkpoint_(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Found:
    """An entry of a folder that has a checkpoint's name.

    Args:
        number: n of ``checkpoint_<n>``.
        path: Where it is.
    """

    number: int
    path: Location


def checkpoint_name(number: int) -> str:
    """Name of the n-th checkpoint.

    Example:
        >>> checkpoint_name(3)
        'checkpoint_3'
    """
    return f"checkpoint_{number}"


def list_checkpoints(folder: Location) -> list[Found]:
    """All entries with a checkpoint's name, whole or not, by number. A folder that doesn't exist has none."""
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match:
                found.append(Found(int(match[1]), path))
    return sorted(found, key=lambda f: f.number)


def next_number(folder: Location, *, at_least: int = 0) -> int:
    """The number after the highest there is, broken ones included."""
    found = list_checkpoints(folder)
    return max(at_least, found[-1].number + 1 if found else 0)


def usable_checkpoints(folder: Location) -> Iterator[tuple[Found, Manifest]]:
    """Checkpoints whose files are all there, newest first. Others are skipped with a warning that says why. Reads no content."""
    for found in reversed(list_checkpoints(folder)):
        try:
            manifest = Manifest.read(found.path)
            manifest.check_files(found.path)
        except CheckpointError as error:
            warnings.warn(f"Skipping {found.path}: {error}", stacklevel=2)
            continue
        yield found, manifest


def newest_checkpoint(folder: Directory) -> Location | None:
    """The newest checkpoint whose files are all there, or None.

    Example:
        >>> newest_checkpoint("no/such/folder") is None
        True
    """
    return next((found.path for found, _ in usable_checkpoints(locate(folder))), None)
