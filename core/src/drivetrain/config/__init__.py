"""The schema machinery of configuration: options classes, precedence, origins, files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.config.files import ConfigFile, read_config_file
    from drivetrain.config.handlers import (
        AutocastKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        PrecisionKwargs,
        ProfileKwargs,
        TorchDynamoPlugin,
    )
    from drivetrain.config.options import Options, nearest, seconds
    from drivetrain.config.origins import Origin, Source
    from drivetrain.config.precedence import Resolved, resolve_core, resolve_options
    from drivetrain.config.settings import CoreSettings, variable

__all__ = [
    "AutocastKwargs",
    "ConfigFile",
    "CoreSettings",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "Options",
    "Origin",
    "PrecisionKwargs",
    "ProfileKwargs",
    "Resolved",
    "Source",
    "TorchDynamoPlugin",
    "nearest",
    "read_config_file",
    "resolve_core",
    "resolve_options",
    "seconds",
    "variable",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "files": ["ConfigFile", "read_config_file"],
        "handlers": [
            "AutocastKwargs",
            "GradScalerKwargs",
            "GradientAccumulationPlugin",
            "InitProcessGroupKwargs",
            "PrecisionKwargs",
            "ProfileKwargs",
            "TorchDynamoPlugin",
        ],
        "options": ["Options", "nearest", "seconds"],
        "origins": ["Origin", "Source"],
        "precedence": ["Resolved", "resolve_core", "resolve_options"],
        "settings": ["CoreSettings", "variable"],
    },
)
