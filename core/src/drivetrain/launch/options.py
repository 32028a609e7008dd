"""The settings of launching: the same keys in flags, environment and configuration file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from drivetrain.config.options import Options

__all__ = ["LaunchOptions", "LocalOptions"]


@dataclass(frozen=True)
class LaunchOptions(Options):
    """What every launcher is told: section ``[launch]`` of the configuration file, variables ``DRIVETRAIN_LAUNCH_<FIELD>``.

    Numbers are checked against each other by the launcher, not here.

    Args:
        on: Name of the launcher.
        num_processes: Number of processes in all, over all machines; None for one per accelerator found, or one on the CPU.
        num_machines: Number of machines; at most so many, if there is a minimum.
        min_machines: The job starts as soon as so many machines are there, and goes on while so many are left; None for all of them.
        machine_rank: Rank of this machine.
        main_process_ip: Address of machine 0; None on one machine.
        main_process_port: Port there; None for a free one on one machine.
        max_restarts: How often all processes are started again after a failure.
        log_dir: Where each rank's output goes as a file, and all of it, labelled, as ``all.log``; or None.
        label: Prefix each line of output with its rank.
        num_cpu_threads_per_process: ``OMP_NUM_THREADS`` of each process; None for an even share of the cores.
        gpu_ids: Which accelerators to use: their numbers, or "all".

    Example:
        >>> LaunchOptions(num_processes=2).explicit()
        {'num_processes': 2}
    """

    on: str = "local"
    num_processes: int | None = None
    num_machines: int = 1
    min_machines: int | None = None
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    max_restarts: int = 0
    log_dir: str | None = None
    label: bool = True
    num_cpu_threads_per_process: int | None = None
    gpu_ids: str = "all"


@dataclass(frozen=True)
class LocalOptions(Options):
    """What the launcher "local" is told besides: section ``[local]``, variables ``DRIVETRAIN_LOCAL_<FIELD>``.

    Args:
        rdzv_backend: How several machines meet: "static" or "c10d"; None for "static", and "c10d" where restarts are wanted.
        rdzv_id: Name of the run, the same on all machines.
        rdzv_conf: Further settings of that rendezvous, such as its timeout in seconds.
        local_addr: The address of this machine that others should use; None to find out.
        role: Role of the ranks.
        shutdown_timeout: Seconds that ranks have to end (and may use to save) after a signal to the launcher.
        tee: With a log directory: whose output is shown as well as written. "0" nobody's, "1" stdout, "2" stderr, "3" both; or by local
            rank, "0:3,1:2". None for both of rank 0.
        redirects: With a log directory: whose output is written and not shown, in the same words. None for what ``tee`` doesn't show.
        cpu_binding: "cores" gives each rank cores of its own, "numa" those of a NUMA node (ranks are spread over the nodes in blocks),
            "none" leaves that to the system.
        hang_timeout: After so many seconds in which no rank has printed anything, the Python stacks of all are printed once; None for
            never.
        lookup_timeout: Seconds in which the name of machine 0 may become known, and one of an earlier start be gone: some systems give
            machines their names as they start, and replace them one by one.
        stopped_exit_code: Exit code if all ranks succeeded, but a signal had `accelerator.should_stop` end them before their time: whoever
            started the launcher can tell that the run isn't done. After a signal to the launcher the ranks' word counts then, too. 0 makes no
            difference.

    Example:
        >>> LocalOptions().shutdown_timeout
        30.0
    """

    rdzv_backend: str | None = None
    rdzv_id: str = "drivetrain"
    rdzv_conf: Mapping[str, Any] = field(default_factory=dict)
    local_addr: str | None = None
    role: str = "default"
    shutdown_timeout: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    tee: str | None = None
    redirects: str | None = None
    cpu_binding: Literal["none", "cores", "numa"] = "none"
    hang_timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None
    lookup_timeout: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    stopped_exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
