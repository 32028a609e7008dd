"""Models larger than memory: building them without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.big_model.initialization import init_empty_weights, init_on_device

__all__ = ["init_empty_weights", "init_on_device"]

__getattr__, __dir__ = lazy_exports(__name__, {"initialization": ["init_empty_weights", "init_on_device"]})
