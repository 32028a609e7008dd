"""Entry module of the plugin; imports neither torch nor tensorboard."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs import hookimpl
from drivetrain.specs import TrackerSpec

__all__ = ["DRIVETRAIN_API", "SPEC", "drivetrain_register_trackers"]

DRIVETRAIN_API = 1

SPEC = TrackerSpec(
    name="tensorboard",
    summary="TensorBoard event files in the logging directory",
    target="drivetrain_tensorboard.tracker:TensorBoardTracker",
    options="drivetrain_tensorboard.options:TensorBoardOptions",
    needs_directory=True,
    kinds=frozenset({"config", "images", "figure", "histogram", "text", "artifact", "summary"}),
)


@hookimpl
def drivetrain_register_trackers() -> Iterable[TrackerSpec]:
    """Offer the tracker."""
    return [SPEC]
