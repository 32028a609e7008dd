"""Which process this is, when there is no Accelerator to ask: for logging and progress bars. Imports no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["current_local_rank", "current_rank", "initialized_distributed"]

_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK")
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK")


def initialized_distributed() -> Any:
    """``torch.distributed`` if it has a default process group, else None."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def current_rank() -> int:
    """The global rank: of the process group, else as the environment says, else 0.

    Example:
        >>> current_rank()
        0
    """
    distributed = initialized_distributed()
    return distributed.get_rank() if distributed is not None else _from_environment(_RANK, 0)


def current_local_rank() -> int:
    """The rank on this machine as the environment says, else the global rank.

    Example:
        >>> current_local_rank()
        0
    """
    rank = _from_environment(_LOCAL_RANK, -1)
    return rank if rank >= 0 else current_rank()


def _from_environment(names: Sequence[str], default: int) -> int:
    for name in names:
        value = os.environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return default
