"""Entry module of the plugin; imports neither torch nor mlflow."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs import hookimpl
from drivetrain.specs import TrackerSpec

__all__ = ["DRIVETRAIN_API", "SPEC", "drivetrain_register_trackers"]

DRIVETRAIN_API = 1

SPEC = TrackerSpec(
    name="mlflow",
    summary="MLflow, on a server or in a local database",
    target="drivetrain_mlflow.tracker:MlflowTracker",
    options="drivetrain_mlflow.options:MlflowOptions",
    kinds=frozenset({"config", "images", "figure", "table", "text", "artifact", "summary"}),
)


@hookimpl
def drivetrain_register_trackers() -> Iterable[TrackerSpec]:
    """Offer the tracker."""
    return [SPEC]
