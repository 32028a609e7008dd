"""Names of Accelerate that Drivetrain doesn't have: what to use instead, or that they come later."""

from __future__ import annotations

import importlib
import json
from importlib import resources
from typing import Any, NoReturn

from drivetrain.errors import UnsupportedError

__all__ = ["MissingNameError", "from_utils", "missing"]


class MissingNameError(UnsupportedError, ImportError):
    """A name of Accelerate that isn't here.

    It is an ImportError, so that scripts with ``try: from ... import ...`` / ``except ImportError`` work, and what it says is shown.
    """


def from_utils(name: str) -> Any:
    """``__getattr__`` of modules that Accelerate has under ``utils``: whatever ``drivetrain.utils`` has.

    Example:
        >>> from_utils("set_seed").__name__
        'set_seed'
    """
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(importlib.import_module("drivetrain.utils"), name)


def missing(module: str, name: str, error: AttributeError) -> NoReturn:
    """Raise what is known about a name that a module doesn't have.

    Args:
        module: Who was asked.
        name: For what.
        error: Raised for a name about which nothing is known.

    Example:
        >>> missing("drivetrain.utils", "write_basic_config", AttributeError())
        Traceback (most recent call last):
        ...
        drivetrain._foreign.MissingNameError: drivetrain.utils has no 'write_basic_config'. No configuration file is needed; drivetrain.toml may hold one.
    """
    if name.startswith("_"):
        raise error
    known = json.loads(resources.files("drivetrain").joinpath("foreign_names.json").read_text(encoding="utf-8"))
    for sentence, names in known.items():
        if name in names:
            raise MissingNameError(f"{module} has no {name!r}. {sentence}") from None
    raise error
