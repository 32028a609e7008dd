"""Who a process is under SLURM: the variables of steps, and the shorthand of lists."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.errors import EnvironmentDetectionError
from drivetrain_slurm.cluster import expand_hosts, process_info, tasks_per_node

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "a[1-3]",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "MASTER_ADDR": "a1",
}


def test_a_task_of_a_step():
    process = process_info(STEP)
    assert (process.rank, process.world_size, process.local_rank, process.local_world_size, process.node_rank) == (
        4,
        5,
        0,
        1,
        2,
    )
    assert process.cluster == "slurm"
    assert process.rendezvous.startswith("tcp://a1:")


def test_a_batch_script_is_one_process():
    batch = {k: v for k, v in STEP.items() if "STEP" not in k} | {"SLURM_NTASKS": "5", "SLURM_PROCID": "0"}
    assert process_info(batch) is None


def test_steps_jobs_and_starts_meet_at_ports_of_their_own():
    others = ({}, {"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "8"}, {"SLURM_RESTART_COUNT": "1"})
    ports = {process_info({**STEP, **changes}).rendezvous for changes in others}
    assert len(ports) == 4
    assert process_info(STEP).rendezvous == process_info({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}).rendezvous


def test_the_users_own_meeting_point_wins():
    assert process_info({**STEP, "MASTER_ADDR": "fe80::1", "MASTER_PORT": "1234"}).rendezvous == "tcp://[fe80::1]:1234"


def test_one_node_needs_no_network():
    alone = {**STEP, "SLURM_STEP_TASKS_PER_NODE": "5", "SLURM_NODEID": "0", "SLURM_LOCALID": "4", "MASTER_ADDR": ""}
    assert process_info(alone).rendezvous.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "contradict each other"),
        ({"SLURM_NODEID": "3"}, "contradict each other"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "can't be read"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x'"),
        ({"MASTER_ADDR": "", "SLURM_STEP_NODELIST": ""}, "set MASTER_ADDR"),
        ({"MASTER_ADDR": "", "SLURM_STEP_NODELIST": "no-such-host.invalid"}, "set MASTER_ADDR"),
    ],
)
def test_what_can_not_be(changes, message):
    with pytest.raises(EnvironmentDetectionError, match=message):
        process_info({**STEP, **changes})


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_tasks_per_node_are_read_as_slurm_shortens_them(numbers):
    parts, rest = [], list(numbers)
    while rest:
        run = next((i for i, n in enumerate(rest) if n != rest[0]), len(rest))
        parts.append(f"{rest[0]}(x{run})" if run > 1 else str(rest[0]))
        rest = rest[run:]
    assert tasks_per_node(",".join(parts)) == numbers


NODES = st.lists(st.from_regex(r"[a-c](0[0-9]|[1-9][0-9])?", fullmatch=True), min_size=1, max_size=8, unique=True)


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="needs scontrol to compare with")
@given(NODES)
@settings(max_examples=15, deadline=None)
def test_lists_of_nodes_are_expanded_as_slurm_does(cluster, nodes):
    def scontrol(what, text):
        return subprocess.run(
            ["scontrol", "show", what, text], capture_output=True, text=True, check=True
        ).stdout.split()

    (short,) = scontrol("hostlist", ",".join(nodes))
    assert expand_hosts(short) == scontrol("hostnames", short)
