"""Memory: searching a batch size that fits, computing activations again, freeing what isn't needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.memory.activations import ActivationCheckpointing, checkpoint_activations
    from drivetrain.memory.batch_size import find_executable_batch_size, should_reduce_batch_size
    from drivetrain.memory.blocks import repeated_blocks
    from drivetrain.memory.release import clear_device_cache, release_memory

__all__ = [
    "ActivationCheckpointing",
    "checkpoint_activations",
    "clear_device_cache",
    "find_executable_batch_size",
    "release_memory",
    "repeated_blocks",
    "should_reduce_batch_size",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "activations": ["ActivationCheckpointing", "checkpoint_activations"],
        "batch_size": ["find_executable_batch_size", "should_reduce_batch_size"],
        "blocks": ["repeated_blocks"],
        "release": ["clear_device_cache", "release_memory"],
    },
)
