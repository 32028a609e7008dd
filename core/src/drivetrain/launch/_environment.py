"""The variables that ranks get from their launcher."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["IDENTITY", "available_cores", "base_environment", "rank_environment"]

#: Variables that say who a rank is: always the launcher's word.
IDENTITY = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
)


def base_environment(
    environ: Mapping[str, str], extra: Mapping[str, str], *, local_world_size: int, cores: int | None = None
) -> dict[str, str]:
    """What all ranks of a machine share: the present variables, less another launcher's, plus those asked for.

    ``OMP_NUM_THREADS`` defaults to this machine's share per rank when there are several: each would otherwise use all cores.

    Args:
        environ: The launcher's own variables.
        extra: Variables asked for; they win, except over who a rank is.
        local_world_size: Number of ranks on this machine.
        cores: Number of cores; None to look.

    Example:
        >>> base_environment({"A": "1", "RANK": "5"}, {"B": "2"}, local_world_size=2, cores=8)
        {'A': '1', 'B': '2', 'OMP_NUM_THREADS': '4'}
    """
    shared = {name: value for name, value in {**environ, **extra}.items() if name not in IDENTITY}
    if local_world_size > 1 and "OMP_NUM_THREADS" not in shared:
        total = available_cores() if cores is None else cores
        shared["OMP_NUM_THREADS"] = str(max(1, total // local_world_size))
    return shared


def rank_environment(
    *, rank: int, world_size: int, local_rank: int, local_world_size: int, master_addr: str, master_port: int
) -> dict[str, str]:
    """The variables that every program for torch.distributed reads.

    Example:
        >>> rank_environment(
        ...     rank=3, world_size=4, local_rank=1, local_world_size=2, master_addr="10.0.0.7", master_port=29500
        ... )["LOCAL_RANK"]
        '1'
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
    }


def available_cores() -> int:
    """Physical cores that this process may use: fewer than the machine has under an affinity mask or a container's CPU quota.

    Example:
        >>> available_cores() >= 1
        True
    """
    import psutil

    logical = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    return max(1, min(logical, physical, _quota() or logical))


def _quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """The container's CPU quota in whole cores, or None."""
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else math.ceil(int(quota) / int(period))
    except (OSError, ValueError):
        return None
