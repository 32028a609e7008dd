"""Conformance of backends."""

from __future__ import annotations

from drivetrain.testing._backend_training import TrainingTests

__all__ = ["BackendConformance"]


class BackendConformance(TrainingTests):
    """What every backend must do."""
