"""What the plugin offers. Imports no torch and no client."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs import hookimpl
from drivetrain.specs import ClusterSpec, LauncherSpec

DRIVETRAIN_API = 1


@hookimpl
def drivetrain_register_clusters() -> Iterable[ClusterSpec]:
    """Pods of Indexed Jobs and TrainJobs."""
    return [
        ClusterSpec(
            name="kubernetes",
            summary="pods of an Indexed Job or a TrainJob",
            marker=("JOB_COMPLETION_INDEX", "PET_NNODES"),
            target="drivetrain_kubernetes.cluster:process_info",
            machine="drivetrain_kubernetes.cluster:machine_info",
            priority=40,  # below all launchers that may run inside of a pod
        )
    ]


@hookimpl
def drivetrain_register_launchers() -> Iterable[LauncherSpec]:
    """Jobs through the API server."""
    return [
        LauncherSpec(
            name="kubernetes",
            summary="an Indexed Job or a TrainJob of Kubernetes",
            target="drivetrain_kubernetes.launcher:KubernetesLauncher",
            options="drivetrain_kubernetes.options:KubernetesOptions",
            remote=True,
            own_files=True,
        )
    ]
