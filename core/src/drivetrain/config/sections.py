"""Which options classes of core stand for which section of files and variables. The classes themselves are imported when somebody says something about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["CORE_OPTIONS", "OTHER_SECTIONS", "CoreOption"]


class CoreOption(NamedTuple):
    """One of core's own options classes.

    Args:
        target: ``"package.module:Name"``.
        keyword: Argument of the Accelerator that takes an instance, besides ``kwargs_handlers``; empty if there is none.
    """

    target: str
    keyword: str = ""

    @property
    def class_name(self) -> str:
        """Name of the class."""
        return self.target.partition(":")[2]


_HANDLERS = "drivetrain.config.handlers"
#: Core's own options classes by the name of their section in files and variables.
CORE_OPTIONS: Mapping[str, CoreOption] = {
    "autocast": CoreOption(f"{_HANDLERS}:AutocastKwargs"),
    "precision": CoreOption(f"{_HANDLERS}:PrecisionKwargs"),
    "grad_scaler": CoreOption(f"{_HANDLERS}:GradScalerKwargs"),
    "process_group": CoreOption(f"{_HANDLERS}:InitProcessGroupKwargs"),
    "profile": CoreOption(f"{_HANDLERS}:ProfileKwargs"),
    "gradient_accumulation": CoreOption(f"{_HANDLERS}:GradientAccumulationPlugin", "gradient_accumulation_plugin"),
    "dynamo": CoreOption(f"{_HANDLERS}:TorchDynamoPlugin", "dynamo_plugin"),
    "project": CoreOption("drivetrain.checkpoint.project:ProjectConfiguration", "project_config"),
    "data_loader": CoreOption("drivetrain.data.config:DataLoaderConfiguration", "dataloader_config"),
    "tracking": CoreOption("drivetrain.tracking.options:TrackingOptions"),
    "parallelism": CoreOption("drivetrain.parallel.config:ParallelismConfig", "parallelism_config"),
    "activation_checkpointing": CoreOption("drivetrain.memory.activations:ActivationCheckpointing"),
    "planning": CoreOption("drivetrain.memory.options:PlanningOptions"),
}

#: Sections that others read, before there is an Accelerator.
OTHER_SECTIONS: Mapping[str, str] = {"launch": "drivetrain.launch.options:LaunchOptions"}
