"""Experiment tracking: the hub, trackers written in a script, and reading runs back. Importing this does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.tracking.compat import GeneralTracker, on_main_process
    from drivetrain.tracking.hub import TrackerHub
    from drivetrain.tracking.options import TrackingOptions
    from drivetrain.tracking.reader import Run, read_run
    from drivetrain.tracking.spool import read_spool

__all__ = ["GeneralTracker", "Run", "TrackerHub", "TrackingOptions", "on_main_process", "read_run", "read_spool"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "compat": ["GeneralTracker", "on_main_process"],
        "hub": ["TrackerHub"],
        "options": ["TrackingOptions"],
        "reader": ["Run", "read_run"],
        "spool": ["read_spool"],
    },
)
