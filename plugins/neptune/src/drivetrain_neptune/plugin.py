"""Entry module of the plugin; imports neither torch nor neptune_scale."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs import hookimpl
from drivetrain.specs import TrackerSpec

__all__ = ["DRIVETRAIN_API", "SPEC", "drivetrain_register_trackers"]

DRIVETRAIN_API = 1

SPEC = TrackerSpec(
    name="neptune",
    summary="Neptune, offline: its service has ended",
    target="drivetrain_neptune.tracker:NeptuneTracker",
    needs_directory=True,
    options="drivetrain_neptune.options:NeptuneOptions",
    kinds=frozenset({"config", "images", "figure", "table", "histogram", "text", "artifact", "summary"}),
)


@hookimpl
def drivetrain_register_trackers() -> Iterable[TrackerSpec]:
    """Offer the tracker."""
    return [SPEC]
