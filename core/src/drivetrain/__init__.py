"""Drivetrain connects a PyTorch training script to whatever drives it.

    from drivetrain import Accelerator

Names are imported when they are first used: ``import drivetrain`` loads neither torch nor any plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator
    from drivetrain.big_model import init_empty_weights, init_on_device
    from drivetrain.checkpoint.project import ProjectConfiguration
    from drivetrain.config.handlers import (
        AutocastKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        PrecisionKwargs,
        ProfileKwargs,
        TorchDynamoPlugin,
    )
    from drivetrain.data import DataLoaderConfiguration, skip_first_batches
    from drivetrain.data.random import set_seed, synchronize_rng_states
    from drivetrain.errors import DrivetrainError
    from drivetrain.launch import debug_launcher, notebook_launcher
    from drivetrain.memory import ActivationCheckpointing, PlanningOptions, find_executable_batch_size
    from drivetrain.parallel.config import ParallelismConfig
    from drivetrain.state import AcceleratorState, DistributedType, PartialState

__version__ = "0.1.0"

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "ActivationCheckpointing",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedType",
    "DrivetrainError",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "ParallelismConfig",
    "PartialState",
    "PlanningOptions",
    "PrecisionKwargs",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "__version__",
    "debug_launcher",
    "find_executable_batch_size",
    "init_empty_weights",
    "init_on_device",
    "notebook_launcher",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_states",
]


def _from_plugins(name: str) -> Any:
    """Names that plugins export (options classes under Accelerate's names)."""
    from drivetrain._plugins import get_registry

    try:
        return get_registry().export(name)
    except AttributeError as error:
        if name == "is_rich_available":  # the one of them that Accelerate has here, too
            from drivetrain.utils.imports import availability

            return availability(name)
        from drivetrain._foreign import missing

        missing(__name__, name, error)


__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "accelerator": ["Accelerator"],
        "big_model": ["init_empty_weights", "init_on_device"],
        "checkpoint.project": ["ProjectConfiguration"],
        "config.handlers": [
            "AutocastKwargs",
            "GradScalerKwargs",
            "GradientAccumulationPlugin",
            "InitProcessGroupKwargs",
            "PrecisionKwargs",
            "ProfileKwargs",
            "TorchDynamoPlugin",
        ],
        "data": ["DataLoaderConfiguration", "skip_first_batches"],
        "data.random": ["set_seed", "synchronize_rng_states"],
        "errors": ["DrivetrainError"],
        "launch": ["debug_launcher", "notebook_launcher"],
        "memory": ["ActivationCheckpointing", "PlanningOptions", "find_executable_batch_size"],
        "parallel.config": ["ParallelismConfig"],
        "state": ["AcceleratorState", "DistributedType", "PartialState"],
    },
    fallback=_from_plugins,
)
