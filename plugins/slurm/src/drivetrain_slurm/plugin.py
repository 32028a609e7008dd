"""What the plugin offers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs import hookimpl
from drivetrain.specs import ClusterSpec, LauncherSpec

DRIVETRAIN_API = 1


@hookimpl
def drivetrain_register_clusters() -> Iterable[ClusterSpec]:
    """Tasks of SLURM's steps."""
    return [
        ClusterSpec(
            name="slurm",
            summary="tasks of a step that srun has started",
            marker=("SLURM_STEP_NUM_TASKS",),
            target="drivetrain_slurm.cluster:process_info",
            priority=100,  # below torchrun's variables, which a launcher inside of the job sets; above those of MPI under srun
        )
    ]


@hookimpl
def drivetrain_register_launchers() -> Iterable[LauncherSpec]:
    """Jobs through sbatch."""
    return [
        LauncherSpec(
            name="slurm",
            summary="a job of SLURM, through sbatch",
            target="drivetrain_slurm.launcher:SlurmLauncher",
            options="drivetrain_slurm.options:SlurmOptions",
            remote=True,
        )
    ]
