"""The objects of a job."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigurationError
from drivetrain.interfaces import LaunchRequest
from drivetrain_kubernetes.cluster import DEFAULT_PORT
from drivetrain_kubernetes.command import CONFIG_FOLDER, STOPPED, config_file, pod_command, variables
from drivetrain_kubernetes.options import KubernetesOptions
from drivetrain_kubernetes.references import environment_key, environment_source, toleration, volume

__all__ = ["job_name", "manifests"]

Object = dict[str, Any]

_CONTAINER = "train"
#: Kubeflow Trainer's names of the trainer's job and container in a runtime.
_NODE = "node"
_MANAGER = "drivetrain.launch/kubernetes"
_LONGEST_NAME = 45  # what controllers append to it must fit into 63 letters
_SCHEDULERS = {"volcano": "volcano", "coscheduling": "scheduler-plugins-scheduler"}


def job_name(request: LaunchRequest, options: KubernetesOptions) -> str:
    """The job's name: the one given, or the script's with letters that tell runs apart.

    Raises:
        ConfigurationError: For a name that can't be one of a host.

    Example:
        >>> job_name(LaunchRequest(command=["a.py"]), KubernetesOptions(name="my-run"))
        'my-run'
        >>> name = job_name(LaunchRequest(command=["src/3_Train_x.py"]), KubernetesOptions())
        >>> name.rpartition("-")[0]
        'train-x'
    """
    if options.name is not None:
        if re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", options.name) is None or len(options.name) > _LONGEST_NAME:
            raise ConfigurationError(
                f"kubernetes.name={options.name!r}: a name has lower-case letters, digits and hyphens, begins with a letter, and is at most "
                f"{_LONGEST_NAME} long: pods get it as a part of their hosts' names."
            )
        return options.name
    words = re.findall(r"[a-z0-9]+", Path(request.command[0]).stem.lower())
    stem = "-".join(words).lstrip("0123456789-")[: _LONGEST_NAME - 6].rstrip("-") or "train"
    return f"{stem}-{secrets.token_hex(3)[:5]}"


def manifests(request: LaunchRequest, options: KubernetesOptions, name: str) -> list[Object]:
    """All objects of a job, the job itself last.

    Args:
        request: What is to be started.
        options: The launcher's settings.
        name: The job's name.

    Raises:
        ConfigurationError: For what can't be asked for.

    Example:
        >>> request = LaunchRequest(command=["train.py"], num_processes=16, num_machines=2)
        >>> [o["kind"] for o in manifests(request, KubernetesOptions(image="a"), "run")]
        ['Service', 'Job']
        >>> [o["kind"] for o in manifests(request, KubernetesOptions(kind="trainjob"), "run")]
        ['TrainJob']
    """
    found: list[Object] = []
    if options.kind == "job" and request.num_machines > 1:
        found.append(_service(request, options, name))
    file = config_file(request)
    if file is not None:
        meta = _metadata(options, f"{name}-config")
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {file[0]: file[1]}})
    if options.gang in ("volcano", "coscheduling") and options.kind == "job":
        found.append(_pod_group(request, options, name))
    made = _job(request, options, name) if options.kind == "job" else _train_job(request, options, name)
    return [*found, made]


def _metadata(options: KubernetesOptions, name: str, *, annotated: bool = False) -> Object:
    meta: Object = {"name": name}
    if options.namespace is not None:
        meta["namespace"] = options.namespace
    meta["labels"] = {"app.kubernetes.io/managed-by": "drivetrain", **options.labels}
    if options.gang == "kueue" and annotated:
        meta["labels"]["kueue.x-k8s.io/queue-name"] = options.queue
    if annotated and options.annotations:
        meta["annotations"] = dict(options.annotations)
    return meta


def _service(request: LaunchRequest, options: KubernetesOptions, name: str) -> Object:
    """It gives pods names, before they are ready: they are once they have met."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": name},
        "ports": [{"name": "rendezvous", "port": request.main_process_port or DEFAULT_PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(options, name), "spec": spec}


def _pod_group(request: LaunchRequest, options: KubernetesOptions, name: str) -> Object:
    spec: Object = {"minMember": request.num_machines}
    if options.gang == "volcano":
        version = "scheduling.volcano.sh/v1beta1"
        spec |= {"queue": options.queue} if options.queue else {}
        spec |= {"priorityClassName": options.priority_class} if options.priority_class else {}
    else:
        version = "scheduling.x-k8s.io/v1alpha1"
    return {"apiVersion": version, "kind": "PodGroup", "metadata": _metadata(options, name), "spec": spec}


def _job(request: LaunchRequest, options: KubernetesOptions, name: str) -> Object:
    limit = request.max_restarts * request.num_machines if options.backoff_limit is None else options.backoff_limit
    spec: Object = {
        "completionMode": "Indexed",
        "completions": request.num_machines,
        "parallelism": request.num_machines,
        "backoffLimit": limit,
    }
    if options.restart_policy == "Never":
        spec["podFailurePolicy"] = {"rules": _failure_rules(options)}
        spec["podReplacementPolicy"] = "Failed"  # a pod and its successor would both be pod 0
    if options.time_limit is not None:
        spec["activeDeadlineSeconds"] = options.time_limit
    if options.ttl is not None:
        spec["ttlSecondsAfterFinished"] = options.ttl
    spec["template"] = _pod_template(request, options, name)
    meta = _metadata(options, name, annotated=True)
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec}


