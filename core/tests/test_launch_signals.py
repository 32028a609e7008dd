"""Ctrl-C, signals, and a launcher that dies: nothing is left running. Several machines, as several launchers on this one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from drivetrain.testing.launching import marked_processes

DRIVER = """
import json, sys
from drivetrain.interfaces import LaunchRequest
from drivetrain.launch import LocalLauncher
from drivetrain.specs import LauncherSpec
request = LaunchRequest(command=[sys.argv[2]], **json.loads(sys.argv[1]))
sys.exit(LocalLauncher(LauncherSpec(name="local")).launch(request))
"""

WAIT = """
import os, sys, time
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def start(tmp_path):
    """``start(script, **request)``: a launcher in a process of its own, as started from a shell."""
    started = []

    def start_(script: str, *, ready: int = 0, **request: object) -> subprocess.Popen[str]:
        import json

        (tmp_path / "driver.py").write_text(DRIVER)
        (tmp_path / "script.py").write_text(script)
        process = subprocess.Popen(
            [sys.executable, tmp_path / "driver.py", json.dumps(request), tmp_path / "script.py"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "MARK": f"signals-{tmp_path.name}"},
        )
        started.append(process)
        for _ in range(ready):
            assert "ready" in process.stdout.readline()
        return process

    start_.left = lambda: marked_processes(f"signals-{tmp_path.name}", within=5)
    yield start_
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()
    deadline = time.monotonic() + 5
    while start_.left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert start_.left() == []


def _finish(process, seconds):
    begin = time.monotonic()
    out, err = process.communicate(timeout=seconds)
    return out, err, time.monotonic() - begin


@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_ends_all_ranks_and_says_where_they_were(start, ranks):
    process = start(WAIT, num_processes=ranks, ready=ranks)
    process.send_signal(signal.SIGINT)
    _, err, _ = _finish(process, 10)
    assert process.returncode == 130
    assert "stopped by SIGINT" in err
    assert "Traceback" not in err
    for rank in range(ranks):
        assert f"rank {rank} was at" in err
    assert re.search(r"script\.py:[34] \(<module>\)", err)
    assert start.left() == []


def test_sigterm_reaches_the_ranks_which_may_still_save(start, tmp_path):
    script = f"""
import os, signal, sys, time
def save(*_):
    time.sleep(0.3)
    open({str(tmp_path)!r} + "/saved-" + os.environ["RANK"], "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(60)
"""
    process = start(script, num_processes=2, ready=2)
    process.send_signal(signal.SIGTERM)
    _finish(process, 10)
    assert process.returncode == 143
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()


STUBBORN = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_second_ctrl_c_kills_what_does_not_end(start):
    process = start(STUBBORN, num_processes=1, ready=1)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err, seconds = _finish(process, 10)
    assert process.returncode == 130
    assert seconds < 3
    assert "rank 0 didn't end by itself and was killed" in err


def test_ranks_get_no_longer_than_asked_for(start):
    process = start(STUBBORN, num_processes=1, ready=1, options={"shutdown_timeout": 0.5})
    process.send_signal(signal.SIGTERM)
    _, _, seconds = _finish(process, 10)
    assert process.returncode == 143
    assert seconds < 5


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_end_with_a_launcher_that_is_killed(start, ranks):
    process = start(STUBBORN, num_processes=ranks, ready=ranks)
    assert len(start.left()) == ranks + 1
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    while start.left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert start.left() == []


def test_a_reader_that_goes_away_ends_the_job(start):
    # `drivetrain launch ... | head -1`
    script = "import time\nfor i in range(600):\n    print('ready', i, flush=True)\n    time.sleep(0.1)\n"
    process = start(script, num_processes=2, ready=2)
    process.stdout.close()
    process.stdout = None
    process.wait(20)
    assert process.returncode != 0
    process.stderr.read()


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_machines_meet(start, backend, tmp_path):
    with socket.create_server(("", 0)) as s:
        port = s.getsockname()[1]
    script = (
        "import os; print(*(os.environ[n] for n in 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR'.split()))"
    )
    common = {"num_processes": 4, "num_machines": 2, "main_process_ip": "127.0.0.1", "main_process_port": port}
    machines = [start(script, machine_rank=i, options={"rdzv_backend": backend}, **common) for i in (1, 0)]
    seen = []
    for machine in machines:
        out, err, _ = _finish(machine, 60)
        assert machine.returncode == 0, err
        seen += [line.split("] ")[1].split() for line in out.splitlines()]
    assert sorted((rank, world, local, size) for rank, world, local, size, _ in seen) == [
        (str(i), "4", str(i % 2), "2") for i in range(4)
    ]
    if backend == "static":
        assert {addr for *_, addr in seen} == {"127.0.0.1"}


def test_a_machine_that_comes_later_joins_an_elastic_job(start):
    with socket.create_server(("", 0)) as s:
        port = s.getsockname()[1]
    script = (
        "import os, time\n"
        "print('ready', os.environ['WORLD_SIZE'], flush=True)\n"
        "time.sleep(60 if os.environ['WORLD_SIZE'] == '1' else 0)\n"
    )
    common = {"num_processes": 2, "num_machines": 2, "min_machines": 1, "main_process_ip": "127.0.0.1"}
    common |= {"main_process_port": port, "options": {"rdzv_conf": {"last_call_timeout": 1}}}
    first = start(script, ready=1, **common)
    second = start(script, **common)
    for machine in (first, second):
        out, err, _ = _finish(machine, 60)
        assert machine.returncode == 0, err
        assert out.splitlines()[-1].split("] ")[1] == "ready 2"
        assert ("a machine has come or gone" in err) == (machine is first)
        assert ("starting all ranks again, 2 instead of 1" in err) == (machine is first)
