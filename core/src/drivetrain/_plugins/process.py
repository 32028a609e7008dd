"""The process's registry: discovered once, when it is first asked for."""

from __future__ import annotations

import functools
import threading
from typing import Any

from drivetrain._plugins.registry import Registry
from drivetrain.errors import PluginError

__all__ = ["get_registry", "resolve_export"]

_discovering = threading.local()


@functools.cache
def _process_registry() -> Registry:
    return Registry.discover()


def get_registry() -> Registry:
    """The process's registry: discovered on the first call.

    Raises:
        PluginError: If a plugin's entry module asks for it while it is being discovered.

    Example:
        >>> get_registry() is get_registry()
        True
    """
    if getattr(_discovering, "active", False):
        raise PluginError("a plugin's entry module can't ask what plugins offer: they are being discovered")
    _discovering.active = True
    try:
        return _process_registry()
    finally:
        _discovering.active = False


def resolve_export(name: str) -> Any:
    """The object behind a name that a plugin exports: what ``drivetrain`` and ``drivetrain.utils`` fall back to.

    Raises:
        AttributeError: If no plugin knows the name, or while plugins are being discovered (``from drivetrain import module``
            in a plugin asks for the attribute before it imports the submodule).
        PluginError: As `Registry.export`.

    Example:
        >>> resolve_export("no_such_name")
        Traceback (most recent call last):
        ...
        AttributeError: module 'drivetrain' has no attribute 'no_such_name'
    """
    if getattr(_discovering, "active", False):
        raise AttributeError(f"module 'drivetrain' has no attribute {name!r}")
    return get_registry().export(name)