def _failure_rules(options: KubernetesOptions) -> list[Object]:
    """Preempted and evicted pods don't count, nor those that ended since others were."""
    condition = {"type": "DisruptionTarget", "status": "True"}
    rules: list[Object] = [
        {"action": "Ignore", "onPodConditions": [condition]},
        {"action": "Ignore", "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [STOPPED]}},
    ]
    if options.fail_on_exit_codes:
        codes = {"containerName": _CONTAINER, "operator": "In", "values": sorted(set(options.fail_on_exit_codes))}
        rules.append({"action": "FailJob", "onExitCodes": codes})
    return rules


def _pod_template(request: LaunchRequest, options: KubernetesOptions, name: str) -> Object:
    labels = {"app.kubernetes.io/managed-by": "drivetrain", **options.labels}
    annotations = dict(options.annotations)
    if options.gang == "volcano":
        annotations["scheduling.k8s.io/group-name"] = name
    elif options.gang == "coscheduling":
        labels["scheduling.x-k8s.io/pod-group"] = name
    meta: Object = {"labels": labels}
    if annotations:
        meta["annotations"] = annotations
    volumes, mounts = _volumes(request, options, name)
    container: Object = {"name": _CONTAINER, "image": options.image}
    if options.image_pull_policy is not None:
        container["imagePullPolicy"] = options.image_pull_policy
    container["command"] = pod_command(request, options, host=f"{name}-0.{name}")
    if options.working_dir is not None:
        container["workingDir"] = options.working_dir
    container |= _given(
        env=_environment(request, options),
        envFrom=[environment_source(text) for text in options.environment_from],
        resources=_resources(options),
        volumeMounts=mounts,
    )
    spec: Object = {"restartPolicy": options.restart_policy}
    if request.num_machines > 1:
        spec["subdomain"] = name
    spec |= _placing(options) | _given(
        priorityClassName=options.priority_class,
        schedulerName=options.scheduler or _SCHEDULERS.get(options.gang or ""),
    )
    spec["containers"] = [container]
    return {"metadata": meta, "spec": spec | _given(volumes=volumes)}


def _placing(options: KubernetesOptions) -> Object:
    """What a pod of either kind says besides its container and volumes."""
    return {"terminationGracePeriodSeconds": options.grace} | _given(
        serviceAccountName=options.service_account,
        nodeSelector=dict(options.node_selector),
        tolerations=[toleration(text) for text in options.tolerations],
        imagePullSecrets=[{"name": name} for name in options.image_pull_secrets],
    )


def _given(**fields: Any) -> Object:
    """Those fields that say something."""
    return {name: value for name, value in fields.items() if value}


def _environment(request: LaunchRequest, options: KubernetesOptions) -> list[Object]:
    plain = [{"name": name, "value": value} for name, value in variables(request, options).items()]
    return plain + [environment_key(text) for text in options.environment_keys]


def _resources(options: KubernetesOptions) -> Object:
    """Requests and limits are alike: ranks wait for each other, so a share that comes and goes helps nobody."""
    amounts = _given(cpu=options.cpu, memory=options.memory)
    if options.gpus is not None:
        amounts[options.gpu_resource] = str(options.gpus)
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}


def _volumes(request: LaunchRequest, options: KubernetesOptions, name: str) -> tuple[list[Object], list[Object]]:
    found = [volume(text, f"volume-{number}") for number, text in enumerate(options.volumes)]
    if options.shared_memory is not None:
        memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}}
        found.append((memory, {"name": "shared-memory", "mountPath": "/dev/shm"}))
    if config_file(request) is not None:
        config = {"name": "drivetrain-config", "configMap": {"name": f"{name}-config"}}
        found.append((config, {"name": "drivetrain-config", "mountPath": CONFIG_FOLDER, "readOnly": True}))
    paths: Sequence[str] = [mount["mountPath"] for _, mount in found]
    twice = sorted({path for path in paths if paths.count(path) > 1})
    if twice:
        raise ConfigurationError(f"kubernetes.volumes: two volumes can't both be at {', '.join(twice)}.")
    return [made for made, _ in found], [mount for _, mount in found]


def _train_job(request: LaunchRequest, options: KubernetesOptions, name: str) -> Object:
    """The runtime has the rest: its job, pods and container are patched."""
    trainer: Object = {
        "numNodes": request.num_machines,
        "numProcPerNode": request.num_processes // request.num_machines,
    }
    if options.image is not None:
        trainer["image"] = options.image
    trainer["command"] = pod_command(request, options, host=f"{name}-{_NODE}-0-0.{name}")
    trainer |= _given(env=_environment(request, options), resourcesPerNode=_resources(options))
    volumes, mounts = _volumes(request, options, name)
    pod = _placing(options) | _given(volumes=volumes)
    if mounts:
        pod["containers"] = [{"name": _NODE, "volumeMounts": mounts}]
    meta = _given(labels=dict(options.labels), annotations=dict(options.annotations))
    template = _given(metadata=meta) | {"spec": pod}
    jobs = [{"name": _NODE, "template": {"spec": {"template": template}}}]
    patch = {"manager": _MANAGER, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": jobs}}}}
    spec: Object = {"runtimeRef": {"name": options.runtime, "kind": options.runtime_kind}}
    if options.time_limit is not None:
        spec["activeDeadlineSeconds"] = options.time_limit
    spec |= {"trainer": trainer, "runtimePatches": [patch]}
    meta = _metadata(options, name, annotated=True)
    return {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": meta, "spec": spec}
