"""Options classes and enumerations, where Accelerate has them; those of plugins are found through the registry."""

from __future__ import annotations

from drivetrain._foreign import from_utils
from drivetrain.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedType,
    DynamoBackend,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    LoggerType,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    TensorInformation,
    TorchDynamoPlugin,
)

__all__ = [
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedType",
    "DynamoBackend",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "TensorInformation",
    "TorchDynamoPlugin",
]


__getattr__ = from_utils
