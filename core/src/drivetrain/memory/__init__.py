"""Memory: searching a batch size that fits, freeing what isn't needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.memory.batch_size import find_executable_batch_size, should_reduce_batch_size
    from drivetrain.memory.release import clear_device_cache, release_memory

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "batch_size": ["find_executable_batch_size", "should_reduce_batch_size"],
        "release": ["clear_device_cache", "release_memory"],
    },
)
