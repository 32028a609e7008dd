"""What a job asks SLURM for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec

from drivetrain.config import Options

__all__ = ["SlurmOptions"]

Count = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True)
class SlurmOptions(Options):
    """How a job is submitted: section ``[slurm]``, variables ``DRIVETRAIN_SLURM_<FIELD>``, flags ``--slurm-<field>``.

    What isn't given is left to the cluster's defaults.

    Args:
        partition: Partition, or several with commas.
        account: Account that is charged.
        qos: Quality of service.
        time: Time limit, as SLURM writes it: "30" (minutes), "2:00:00", "1-12".
        job_name: Name of the job; None for the script's.
        cpus_per_task: Cores of each process.
        gpus_per_task: Accelerators of each process.
        gpus_per_node: Accelerators of each node, all visible to all of its processes, as "4" or "a100:4".
        mem: Memory of each node, as "64G".
        constraint: Features that nodes must have.
        array: Indices of a job array, as "0-3"; each is a job of its own, with the same command.
        directives: Further words for sbatch, as "--exclusive"; a line each.
        container_image: Image for srun's containers (pyxis).
        container_mounts: Mounts of the container, as "/data:/data".
        output: File of the job's output, with SLURM's patterns.
        wait: Wait for the job's end, show its output, and cancel it on Ctrl-C; else say its number and return.
        requeue: Queue the job again when its time runs out or it is preempted, after its script was told to save.
        grace: Seconds before the time limit at which the script is told (SIGUSR1; `accelerator.should_stop` is then true).
        template: File that is filled in place of the built-in batch script; it has ``${directives}``, ``${environment}`` and ``${body}``.

    Example:
        >>> SlurmOptions(partition="gpu", time="2:00:00").explicit()
        {'partition': 'gpu', 'time': '2:00:00'}
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    job_name: str | None = None
    cpus_per_task: Count | None = None
    gpus_per_task: Count | None = None
    gpus_per_node: str | None = None
    mem: str | None = None
    constraint: str | None = None
    array: str | None = None
    directives: tuple[str, ...] = ()
    container_image: str | None = None
    container_mounts: str | None = None
    output: str | None = None
    wait: bool = True
    requeue: bool = True
    grace: Annotated[int, msgspec.Meta(ge=1)] = 120
    template: str | None = None
