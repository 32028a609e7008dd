"""Who a process is in a pod, and what `drivetrain launch` inside of one need not be told."""

from __future__ import annotations

import shutil

import pytest
from click.testing import CliRunner

from drivetrain._builtin.clusters import CLUSTERS
from drivetrain._engine.detect import detect_process
from drivetrain.cli.launch import launch
from drivetrain.errors import EnvironmentDetectionError
from drivetrain_kubernetes.cluster import machine_info, process_info
from drivetrain_kubernetes.plugin import drivetrain_register_clusters

TRAINJOB = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "2",
}
JOB = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2", "HOSTNAME": "run-1.run.lab.svc.cluster.local"}
RANK = {
    "RANK": "5",
    "WORLD_SIZE": "12",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
}


def detected(environ):
    return detect_process([*CLUSTERS, *drivetrain_register_clusters()], environ)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TRAINJOB, (2, 3, 0, 1, "tcp://run-node-0-0.run:29500", "kubernetes")),
        (JOB, (1, 2, 0, 1, "tcp://run-0.run.lab.svc.cluster.local:29500", "kubernetes")),
        ({**JOB, "MASTER_ADDR": "fe80::1", "MASTER_PORT": "7"}, (1, 2, 0, 1, "tcp://[fe80::1]:7", "kubernetes")),
        ({"JOB_COMPLETION_INDEX": "7"}, (0, 1, 0, 1, "env://", "single")),  # an independent task
        ({**TRAINJOB, "PET_NPROC_PER_NODE": "4", **RANK}, (5, 12, 1, 4, "env://", "torchrun")),
        ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, (0, 1, 0, 1, "env://", "kubernetes")),
    ],
)
def test_who_a_process_is(environ, expected):
    found = detected(environ)
    assert (
        found.rank,
        found.world_size,
        found.local_rank,
        found.local_world_size,
        found.rendezvous,
        found.cluster,
    ) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"PET_NPROC_PER_NODE": "4"}, "`drivetrain launch`"),
        ({"PET_NNODES": "1:4"}, "torchrun"),
        ({"PET_NNODES": "none"}, "number of pods"),
        ({"PET_NODE_RANK": "3"}, "from 0 to 2"),
        ({"PET_NODE_RANK": "", "JOB_COMPLETION_INDEX": ""}, "completionMode: Indexed"),
        ({"PET_MASTER_ADDR": "", "HOSTNAME": "elsewhere"}, "subdomain"),
        ({"PET_MASTER_PORT": "0"}, "must be a port"),
    ],
)
def test_what_can_not_be(changes, message):
    with pytest.raises(EnvironmentDetectionError, match=message):
        process_info({**TRAINJOB, **changes})


def test_a_machine_of_several():
    assert machine_info({**TRAINJOB, "PET_NPROC_PER_NODE": "4"}) == {
        "num_machines": 3,
        "machine_rank": 2,
        "main_process_ip": "run-node-0-0.run",
        "main_process_port": 29500,
        "per_machine": "4",
        "reason": "pod 2 of 3",
    }
    assert machine_info({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}) == {
        "per_machine": "2",
        "reason": "PET_NPROC_PER_NODE=2",
    }
    assert machine_info({"JOB_COMPLETION_INDEX": "1"}) is None
    assert machine_info({**TRAINJOB, **RANK}) is None


@pytest.fixture
def dry(monkeypatch):
    """``dry(*flags)``: what `drivetrain launch` would run in a pod of four processes."""
    for name, value in {**TRAINJOB, "PET_NPROC_PER_NODE": "4"}.items():
        monkeypatch.setenv(name, value)

    def run(*flags):
        result = CliRunner().invoke(launch, ["--cpu", "--dry-run", *flags, "--no-python", shutil.which("true")])
        assert result.exit_code == 0, result.output
        return result

    return run


def test_launching_inside_of_a_pod_needs_no_words(dry):
    result = dry()
    lines = result.stdout.splitlines()
    assert len(lines) == 4
    assert " RANK=8 WORLD_SIZE=12 LOCAL_RANK=0 LOCAL_WORLD_SIZE=4 MASTER_ADDR=run-node-0-0.run " in lines[0]
    assert "machine 2 of 3: kubernetes says so (pod 2 of 3)" in result.stderr


def test_what_the_user_says_stands(dry):
    (line,) = dry("--num-machines", "1", "-n", "1").stdout.splitlines()
    assert " RANK=0 WORLD_SIZE=1 " in line
    assert len(dry("-n", "6").stdout.splitlines()) == 2
