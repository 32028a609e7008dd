"""Giving memory back."""

from __future__ import annotations

import gc
from typing import Any

import torch

__all__ = ["clear_device_cache", "release_memory"]


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Give the present accelerator's cached memory back to the driver; nothing to do on a CPU.

    Args:
        garbage_collection: Collect Python's garbage first, so that tensors in reference cycles count.

    Example:
        >>> clear_device_cache(garbage_collection=True)
    """
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        module = torch.get_device_module()
        if hasattr(module, "empty_cache"):
            module.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Drop the caller's objects: assign the result to the names that held them.

    Example:
        >>> a, b = [1], [2]
        >>> a, b = release_memory(a, b)
        >>> a is None and b is None
        True
    """
    del_count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * del_count
