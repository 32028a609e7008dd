"""Reading environment variables, and changing them for a block of code (only ever when the user asks)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

from drivetrain.errors import ConfigurationError

__all__ = [
    "clear_environment",
    "get_int_from_env",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "str_to_bool",
]

_TRUE = frozenset({"y", "yes", "t", "true", "on", "1"})
_FALSE = frozenset({"n", "no", "f", "false", "off", "0"})


def str_to_bool(value: str | bool) -> int:
    """1 for yes, 0 for no.

    Raises:
        ConfigurationError: For anything else.

    Example:
        >>> str_to_bool("yes"), str_to_bool("Off")
        (1, 0)
    """
    text = str(value).lower()
    if text in _TRUE:
        return 1
    if text in _FALSE:
        return 0
    raise ConfigurationError(f"{value!r} is neither yes nor no: write one of {', '.join(sorted(_TRUE | _FALSE))}.")


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """A variable as yes or no.

    Example:
        >>> parse_flag_from_env("NO_SUCH_VARIABLE", default=True)
        True
    """
    return bool(str_to_bool(os.environ.get(key, str(default))))


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """A variable as text.

    Example:
        >>> parse_choice_from_env("NO_SUCH_VARIABLE")
        'no'
    """
    return os.environ.get(key, default)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """The first of several variables that is a number from 0 on.

    Example:
        >>> get_int_from_env(["NO_SUCH_VARIABLE"], 3)
        3
    """
    for key in env_keys:
        value = int(os.environ.get(key, "-1"))
        if value >= 0:
            return value
    return default


@contextlib.contextmanager
def patch_environment(**variables: Any) -> Iterator[None]:
    """Set variables (names in upper case) inside the block.

    Example:
        >>> with patch_environment(my_variable=1):
        ...     os.environ["MY_VARIABLE"]
        '1'
        >>> "MY_VARIABLE" in os.environ
        False
    """
    before = {key.upper(): os.environ.get(key.upper()) for key in variables}
    os.environ.update({key.upper(): str(value) for key, value in variables.items()})
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Run the block without any variable.

    Example:
        >>> with clear_environment():
        ...     len(os.environ)
        0
    """
    before = dict(os.environ)
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
