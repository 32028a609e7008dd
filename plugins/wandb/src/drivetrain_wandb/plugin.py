"""Entry module of the plugin; imports neither torch nor wandb."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs import hookimpl
from drivetrain.specs import TrackerSpec

__all__ = ["DRIVETRAIN_API", "SPEC", "drivetrain_register_trackers"]

DRIVETRAIN_API = 1

SPEC = TrackerSpec(
    name="wandb",
    summary="Weights & Biases, online or offline",
    target="drivetrain_wandb.tracker:WandbTracker",
    options="drivetrain_wandb.options:WandbOptions",
    every_rank=True,
    kinds=frozenset({"config", "images", "figure", "table", "histogram", "text", "artifact", "summary"}),
)


@hookimpl
def drivetrain_register_trackers() -> Iterable[TrackerSpec]:
    """Offer the tracker."""
    return [SPEC]
