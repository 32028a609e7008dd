"""Who a process is in a pod, and which machine of the job a pod is."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from typing import Any

from drivetrain.errors import EnvironmentDetectionError
from drivetrain.specs import ProcessInfo

__all__ = ["DEFAULT_PORT", "machine_info", "process_info"]

#: Each pod has a network of its own, so one port serves all jobs.
DEFAULT_PORT = 29500


def process_info(environ: Mapping[str, str]) -> ProcessInfo | None:
    """Read what a script is that a pod starts itself: one process of as many as there are pods.

    Pods of a TrainJob have torchrun's variables (``PET_NNODES``, ``PET_NODE_RANK``, ``PET_MASTER_ADDR``, ...). Those of an Indexed Job have
    ``JOB_COMPLETION_INDEX`` alone, which independent tasks have, too: they are one job only if ``WORLD_SIZE`` says of how many.

    Raises:
        EnvironmentDetectionError: If the variables contradict each other, or the pod is meant for several processes.

    Example:
        >>> process = process_info({"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "a-node-0-0.a"})
        >>> process.rank, process.world_size, process.rendezvous
        (2, 4, 'tcp://a-node-0-0.a:29500')
        >>> process_info({"JOB_COMPLETION_INDEX": "3"}) is None
        True
    """
    if environ.get("RANK", "").strip() or environ.get("LOCAL_RANK", "").strip():
        return None  # a launcher inside of the pod says who this process is
    machines = _machines(environ)
    if machines is None:
        return None
    per_pod = environ.get("PET_NPROC_PER_NODE", "").strip()
    if per_pod.isdigit() and int(per_pod) > 1:
        raise EnvironmentDetectionError(
            f"PET_NPROC_PER_NODE={per_pod}: this pod is meant for {per_pod} processes, and the script was started as one. Start it with "
            "`drivetrain launch` (or torchrun), which reads these variables."
        )
    rank = _index(environ, machines)
    return ProcessInfo(
        rank=rank,
        world_size=machines,
        node_rank=rank,
        cluster="kubernetes",
        rendezvous=f"tcp://{_host(_address(environ, rank))}:{_port(environ)}" if machines > 1 else "env://",
        reason=f"pod {rank} of {machines}",
    )


def machine_info(environ: Mapping[str, str]) -> Mapping[str, Any] | None:
    """What ``drivetrain launch`` inside of a pod need not be told.

    Raises:
        EnvironmentDetectionError: If the variables contradict each other.

    Example:
        >>> machine_info({"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "a", "PET_NPROC_PER_NODE": "4"})
        {'per_machine': '4', 'num_machines': 2, 'machine_rank': 1, 'main_process_ip': 'a', 'main_process_port': 29500, 'reason': 'pod 1 of 2'}
    """
    if environ.get("RANK", "").strip():
        return None  # a rank that launches something of its own
    machines = _machines(environ)
    if machines is None:
        return None
    per_machine = environ.get("PET_NPROC_PER_NODE", "").strip()
    said: dict[str, Any] = {"per_machine": per_machine} if per_machine not in ("", "auto") else {}
    if machines == 1:
        return {**said, "reason": f"PET_NPROC_PER_NODE={per_machine}"} if said else None
    rank = _index(environ, machines)
    return {
        **said,
        "num_machines": machines,
        "machine_rank": rank,
        "main_process_ip": _address(environ, rank),
        "main_process_port": _port(environ),
        "reason": f"pod {rank} of {machines}",
    }


def _machines(environ: Mapping[str, str]) -> int | None:
    """The number of pods, if anything says that this pod is one of a job's."""
    for name in ("PET_NNODES", "WORLD_SIZE"):
        text = environ.get(name, "").strip()
        if not text:
            continue
        if name == "WORLD_SIZE" and not environ.get("JOB_COMPLETION_INDEX", "").strip():
            return None
        if not text.isdigit() or int(text) < 1:
            if name == "PET_NNODES" and ":" in text:
                raise EnvironmentDetectionError(
                    f"PET_NNODES={text!r}: a number of machines that may change is between torchrun and its ranks. Start the script with "
                    "torchrun, or with `drivetrain launch --nnodes MIN:MAX --rdzv-endpoint HOST:PORT`."
                )
            raise EnvironmentDetectionError(f"{name}={text!r} must be a number of pods, 1 or more.")
        return int(text)
    return None


def _index(environ: Mapping[str, str], machines: int) -> int:
    """Which of the pods this is."""
    for name in ("PET_NODE_RANK", "JOB_COMPLETION_INDEX"):
        text = environ.get(name, "").strip()
        if not text:
            continue
        if not text.isdigit() or int(text) >= machines:
            raise EnvironmentDetectionError(
                f"{name}={text!r} must be a number from 0 to {machines - 1}, since there are {machines} pods."
            )
        return int(text)
    if machines == 1:
        return 0
    raise EnvironmentDetectionError(
        f"There are {machines} pods, and neither PET_NODE_RANK nor JOB_COMPLETION_INDEX says which of them this is. Give the Job "
        "`completionMode: Indexed`, or set PET_NODE_RANK."
    )


def _address(environ: Mapping[str, str], rank: int) -> str:
    """The host of pod 0: what the variables say, or the name that the headless service gives it."""
    for name in ("PET_MASTER_ADDR", "MASTER_ADDR"):
        if environ.get(name, "").strip():
            return environ[name].strip()
    host = environ.get("HOSTNAME", "").strip() or socket.gethostname()
    own = re.fullmatch(rf"([^.]+)-{rank}", host.partition(".")[0])
    domain = (host if "." in host else socket.getfqdn(host)).partition(".")[2]
    if own is None or not domain or domain == "localdomain":
        raise EnvironmentDetectionError(
            f"The pods can't meet: MASTER_ADDR isn't set, and the host's name, {host}, doesn't belong to a headless service. Set `subdomain` in "
            "the pod's template to the name of one, or MASTER_ADDR to the host of pod 0 (JOB-0.SERVICE)."
        )
    return f"{own[1]}-0.{domain}"


def _port(environ: Mapping[str, str]) -> int:
    for name in ("PET_MASTER_PORT", "MASTER_PORT"):
        text = environ.get(name, "").strip()
        if not text:
            continue
        if not text.isdigit() or not 0 < int(text) < 65536:
            raise EnvironmentDetectionError(f"{name}={text!r} must be a port, 1 to 65535.")
        return int(text)
    return DEFAULT_PORT


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
