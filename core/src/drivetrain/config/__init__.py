"""The schema machinery of configuration: options classes, precedence, origins, files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.config.options import Options

__all__ = ["Options"]

__getattr__, __dir__ = lazy_exports(__name__, {"options": ["Options"]})
