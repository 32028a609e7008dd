"""Which code is the user's own: the lines that a report about ranks should name. Imports no torch."""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

__all__ = ["is_users", "short"]

#: Packages of another environment on the path, and plugins that are installed in place, by the rule for their names.
_INSTALLED = re.compile(r"[/\\](site-packages|dist-packages|src[/\\]drivetrain_\w+)[/\\]")


def is_users(file: str) -> bool:
    """Whether a file's code is the user's: no library's, and no part of Drivetrain.

    Example:
        >>> is_users("/home/me/train.py"), is_users(re.__file__), is_users("<frozen runpy>")
        (True, False, False)
    """
    return not (file.startswith(_libraries()) or _INSTALLED.search(file))


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Where the standard library, installed packages and this package (which may be installed in place) lie."""
    import sysconfig

    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return (*{paths[name] for name in names}, str(Path(__file__).parent), "<frozen")


def short(file: str) -> str:
    """A file's name as a person would type it: relative to the working directory if it lies there.

    Example:
        >>> short(str(Path.cwd() / "train.py")), short("/nowhere/train.py")
        ('train.py', '/nowhere/train.py')
    """
    here = os.path.join(os.getcwd(), "")  # noqa: PTH109, PTH118  # plain text: files in notebooks are no paths
    return file.removeprefix(here)
