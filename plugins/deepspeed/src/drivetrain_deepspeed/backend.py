"""DeepSpeed's engine behind the Backend interface."""

from __future__ import annotations

from drivetrain.interfaces import Backend

__all__ = ["DeepSpeedBackend"]


class DeepSpeedBackend(Backend):
    """One engine per model."""
