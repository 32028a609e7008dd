"""Whether a device multiplies 8-bit matrices."""

from __future__ import annotations

import torch

__all__ = ["obstacle"]


def obstacle(device_type: str, *, rowwise: bool) -> str | None:
    """Why the present device has no 8-bit products of this kind; None if it has them.

    Args:
        device_type: Its torch type.
        rowwise: Whether scales are per row.

    Example:
        >>> obstacle("cpu", rowwise=False)
        'a CPU has no 8-bit matrix products'
    """
    if device_type == "cpu":
        return "a CPU has no 8-bit matrix products"
    if device_type != "cuda":
        return f"8-bit matrix products are known for NVIDIA and AMD GPUs, not for the device type {device_type!r}"
    if torch.version.hip:
        architecture = torch.cuda.get_device_properties().gcnArchName
        supported = architecture.startswith(("gfx94", "gfx95", "gfx12"))
        return None if supported else f"the GPU ({architecture}) has no 8-bit matrix products; MI300 and later have"
    return nvidia_obstacle(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), rowwise=rowwise)


def nvidia_obstacle(name: str, capability: tuple[int, int], *, rowwise: bool) -> str | None:
    """The same of an NVIDIA GPU of this name and compute capability.

    Example:
        >>> nvidia_obstacle("A100", (8, 0), rowwise=False)
        'the A100 (compute capability 8.0) has no 8-bit matrix products; 8.9 (Ada) and later have'
        >>> nvidia_obstacle("L4", (8, 9), rowwise=True)
        "the L4 (compute capability 8.9) has no 8-bit matrix products with scales per row; 9.0 (Hopper) and later have, and recipe='tensorwise' works"
        >>> nvidia_obstacle("H100", (9, 0), rowwise=True) is None
        True
    """
    said = f"the {name} (compute capability {capability[0]}.{capability[1]}) has no 8-bit matrix products"
    if capability < (8, 9):
        return f"{said}; 8.9 (Ada) and later have"
    if rowwise and capability < (9, 0):
        return f"{said} with scales per row; 9.0 (Hopper) and later have, and recipe='tensorwise' works"
    return None
