"""What a job asks Kubernetes for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from drivetrain.config import Options

__all__ = ["KubernetesOptions"]

Count = Annotated[int, msgspec.Meta(ge=1)]
Code = Annotated[int, msgspec.Meta(ge=1, le=255)]


@dataclass(frozen=True)
class KubernetesOptions(Options):
    """How a job is submitted: section ``[kubernetes]``, variables ``DRIVETRAIN_KUBERNETES_<FIELD>``, flags ``--kubernetes-<field>``.

    A machine of `drivetrain launch` is a pod. What isn't given is left to the cluster's defaults. Secrets are named, and their values never
    pass through here.

    Args:
        kind: "job" is an Indexed Job with a headless Service, which every cluster has; "trainjob" is a TrainJob of Kubeflow Trainer.
        image: Image of the pods, with Python, Drivetrain and the script in it; a TrainJob takes its runtime's unless one is given.
        name: Name of the job; None for the script's with a few letters that make it unique.
        namespace: Namespace; None for that of the context.
        context: Context of the kubeconfig; None for the current one, or the pod's own account inside of a cluster.
        runtime: Name of the TrainJob's runtime.
        runtime_kind: Whether that runtime is one of the cluster or of the namespace.
        python: Name of Python in the image.
        working_dir: Directory in which the script starts; None for the image's.
        cpu: Cores of each pod, as "8" or "500m".
        memory: Memory of each pod, as "64Gi".
        gpus: Accelerators of each pod.
        gpu_resource: Name of that resource.
        shared_memory: Size of /dev/shm, as "16Gi", in the pod's memory; workers of data loaders need more than the 64 MB that it has otherwise.
        volumes: What is mounted: "pvc:CLAIM:/path", "hostpath:/on/node:/path", "emptydir:SIZE:/path", "secret:NAME:/path", "configmap:NAME:/path"; ":ro"
            at the end forbids writing.
        environment: Variables with values that anybody may see.
        environment_keys: Variables whose values lie in the cluster, as "WANDB_API_KEY=secret/NAME/KEY" or "MODE=configmap/NAME/KEY".
        environment_from: Secrets and config maps of which each key becomes a variable, as "secret/NAME".
        node_selector: Labels that nodes must have.
        tolerations: Taints that are put up with, as "KEY=VALUE:EFFECT", "KEY:EFFECT" or "KEY".
        service_account: Service account of the pods.
        priority_class: Priority class of the pods.
        image_pull_secrets: Names of the secrets with which the image is pulled.
        image_pull_policy: When the image is pulled.
        labels: Labels for everything that is made.
        annotations: Annotations for the job and its pods.
        gang: Who starts all pods at once or none: "kueue" (by a label), "volcano" or "coscheduling" (by a PodGroup).
        queue: Queue of Kueue or Volcano.
        scheduler: Name of the scheduler; None for the gang's usual one.
        restart_policy: "Never" replaces a failed pod, "OnFailure" restarts its container in place.
        backoff_limit: How many pods may fail before the job does; None for ``max_restarts`` times the number of machines. Pods that are preempted or
            evicted don't count.
        fail_on_exit_codes: Exit codes that end the job at once, whatever the limit.
        time_limit: Seconds after which the job is ended.
        ttl: Seconds after which a job that is over is removed; None to keep it.
        grace: Seconds that a pod has to save and end when it is told to go (`accelerator.should_stop` is then true).
        wait: Wait for the job's end, show its output, and delete it on Ctrl-C; else say its name and return.

    Example:
        >>> KubernetesOptions(image="train:1", gpus=8).explicit()
        {'image': 'train:1', 'gpus': 8}
    """

    kind: Literal["job", "trainjob"] = "job"
    image: str | None = None
    name: str | None = None
    namespace: str | None = None
    context: str | None = None
    runtime: str = "torch-distributed"
    runtime_kind: Literal["ClusterTrainingRuntime", "TrainingRuntime"] = "ClusterTrainingRuntime"
    python: str = "python3"
    working_dir: str | None = None
    cpu: str | None = None
    memory: str | None = None
    gpus: Count | None = None
    gpu_resource: str = "nvidia.com/gpu"
    shared_memory: str | None = None
    volumes: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    environment_keys: tuple[str, ...] = ()
    environment_from: tuple[str, ...] = ()
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[str, ...] = ()
    service_account: str | None = None
    priority_class: str | None = None
    image_pull_secrets: tuple[str, ...] = ()
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    gang: Literal["kueue", "volcano", "coscheduling"] | None = None
    queue: str | None = None
    scheduler: str | None = None
    restart_policy: Literal["Never", "OnFailure"] = "Never"
    backoff_limit: Annotated[int, msgspec.Meta(ge=0)] | None = None
    fail_on_exit_codes: tuple[Code, ...] = ()
    time_limit: Count | None = None
    ttl: Annotated[int, msgspec.Meta(ge=0)] | None = None
    grace: Count = 120
    wait: bool = True
