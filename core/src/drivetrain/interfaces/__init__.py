"""What a plugin subclasses, one interface per module. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.interfaces.autocast import AutocastForward, AutocastPrecision
    from drivetrain.interfaces.backend import Backend, BackendContext, Prepared, PrepareRequest, WindowView
    from drivetrain.interfaces.checkpoint_format import CheckpointFormat, TensorReader
    from drivetrain.interfaces.data_sharding import DataSharding
    from drivetrain.interfaces.device import Device, TorchDevice
    from drivetrain.interfaces.launcher import Launcher, LaunchRequest
    from drivetrain.interfaces.precision import Precision
    from drivetrain.interfaces.sharding_planner import ShardingPlan, ShardingPlanner, TrainingRequest
    from drivetrain.interfaces.shards import Block, Shards
    from drivetrain.interfaces.tracker import Row, Tracker, TrackerContext

__all__ = [
    "AutocastForward",
    "AutocastPrecision",
    "Backend",
    "BackendContext",
    "Block",
    "CheckpointFormat",
    "DataSharding",
    "Device",
    "LaunchRequest",
    "Launcher",
    "Precision",
    "PrepareRequest",
    "Prepared",
    "Row",
    "ShardingPlan",
    "ShardingPlanner",
    "Shards",
    "TensorReader",
    "TorchDevice",
    "Tracker",
    "TrackerContext",
    "TrainingRequest",
    "WindowView",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "autocast": ["AutocastForward", "AutocastPrecision"],
        "backend": ["Backend", "BackendContext", "PrepareRequest", "Prepared", "WindowView"],
        "checkpoint_format": ["CheckpointFormat", "TensorReader"],
        "data_sharding": ["DataSharding"],
        "device": ["Device", "TorchDevice"],
        "launcher": ["LaunchRequest", "Launcher"],
        "precision": ["Precision"],
        "sharding_planner": ["ShardingPlan", "ShardingPlanner", "TrainingRequest"],
        "shards": ["Block", "Shards"],
        "tracker": ["Row", "Tracker", "TrackerContext"],
    },
)
