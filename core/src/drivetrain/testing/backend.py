"""Conformance of backends."""

from __future__ import annotations

from drivetrain.testing._backend_models import ModelTests
from drivetrain.testing._backend_objects import ObjectTests
from drivetrain.testing._backend_state import StateTests
from drivetrain.testing._backend_windows import WindowTests

__all__ = ["BackendConformance"]


class BackendConformance(ModelTests, WindowTests, ObjectTests, StateTests):
    """What every backend must do."""
