"""Checkpoints: whole or absent, readable at any world size, and free of pickles.

A checkpoint is a directory with a manifest, model weights as other tools read them, and everything else as JSON and tensors. See
`CheckpointManager` for saving and loading a session, `save_model` and `load_model_weights` for weights alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.checkpoint._checksum import checksum_file
    from drivetrain.checkpoint.export import load_model_weights, read_weights, save, save_model
    from drivetrain.checkpoint.hooks import HookHandle
    from drivetrain.checkpoint.manager import CheckpointManager, SaveRecord
    from drivetrain.checkpoint.manifest import FORMAT_VERSION, FileEntry, Manifest
    from drivetrain.checkpoint.naming import list_checkpoints, newest_checkpoint
    from drivetrain.checkpoint.project import ProjectConfiguration
    from drivetrain.checkpoint.restore import LoadReport
    from drivetrain.checkpoint.retention import Keep
    from drivetrain.checkpoint.safetensors_format import SafetensorsFormat
    from drivetrain.checkpoint.session import Session, Stateful, check_stateful
    from drivetrain.checkpoint.verification import Verification, verify

__all__ = [
    "CheckpointManager",
    "FORMAT_VERSION",
    "FileEntry",
    "HookHandle",
    "Keep",
    "LoadReport",
    "Manifest",
    "ProjectConfiguration",
    "SafetensorsFormat",
    "SaveRecord",
    "Session",
    "Stateful",
    "Verification",
    "check_stateful",
    "checksum_file",
    "list_checkpoints",
    "load_model_weights",
    "newest_checkpoint",
    "read_weights",
    "save",
    "save_model",
    "verify",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "_checksum": ["checksum_file"],
        "export": ["load_model_weights", "read_weights", "save", "save_model"],
        "hooks": ["HookHandle"],
        "manager": ["CheckpointManager", "SaveRecord"],
        "manifest": ["FORMAT_VERSION", "FileEntry", "Manifest"],
        "naming": ["list_checkpoints", "newest_checkpoint"],
        "project": ["ProjectConfiguration"],
        "restore": ["LoadReport"],
        "retention": ["Keep"],
        "safetensors_format": ["SafetensorsFormat"],
        "session": ["Session", "Stateful", "check_stateful"],
        "verification": ["Verification", "verify"],
    },
)
