"""Settings of DeepSpeed, under the names that Accelerate has for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drivetrain.config import Options

__all__ = ["DeepSpeedOptions", "DeepSpeedPlugin"]


@dataclass
class DeepSpeedOptions(Options):
    """What is sharded, and where it lives.

    Args:
        zero_stage: 0: nothing is sharded; 1: optimizer state; 2: gradients, too; 3: parameters, too.
        offload_optimizer_device: Where optimizer state lives: "none" (on the device), "cpu" or "nvme".
        offload_param_device: Where parameters live at stage 3.

    Example:
        >>> DeepSpeedOptions(zero_stage=3).zero_stage
        3
    """

    zero_stage: Literal[0, 1, 2, 3] = 2
    offload_optimizer_device: Literal["none", "cpu", "nvme"] = "none"
    offload_param_device: Literal["none", "cpu", "nvme"] = "none"

    def __post_init__(self) -> None:
        self.validate()


DeepSpeedPlugin = DeepSpeedOptions
