"""Models larger than memory: building them without weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.big_model.first_values import has_empty, inner_first, reset_functions
    from drivetrain.big_model.initialization import init_empty_weights, init_on_device

__all__ = ["has_empty", "init_empty_weights", "init_on_device", "inner_first", "reset_functions"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "first_values": ["has_empty", "inner_first", "reset_functions"],
        "initialization": ["init_empty_weights", "init_on_device"],
    },
)
