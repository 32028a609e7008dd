"""Settings of jobs of Kubernetes, seen in the objects that `--dry-run` prints. That they are valid and run is tested by the plugin."""

from __future__ import annotations

from unittest import mock

import yaml

from drivetrain.errors import LaunchError
from drivetrain.interfaces import LaunchRequest
from drivetrain_kubernetes import api
from drivetrain_kubernetes.launcher import KubernetesLauncher
from drivetrain_kubernetes.plugin import drivetrain_register_launchers

from . import effect
from .scene import variables


def job(**options):
    """The job for two ranks on two machines."""
    (spec,) = drivetrain_register_launchers()
    options = {"name": "run", "image": "a", **options}
    request = LaunchRequest(command=["train.py"], num_processes=2, num_machines=2, options=options)
    return list(yaml.safe_load_all(KubernetesLauncher(spec).describe(request)))[-1]


def pod(**options):
    return job(**options)["spec"]["template"]["spec"]


def container(**options):
    return pod(**options)["containers"][0]


def field(where, *path):
    """A probe that looks at one field; None where it isn't there."""

    def look(name, value):
        found = where(**{name: value})
        for key in path:
            found = found.get(key) if isinstance(found, dict) else found[key]
        return found

    return look


CASES = (
    ("kind", field(job, "kind"), ("job", "Job"), ("trainjob", "TrainJob")),
    ("image", field(container, "image"), ("a", "a"), ("b", "b")),
    ("name", field(job, "metadata", "name"), ("a", "a"), ("b", "b")),
    ("namespace", field(job, "metadata", "namespace"), ("a", "a"), ("b", "b")),
    ("python", field(container, "command", 0), ("python3", "python3"), ("/bin/python", "/bin/python")),
    ("working_dir", field(container, "workingDir"), ("/a", "/a"), (None, None)),
    ("cpu", field(container, "resources", "limits", "cpu"), ("1", "1"), ("2", "2")),
    ("memory", field(container, "resources", "requests", "memory"), ("1Gi", "1Gi"), ("2Gi", "2Gi")),
    ("gpus", field(container, "resources", "limits", "nvidia.com/gpu"), (1, "1"), (2, "2")),
    ("shared_memory", field(pod, "volumes", 0, "emptyDir", "sizeLimit"), ("1Gi", "1Gi"), ("2Gi", "2Gi")),
    ("volumes", field(container, "volumeMounts", 0, "mountPath"), (("emptydir::/a",), "/a"), (("pvc:b:/b",), "/b")),
    ("environment", field(container, "env"), ({"A": "1"}, [{"name": "A", "value": "1"}]), ({}, None)),
    ("environment_keys", field(container, "env", 0, "name"), (("A=secret/s/k",), "A"), (("B=configmap/c/k",), "B")),
    ("environment_from", field(container, "envFrom"), (("secret/s",), [{"secretRef": {"name": "s"}}]), ((), None)),
    ("node_selector", field(pod, "nodeSelector"), ({"a": "b"}, {"a": "b"}), ({}, None)),
    ("tolerations", field(pod, "tolerations"), (("a",), [{"key": "a", "operator": "Exists"}]), ((), None)),
    ("service_account", field(pod, "serviceAccountName"), ("a", "a"), (None, None)),
    ("priority_class", field(pod, "priorityClassName"), ("a", "a"), (None, None)),
    ("image_pull_secrets", field(pod, "imagePullSecrets"), (("a",), [{"name": "a"}]), ((), None)),
    ("image_pull_policy", field(container, "imagePullPolicy"), ("Always", "Always"), ("Never", "Never")),
    ("labels", field(job, "metadata", "labels", "a"), ({"a": "b"}, "b"), ({}, None)),
    ("annotations", field(job, "metadata", "annotations"), ({"a": "b"}, {"a": "b"}), ({}, None)),
    ("gang", field(pod, "schedulerName"), ("volcano", "volcano"), (None, None)),
    ("scheduler", field(pod, "schedulerName"), ("a", "a"), (None, None)),
    ("restart_policy", field(pod, "restartPolicy"), ("Never", "Never"), ("OnFailure", "OnFailure")),
    ("backoff_limit", field(job, "spec", "backoffLimit"), (1, 1), (2, 2)),
    ("time_limit", field(job, "spec", "activeDeadlineSeconds"), (1, 1), (None, None)),
    ("ttl", field(job, "spec", "ttlSecondsAfterFinished"), (1, 1), (None, None)),
    ("grace", field(pod, "terminationGracePeriodSeconds"), (60, 60), (90, 90)),
)
for _name, _look, _one, _other in CASES:
    effect(f"KubernetesOptions.{_name}", _one, _other)(lambda value, folder, name=_name, look=_look: look(name, value))


@effect("KubernetesOptions.runtime", ("a", "a"), ("b", "b"))
def runtime(value, folder):
    return job(kind="trainjob", runtime=value)["spec"]["runtimeRef"]["name"]


@effect(
    "KubernetesOptions.runtime_kind",
    ("TrainingRuntime", "TrainingRuntime"),
    ("ClusterTrainingRuntime", "ClusterTrainingRuntime"),
)
def runtime_kind(value, folder):
    return job(kind="trainjob", runtime_kind=value)["spec"]["runtimeRef"]["kind"]


@effect("KubernetesOptions.gpu_resource", ("amd.com/gpu", {"amd.com/gpu": "1"}), ("a/b", {"a/b": "1"}))
def gpu_resource(value, folder):
    return container(gpus=1, gpu_resource=value)["resources"]["limits"]


@effect("KubernetesOptions.queue", ("a", "a"), ("b", "b"))
def queue(value, folder):
    return job(gang="kueue", queue=value)["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]


@effect("KubernetesOptions.fail_on_exit_codes", ((2,), [2]), ((3,), [3]))
def fail_on_exit_codes(value, folder):
    return job(fail_on_exit_codes=value)["spec"]["podFailurePolicy"]["rules"][-1]["onExitCodes"]["values"]


@effect("KubernetesOptions.context", ("one", "doesn't answer"), ("two", "no way to a cluster"))
def context(value, folder):
    return answer(folder, context=value)


@effect("KubernetesOptions.wait", (True, ["GET"]), (False, []))
def wait(value, folder):
    """Whether the job is looked at after it was made."""
    cluster = mock.Mock(spec=api.Cluster, namespace="n")
    cluster.create.return_value = {"metadata": {"uid": "1"}}
    cluster.state.return_value = api.JobState(over=True, succeeded=True)
    cluster.pods.return_value = []
    with mock.patch.object(api, "connect", return_value=cluster):
        launch(wait=value)
    return ["GET"] if cluster.state.called else []


def launch(**options):
    (spec,) = drivetrain_register_launchers()
    options = {"image": "a", **options}
    return KubernetesLauncher(spec).launch(LaunchRequest(command=["train.py"], options=options))


def answer(folder, **options):
    """What is said about the cluster of a file whose only server isn't there."""
    (folder / "config").write_text(
        "{apiVersion: v1, kind: Config, current-context: one, users: [{name: me, user: {}}], "
        'clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}], '
        "contexts: [{name: one, context: {cluster: c, user: me}}]}"
    )
    with variables(KUBECONFIG=str(folder / "config")):
        try:
            launch(**options)
        except LaunchError as error:
            return next(text for text in ("doesn't answer", "no way to a cluster") if text in str(error))
