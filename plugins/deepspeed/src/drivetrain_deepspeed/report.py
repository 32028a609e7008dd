"""What `drivetrain env` says about DeepSpeed: its version, its device, and which operators are built or can be."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

__all__ = ["report"]


def report() -> Mapping[str, str]:
    """Facts by name.

    Example:
        >>> {"C++ compiler", "accelerator"} <= set(report())
        True
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops, torch_info
    from deepspeed.ops.op_builder.all_ops import ALL_OPS
    from torch.utils.cpp_extension import get_default_build_root

    accelerator = get_accelerator()
    states: dict[str, list[str]] = {"built": [], "built at first use": [], "can't be built here": []}
    for name, builder in ALL_OPS.items():
        if name == "deepspeed_not_implemented":
            continue
        if installed_ops.get(name, False):
            states["built"].append(name)
        else:
            states["built at first use" if _can_be_built(builder) else "can't be built here"].append(name)
    cache = os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()
    return {
        "version": f"{deepspeed.__version__}, installed with torch {torch_info['version']}",
        "accelerator": f"{accelerator.device_name()}, {accelerator.device_count()} seen",
        "communication": str(accelerator.communication_backend_name()),
        "bf16": "yes" if accelerator.is_bf16_supported() else "no",
        "fp16": "yes" if accelerator.is_fp16_supported() else "no",
        "ninja": shutil.which("ninja") or "not on PATH",
        "C++ compiler": shutil.which(os.environ.get("CXX", "c++")) or "not on PATH",
        "operators' cache": str(cache),
        "shared memory": _shared_memory(),
        **{f"operators {state}": ", ".join(sorted(names)) or "none" for state, names in states.items()},
    }


def _can_be_built(builder: object) -> bool:
    from deepspeed.ops.op_builder.builder import probe_is_compatible

    try:
        return bool(probe_is_compatible(builder, False))
    except Exception:  # builders run whatever finds their libraries
        return False


def _shared_memory() -> str:
    try:
        found = os.statvfs("/dev/shm")
    except (OSError, AttributeError):
        return "unknown"
    return f"{found.f_frsize * found.f_blocks / 2**30:.2f} GiB in /dev/shm"
