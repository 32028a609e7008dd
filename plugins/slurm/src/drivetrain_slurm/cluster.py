"""Who a process is in a step of SLURM."""

from __future__ import annotations

import re
import socket
import subprocess
import zlib
from collections.abc import Mapping

from drivetrain.errors import EnvironmentDetectionError
from drivetrain.specs import ProcessInfo

__all__ = ["expand_hosts", "process_info", "tasks_per_node"]

#: Derived ports lie below the ephemeral ranges of the common systems.
_FIRST_PORT, _PORTS = 20000, 10000


def process_info(environ: Mapping[str, str]) -> ProcessInfo | None:
    """Read the variables that srun sets for each task.

    A batch script has some of them too, and is one process: only srun sets the step's number of tasks.

    Raises:
        EnvironmentDetectionError: If they contradict each other.

    Example:
        >>> process = process_info({
        ...     "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
        ...     "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NODELIST": "a[1-2]", "SLURM_JOB_ID": "7",
        ...     "SLURM_STEP_ID": "0", "MASTER_ADDR": "a1"})
        >>> process.rank, process.world_size, process.local_world_size, process.rendezvous
        (2, 3, 1, 'tcp://a1:23719')
    """
    if not environ.get("SLURM_STEP_NUM_TASKS", "").strip() or not environ.get("SLURM_PROCID", "").strip():
        return None
    world_size, rank = _number(environ, "SLURM_STEP_NUM_TASKS"), _number(environ, "SLURM_PROCID")
    node = _number(environ, "SLURM_NODEID")
    layout = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", "") or str(world_size))
    if sum(layout) != world_size or node >= len(layout):
        raise EnvironmentDetectionError(
            f"SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE')!r}, SLURM_NODEID={node} and "
            f"SLURM_STEP_NUM_TASKS={world_size} contradict each other: some of them come from another step. Start the script "
            "with srun, without setting them."
        )
    return ProcessInfo(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world_size=layout[node],
        node_rank=node,
        cluster="slurm",
        rendezvous=_rendezvous(environ, nodes=len(layout)) if world_size > 1 else "env://",
        reason=f"task {rank} of {world_size} in step {_step(environ)}",
    )


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node, from SLURM's shorthand.

    Example:
        >>> tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise EnvironmentDetectionError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} can't be read: expected a list like 2(x3),1."
            )
        found += [int(match[1])] * int(match[2] or 1)
    return found


def expand_hosts(text: str) -> list[str]:
    """The names in SLURM's shorthand for lists of nodes, in their order.

    Example:
        >>> expand_hosts("a[01-03,7]-ib,b2,c[1-2]d[5-6]")
        ['a01-ib', 'a02-ib', 'a03-ib', 'a7-ib', 'b2', 'c1d5', 'c1d6', 'c2d5', 'c2d6']
    """
    return [name for part in _split(text) for name in _expand(part)]


def _split(text: str) -> list[str]:
    """The parts between commas that don't stand in brackets."""
    return [part.strip() for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text) if part.strip()]


def _expand(part: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", part)
    if match is None:
        return [part]
    head, tails = part[: match.start()], _expand(part[match.end() :])
    found = []
    for piece in match[1].split(","):
        low, dash, high = piece.strip().partition("-")
        numbers = [f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1)] if dash else [low]
        found += [f"{head}{number}{tail}" for number in numbers for tail in tails]
    return found


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "0").strip()
    if not text.isdigit():
        raise EnvironmentDetectionError(
            f"{name}={text!r} must be an integer, 0 or more: srun sets it. Start the script with srun."
        )
    return int(text)


def _step(environ: Mapping[str, str]) -> str:
    """Job, step and start: what tells several steps of one allocation, and a job before and after a requeue, apart."""
    job, step = environ.get("SLURM_JOB_ID", "0"), environ.get("SLURM_STEP_ID", "0")
    restart = environ.get("SLURM_RESTART_COUNT", "0")
    return f"{job}.{step}" + (f" (start {int(restart) + 1})" if restart.isdigit() and int(restart) else "")


def _rendezvous(environ: Mapping[str, str], nodes: int) -> str:
    port = environ.get("MASTER_PORT", "").strip() or str(_FIRST_PORT + zlib.crc32(_step(environ).encode()) % _PORTS)
    address = environ.get("MASTER_ADDR", "").strip()
    if not address and nodes == 1:
        address = "127.0.0.1"
    if not address:
        hosts = expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
        if not hosts:
            raise EnvironmentDetectionError(
                "SLURM_STEP_NODELIST isn't set, so the processes of several nodes can't meet: set MASTER_ADDR to the first node."
            )
        address = _address(hosts[0])
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def _address(node: str) -> str:
    """The node's name where it can be looked up; else the address by which SLURM itself knows it."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        try:
            shown = subprocess.run(
                ["scontrol", "show", "node", node], capture_output=True, text=True, timeout=30, check=True
            )
            match = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
        except (OSError, subprocess.SubprocessError):
            match = None
        if match is None:
            raise EnvironmentDetectionError(
                f"The first node of the step, {node}, can't be looked up here, and scontrol doesn't say its address: set MASTER_ADDR."
            ) from None
        return match[1]
    return node
