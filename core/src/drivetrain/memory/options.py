"""Settings of the planner inside the Accelerator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from drivetrain.config.options import Options
from drivetrain.memory.hardware import parse_bytes

__all__ = ["PlanningOptions"]


@dataclass
class PlanningOptions(Options):
    """When the Accelerator divides a model because it wouldn't fit.

    Args:
        device_memory: Memory per device that a training may use, as "24GB"; None: what the device has.
        headroom: Share of that memory that is left free.

    Example:
        >>> PlanningOptions(device_memory="24GB").to_kwargs()
        {'device_memory': '24GB'}
    """

    device_memory: str | None = None
    headroom: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.1

    def __post_init__(self) -> None:
        self.validate()
        if self.device_memory is not None:
            parse_bytes(self.device_memory)
