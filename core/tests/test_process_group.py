"""Making, reusing and ending the process group."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from drivetrain.errors import ConfigurationError, EnvironmentDetectionError
from drivetrain.parallel import ControlGroup, barrier, find_free_port, gather, init_process_group
from drivetrain.parallel._groups import communication_device, control_device
from drivetrain.parallel.process_group import _backend_string
from drivetrain.specs import ProcessInfo
from drivetrain.testing.workers import WorkerPool

CPU = torch.device("cpu")


def info():
    return ProcessInfo(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        reason="RANK",
    )


def end_group():
    """End the group, rank 0 first: the others would meet at its old store, which may listen at the same address as the next one."""
    rank = dist.get_rank()
    done = Path(tempfile.gettempdir()) / f"group-of-{os.environ['MASTER_PORT']}-ended"
    if rank == 0:
        done.unlink(missing_ok=True)
    dist.barrier()
    if rank == 0:
        dist.destroy_process_group()
        done.touch()
        return
    while not done.exists():
        time.sleep(0.01)
    dist.destroy_process_group()


def remake(**kwargs):
    """End the pool's group and make another one with ours."""
    end_group()
    return init_process_group(info(), device=CPU, device_backend="gloo", **kwargs)


@pytest.fixture
def group_of_one():
    handle = init_process_group(ProcessInfo(), device=CPU, device_backend="gloo")
    yield handle
    handle.destroy()
    if dist.is_initialized():
        dist.destroy_process_group()


def test_ranks_meet_at_an_address_or_at_the_environments():
    port = find_free_port()

    def run():
        before = dict(os.environ)
        made = []
        for method in (f"tcp://127.0.0.1:{port}", None):
            handle = remake(init_method=method, timeout=30)
            made.append((handle.owned, handle.backend, gather(torch.tensor([dist.get_rank()])).tolist()))
        assert dict(os.environ) == before, "no variable is written"
        end_group()
        handle.destroy()
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        return made

    with WorkerPool(2) as pool:  # of its own: ending a group that other tests' models have used can block torch
        for made in pool.run(run):
            assert made == [(True, "cpu:gloo,cuda:gloo", [0, 1])] * 2


def test_a_group_that_is_there_is_used_and_not_ended(ranks):
    def run():
        handle = init_process_group(info(), device=CPU, device_backend="gloo")
        handle.destroy()
        return handle.owned, dist.is_initialized()

    assert ranks.run(run) == [(False, True)] * 2


def test_a_group_that_contradicts_is_refused(ranks):
    def run():
        other = ProcessInfo(rank=0, world_size=4, reason="TOY_RANK=0")
        with pytest.raises(EnvironmentDetectionError, match=r"rank \d of 2, but TOY_RANK=0 says rank 0 of 4"):
            init_process_group(other, device=CPU, device_backend="gloo")
        with pytest.raises(ConfigurationError, match=r"backend='nccl' was asked for.*already uses cpu:gloo"):
            init_process_group(info(), backend="nccl", device=CPU, device_backend="gloo")
        with pytest.warns(UserWarning, match="timeout=5 changes nothing"):
            init_process_group(info(), device=CPU, device_backend="gloo", timeout=5)
        init_process_group(info(), backend="gloo", device=CPU, device_backend="gloo")

    ranks.run(run)


def test_one_process_needs_no_address(group_of_one, monkeypatch):
    assert group_of_one.owned
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    barrier()
    assert gather(torch.ones(1)).tolist() == [1]


def test_missing_variables_are_named(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(EnvironmentDetectionError, match=r"MASTER_ADDR is not set \(RANK=0.*drivetrain launch"):
        init_process_group(ProcessInfo(world_size=2, reason="RANK=0, WORLD_SIZE=2"), device=CPU, device_backend="gloo")


def test_a_peer_that_never_comes_is_an_error_in_time():
    with pytest.raises(
        EnvironmentDetectionError, match=r"(?s)Rank 0 of 2 couldn't join the others at tcp://127.0.0.1.*1/2 clients"
    ):
        init_process_group(
            ProcessInfo(world_size=2),
            device=CPU,
            device_backend="gloo",
            timeout=timedelta(seconds=1),
            init_method=f"tcp://127.0.0.1:{find_free_port()}",
        )
    assert not dist.is_initialized()


def test_an_unknown_backend_is_refused_before_anybody_waits():
    with pytest.raises(
        ConfigurationError, match=r"no communication backend 'nccl' \(asked for as 'cpu:gloo,cuda:nccl'\)"
    ):
        init_process_group(
            ProcessInfo(world_size=2),
            device=torch.device("cuda", 0),
            device_backend="nccl",
            init_method="tcp://127.0.0.1:1",
        )


@pytest.mark.parametrize(
    ("backend", "device", "device_backend", "string"),
    [
        (None, "cpu", "gloo", "gloo"),
        (None, "cuda:0", "nccl", "cpu:gloo,cuda:nccl"),
        ("nccl", "cuda:0", "nccl", "cpu:gloo,cuda:nccl"),
        ("cuda:nccl", "cuda:0", "nccl", "cuda:nccl"),
        ("gloo", "cuda:0", "nccl", "gloo"),
        (None, "xpu:1", "xccl", "cpu:gloo,xpu:xccl"),
        (None, "mps", "", "gloo"),
    ],
)
def test_backends_by_device(backend, device, device_backend, string):
    assert _backend_string(backend, torch.device(device), device_backend) == string


def test_where_tensors_are_sent_from(group_of_one):
    assert control_device(None) == CPU
    assert communication_device(None, torch.device("cuda", 1)) == torch.device("cuda", 1), "gloo serves it"
    assert communication_device(None, torch.device("mps")) == CPU


def test_the_control_group_is_made_once_and_apart(workers):
    def run():
        control = ControlGroup(timeout=30)
        group = control.get()
        assert control.get() is group
        assert dist.get_backend(group) == "gloo"
        got = gather(torch.tensor([dist.get_rank()]), group=group).tolist()
        control.destroy()
        control.destroy()
        return got

    assert workers(3).run(run) == [[0, 1, 2]] * 3
    alone = ControlGroup()
    assert alone.get() is None
    alone.destroy()


def test_free_ports_can_be_bound():
    port = find_free_port()
    with socket.socket() as s:
        s.bind(("127.0.0.1", port))


@pytest.mark.parametrize(("end", "still_there"), [("", False), ("sys.exit(3)", False), ("raise ValueError", True)])
@pytest.mark.parametrize("worker", [False, True])
def test_a_script_that_does_not_end_its_group_ends_it_with_the_interpreter(tmp_path, end, still_there, worker):
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, sys, torch, torch.distributed as dist\n"
        "from drivetrain.parallel import init_process_group\n"
        "from drivetrain.specs import ProcessInfo\n"
        "atexit.register(lambda: print('group:', dist.is_initialized()))\n"  # registered before, so called after ours
        "init_process_group(ProcessInfo(), device=torch.device('cpu'), device_backend='gloo')\n" + end
    )
    from drivetrain.launch import _worker

    start = [_worker.__file__, str(os.getpid()), "script"] if worker else []
    ran = subprocess.run([sys.executable, *start, str(script)], capture_output=True, text=True, check=False)
    assert ran.stdout == f"group: {still_there}\n", ran.stderr
