"""The process's registry: discovered once, when it is first asked for."""

from __future__ import annotations

import functools
import threading

from drivetrain._plugins.registry import Registry
from drivetrain.errors import PluginError

__all__ = ["DiscoveryError", "get_registry"]


class DiscoveryError(PluginError, AttributeError):
    """The registry was asked for while it is being made.

    It is an AttributeError, since ``from drivetrain import submodule`` in a plugin asks for the attribute, and so for an exported name,
    before it imports the submodule.
    """


_discovering = threading.local()


@functools.cache
def _process_registry() -> Registry:
    return Registry.discover()


def get_registry() -> Registry:
    """The process's registry: discovered on the first call.

    Raises:
        DiscoveryError: If a plugin's entry module asks for it while it is being discovered.

    Example:
        >>> get_registry() is get_registry()
        True
    """
    if getattr(_discovering, "active", False):
        raise DiscoveryError("a plugin's entry module can't ask what plugins offer: they are being discovered")
    _discovering.active = True
    try:
        return _process_registry()
    finally:
        _discovering.active = False
