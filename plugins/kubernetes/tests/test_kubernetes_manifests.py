"""What is given to the cluster: valid by the published schemas, and saying what was asked for."""

from __future__ import annotations

import json

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

from drivetrain.errors import ConfigurationError
from drivetrain.interfaces import LaunchRequest
from drivetrain_kubernetes.launcher import KubernetesLauncher
from drivetrain_kubernetes.plugin import drivetrain_register_launchers

from .small_cluster import check

#: Everything that either kind can say.
COMMON = {
    "name": "run",
    "namespace": "lab",
    "image": "train:1",
    "cpu": "8",
    "memory": "64Gi",
    "gpus": 4,
    "shared_memory": "16Gi",
    "volumes": ("pvc:data:/data:ro", "hostpath:/mnt:/mnt", "emptydir:10Gi:/scratch", "secret:s:/s", "configmap:c:/c"),
    "environment": {"A": "1"},
    "environment_keys": ("TOKEN=secret/hub/token", "MODE=configmap/c/mode"),
    "node_selector": {"gpu": "a100"},
    "tolerations": ("gpu=yes:NoSchedule", "spot"),
    "service_account": "me",
    "image_pull_secrets": ("registry",),
    "labels": {"team": "vision"},
    "annotations": {"note": "x"},
    "gang": "kueue",
    "queue": "main",
    "time_limit": 3600,
    "grace": 60,
}
OF_JOBS = {
    "working_dir": "/app",
    "environment_from": ("secret/hub", "configmap/c"),
    "priority_class": "high",
    "image_pull_policy": "Always",
    "scheduler": "mine",
    "backoff_limit": 3,
    "fail_on_exit_codes": (2, 64),
    "ttl": 600,
}


def made(machines=2, processes=8, request=None, **options):
    """The objects by kind, as YAML says them."""
    (spec,) = drivetrain_register_launchers()
    request = LaunchRequest(
        command=["train.py", "--lr", "1"],
        num_processes=processes,
        num_machines=machines,
        options=options,
        **(request or {}),
    )
    found = list(yaml.safe_load_all(KubernetesLauncher(spec).describe(request)))
    return {thing["kind"]: thing for thing in found}


@pytest.mark.parametrize("version", ["1.31", "1.34", "1.37"])
def test_a_job_that_says_everything_is_valid(version):
    found = made(**COMMON, **OF_JOBS)
    assert list(found) == ["Service", "Job"]
    for thing in found.values():
        kubernetes_validate.validate(thing, version, strict=True)
        check(thing)


@pytest.mark.parametrize("gang", [None, "volcano", "coscheduling"])
@pytest.mark.parametrize("restart_policy", ["Never", "OnFailure"])
@pytest.mark.parametrize("machines", [1, 2])
def test_jobs_are_valid(gang, restart_policy, machines):
    found = made(machines, image="a", gang=gang, restart_policy=restart_policy)
    for thing in found.values():
        check(thing)
    assert ("PodGroup" in found) == (gang is not None)
    assert ("Service" in found) == (machines > 1)


def test_a_train_job_that_says_everything_is_valid():
    found = made(**COMMON, kind="trainjob")
    job = found["TrainJob"]
    assert TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job  # no field is unknown
    assert job["spec"]["trainer"]["numNodes"] == 2
    assert job["spec"]["trainer"]["numProcPerNode"] == 4


def test_the_check_sees_what_is_wrong():
    job = made(image="a")["Job"]
    job["spec"]["backofLimit"] = 3
    with pytest.raises(Exception, match="backofLimit"):
        check(job)
    job = made(kind="trainjob")["TrainJob"]
    job["spec"]["trainer"]["nodes"] = 3
    with pytest.raises(Exception, match="unknown fields"):
        check(job)


def test_preempted_pods_do_not_count_and_the_limit_follows_from_restarts():
    job = made(image="a", request={"max_restarts": 2}, fail_on_exit_codes=(2,))["Job"]["spec"]
    assert job["backoffLimit"] == 4
    rules = job["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "Ignore", "FailJob"]
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert rules[1]["onExitCodes"]["values"] == [75]


def test_pods_that_start_together():
    job = made(image="a", gang="coscheduling")
    assert job["PodGroup"]["spec"] == {"minMember": 2}
    pod = job["Job"]["spec"]["template"]
    assert pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] == job["Job"]["metadata"]["name"]
    assert pod["spec"]["schedulerName"] == "scheduler-plugins-scheduler"
    job = made(image="a", gang="volcano", queue="q")
    assert job["PodGroup"]["spec"] == {"minMember": 2, "queue": "q"}
    labels = made(image="a", gang="kueue", queue="q")["Job"]["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "q"


def test_settings_of_this_shell_travel_and_secrets_do_not(monkeypatch):
    monkeypatch.setenv("DRIVETRAIN_DDP_BUCKET_CAP_MB", "50")
    monkeypatch.setenv("DRIVETRAIN_LAUNCH_ON", "kubernetes")
    monkeypatch.setenv("DRIVETRAIN_KUBERNETES_IMAGE", "b")
    text = json.dumps(made(image="a"))
    assert "DRIVETRAIN_DDP_BUCKET_CAP_MB" in text
    assert "DRIVETRAIN_LAUNCH_ON" not in text and "DRIVETRAIN_KUBERNETES_IMAGE" not in text
    monkeypatch.setenv("DRIVETRAIN_COMET_API_KEY", "abcdef")
    with pytest.raises(ConfigurationError, match="DRIVETRAIN_COMET_API_KEY=secret/NAME/KEY") as caught:
        made(image="a")
    assert "abcdef" not in str(caught.value)
    found = json.dumps(made(image="a", environment_keys=("DRIVETRAIN_COMET_API_KEY=secret/comet/key",)))
    assert "secretKeyRef" in found and "abcdef" not in found


def test_a_file_with_a_secret_is_refused(tmp_path):
    file = tmp_path / "drivetrain.toml"
    file.write_text('[comet]\napi_key = "abcdef"\n[kubernetes]\nimage_pull_secrets = ["registry"]\n')
    with pytest.raises(ConfigurationError, match=r"drivetrain.toml:2: api_key is a secret") as caught:
        made(image="a", request={"environment": {"DRIVETRAIN_CONFIG_FILE": str(file)}})
    assert "abcdef" not in str(caught.value)


def test_two_volumes_at_one_place():
    with pytest.raises(ConfigurationError, match="both be at /dev/shm"):
        made(image="a", shared_memory="1Gi", volumes=("emptydir::/dev/shm",))
