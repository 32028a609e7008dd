"""Where in the user's code something happens."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType, TracebackType

__all__ = ["is_own_read", "line_of", "place", "place_of_error"]

_HERE = f"{Path(__file__).parent}{os.sep}"


_LIBRARIES = tuple(f"{path}{os.sep}" for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name)))
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def _is_users(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    if name.startswith(("<", *_LIBRARIES)) or any(part in name for part in _INSTALLED):
        return False
    return not _is_own(frame)


def _is_own(frame: FrameType) -> bool:
    """Whether a frame is Drivetrain's or a plugin's of its: the module's name tells, wherever it is installed."""
    module = str(frame.f_globals.get("__name__", ""))
    return module == "drivetrain" or module.startswith(("drivetrain.", "drivetrain_"))


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return frame


def place(frame: FrameType | None = None) -> str:
    """The innermost line of the user's own code that leads to here: ``"train.py:12"``; empty if there is none.

    Example:
        >>> isinstance(place(), str)
        True
    """
    found = _users_frame(frame or sys._getframe(1))
    return "" if found is None else f"{_shown(found.f_code.co_filename)}:{found.f_lineno}"


def line_of(place: str) -> str:
    """The source of a place; empty if it can't be read."""
    import linecache

    path, _, number = place.rpartition(":")
    return linecache.getline(path, int(number)).strip() if number.isdigit() else ""


def place_of_error(traceback: TracebackType | None) -> str:
    """The same for where an error went through the user's code last."""
    found = ""
    while traceback is not None:
        if _is_users(traceback.tb_frame):
            found = f"{_shown(traceback.tb_frame.f_code.co_filename)}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def is_own_read() -> bool:
    """Whether Drivetrain itself asks for a value, and not the user's code or a library that this calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        module = str(frame.f_globals.get("__name__", ""))
        if name.startswith((_HERE, "<")) or module == "torch" or module.startswith("torch."):
            frame = frame.f_back
            continue
        return _is_own(frame)
    return False


def _shown(path: str) -> str:
    """Relative to the current directory where it lies below it."""
    file = Path(path).absolute()
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)
