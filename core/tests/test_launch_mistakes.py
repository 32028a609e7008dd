"""What goes wrong at a launch: each time a message that says what to do, the right exit code, and nothing left running."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from drivetrain.parallel.process_group import find_free_port
from drivetrain.testing.launching import marked_processes

SCRIPT = "import os, time\nprint('started', flush=True)\nif os.environ['RANK'] == '1': os._exit(7)\ntime.sleep(100)\n"


@pytest.fixture
def taken():
    """A port that somebody holds."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("flags", "code", "messages"),
    [
        ("-n 2 --main-process-port TAKEN", 1, ["Port TAKEN", "already in use", "leave --main-process-port out"]),
        (
            "-n 2 --nnodes 2 --main-process-ip 127.0.0.1 --main-process-port TAKEN",
            1,
            ["Port TAKEN", "give another one", "end the program that holds it"],
        ),
        (
            "-n 2 --nnodes 2 --main-process-ip no.such.host.invalid --main-process-port 29500",
            1,
            ["'no.such.host.invalid'", "isn't known here", "--main-process-ip"],
        ),
        (
            "-n 2 --nnodes 2 --machine-rank 1 --main-process-ip 127.0.0.1 --main-process-port FREE --rdzv-conf timeout=2",
            1,
            ["didn't meet at 127.0.0.1:FREE", "same command"],
        ),
        ("-n 2 --script scrpt.py", 2, ["no script", "Did you mean", "script.py?"]),
        ("-n 2 -m no_such_module --script no_such_module", 2, ["no module 'no_such_module'"]),
        ("-n 2 --config-file typo.toml", 2, ["typo.toml:2", "'bucket_cap'", "Did you mean 'bucket_cap_mb'?"]),
        ("-n 2 --config-file typo.yaml", 2, ["typo.yaml:3", "'bucket_cap'", "Did you mean 'bucket_cap_mb'?"]),
        ("-n 2 --config-file mixed.yaml", 2, ["mixed.yaml:1", "Did you mean 'mixed_precision'?"]),
        ("-n 0", 2, ["number of processes is 0", "at least 1"]),
        ("--nproc-per-node 0", 2, ["--nproc-per-node 0", "at least 1"]),
        ("-n 3 --nnodes 2 --rdzv-endpoint 127.0.0.1:29500", 2, ["3 processes", "evenly over 2 machines"]),
        ("-n 2", 7, ["rank 1 of 2 failed with exit code 7", "Rank 0 was stopped"]),
    ],
)
def test_a_mistake_is_named_and_nothing_is_left_running(tmp_path, taken, flags, code, messages):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "typo.toml").write_text("[ddp]\nbucket_cap = 3\n")
    (tmp_path / "typo.yaml").write_text("# ours\nddp:\n  bucket_cap: 3\n")
    (tmp_path / "mixed.yaml").write_text("mixed_precison: bf16\n")
    numbers = {"TAKEN": str(taken), "FREE": str(find_free_port())}
    for name, number in numbers.items():
        flags = flags.replace(name, number)
        messages = [message.replace(name, number) for message in messages]
    flags, _, script = flags.partition(" --script ")
    command = [sys.executable, "-m", "drivetrain", "launch", "--cpu", *flags.split(), script or "script.py"]
    if "-m" in flags.split():
        command = [*command[:-2], command[-1]]
    mark = f"launch-mistakes-{tmp_path.name}"
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "MARK": mark, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == code, result.stderr
    assert [message for message in messages if message not in result.stderr] == [], result.stderr
    assert "Traceback" not in result.stderr
    assert ("started" in result.stdout) == (code == 7)
    assert marked_processes(mark, within=10) == []
