"""Discovery of plugins and the registry of what they offer. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain._plugins.handshake import verify_ranks
    from drivetrain._plugins.known import KnownPlugin, find_known, known_plugins
    from drivetrain._plugins.process import get_registry
    from drivetrain._plugins.record import KINDS, PluginRecord, Status, kind_of
    from drivetrain._plugins.registry import MissingExportError, Registry

__all__ = [
    "KINDS",
    "KnownPlugin",
    "MissingExportError",
    "PluginRecord",
    "Registry",
    "Status",
    "find_known",
    "get_registry",
    "kind_of",
    "known_plugins",
    "verify_ranks",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "handshake": ["verify_ranks"],
        "known": ["KnownPlugin", "find_known", "known_plugins"],
        "record": ["KINDS", "PluginRecord", "Status", "kind_of"],
        "process": ["get_registry"],
        "registry": ["MissingExportError", "Registry"],
    },
)
