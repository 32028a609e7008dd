"""Every error that Drivetrain raises on purpose.

A message says what happened, who is responsible (plugin and version, setting and where it came from) and what to do next.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "DistributedOperationError",
    "DrivetrainError",
    "EnvironmentDetectionError",
    "LaunchError",
    "NonfiniteError",
    "NotPreparedError",
    "PluginError",
    "PluginNotFoundError",
    "RankMismatchError",
    "TrackerError",
    "UnsupportedError",
]


class DrivetrainError(Exception):
    """Base of all errors that the user can act upon.

    Example:
        >>> from drivetrain.errors import DrivetrainError, UnsupportedError
        >>> issubclass(UnsupportedError, DrivetrainError)
        True
    """


class ConfigurationError(DrivetrainError, ValueError):
    """A setting has a wrong name, type or value, or contradicts another one."""


class EnvironmentDetectionError(DrivetrainError, RuntimeError):
    """The environment says half of what is needed, or contradicts itself (RANK without WORLD_SIZE)."""


class PluginError(DrivetrainError, RuntimeError):
    """A plugin is broken, disabled, of the wrong API, or lacks a requirement, and was asked for by name."""


class PluginNotFoundError(PluginError, LookupError):
    """Nothing of that name is installed."""


class UnsupportedError(DrivetrainError, RuntimeError):
    """What was asked for can't be done by the chosen backend, device or precision."""


class NotPreparedError(DrivetrainError, RuntimeError):
    """An object must go through ``accelerator.prepare()`` first."""


class NonfiniteError(DrivetrainError, ArithmeticError):
    """A loss or a gradient was NaN or infinite, and ``on_nonfinite="raise"`` asked to hear of it."""


class RankMismatchError(DrivetrainError, RuntimeError):
    """Ranks disagree on something that must be equal everywhere (plugins, options, shapes)."""


class DistributedOperationError(DrivetrainError, RuntimeError):
    """A collective can't be carried out on what the ranks passed."""


class CheckpointError(DrivetrainError, RuntimeError):
    """A checkpoint can't be written, or is missing, broken or foreign."""


class TrackerError(DrivetrainError, RuntimeError):
    """A tracker can't do what it was asked for."""


class LaunchError(DrivetrainError, RuntimeError):
    """Processes can't be started, or one of them failed."""
