"""`drivetrain launch --on mpi`, with real launchers of MPI: Open MPI's and, where it is installed, MPICH's."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from drivetrain.testing.launching import marked_processes

BIN = str(Path(sys.executable).parent)
PATH = os.pathsep.join([BIN, os.environ.get("PATH", "")])
#: Open MPI and MPICH have programs of the same names: where both come as packages, MPICH lies in a folder of its own.
MPICH = os.pathsep.join([PATH, str(Path(sys.prefix) / "mpich" / "bin")])


@pytest.fixture(params=["mpirun", "mpiexec.hydra"])
def mpi(request, tmp_path):
    """``mpi(script, *flags)``: starts a job; its output appears when it is waited for."""
    program = shutil.which(request.param, path=MPICH)
    if program is None:
        pytest.skip(f"there is no {request.param} here")
    started, mark = [], f"launch-mpi-{tmp_path.name}"

    def start(script, *flags, arguments=()):
        (tmp_path / "script.py").write_text(script)
        command = [
            sys.executable,
            "-m",
            "drivetrain",
            "launch",
            "--cpu",
            "--on",
            "mpi",
            "--mpi-program",
            program,
            *map(str, flags),
        ]
        environ = {**os.environ, "PATH": PATH, "OMP_NUM_THREADS": "1", "MARK": mark}
        process = subprocess.Popen(
            [*command, tmp_path / "script.py", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
    assert marked_processes(mark, within=10) == []


def test_ranks_meet(mpi):
    script = (
        "import torch\n"
        "from drivetrain import Accelerator\n"
        "a = Accelerator()\n"
        "print('rank', a.process_index, 'sees', a.gather(torch.tensor([a.process_index])).tolist(), flush=True)\n"
        "a.end_training()\n"
    )
    process = mpi(script, "-n", 2, "--mixed-precision", "no")
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert sorted(line for line in out.splitlines() if "sees" in line) == [
        f"[rank {r}] rank {r} sees [0, 1]" for r in (0, 1)
    ]


RANK = "import os, sys, time\nrank = os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK']\n"


def test_lines_that_ranks_write_in_pieces_are_labelled_once(mpi):
    script = RANK + (
        "for part in ('a', 'b', 'c\\nd', 'e\\n', 'last'):\n    print(part, end='', flush=True)\n    time.sleep(0.1)\n"
    )
    process = mpi(script, "-n", 2)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == [f"[rank {r}] {text}" for r in (0, 1) for text in ("abc", "de", "last")]


def test_labels_can_be_left_out(mpi):
    process = mpi("print('plain')", "-n", 2, "--no-label")
    out, err = process.communicate(timeout=60)
    assert out.splitlines() == ["plain", "plain"], err


def test_a_rank_that_exits_7_while_another_hangs(mpi):
    process = mpi(RANK + "if rank == '1': sys.exit(7)\ntime.sleep(100)\n", "-n", 2)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 7
    assert "rank 1 failed with exit code 7" in err


def test_variables_arrive_and_all_start_again_after_a_failure(mpi, tmp_path):
    script = RANK + (
        "print(os.environ['DRIVETRAIN_CPU'], os.environ['MASTER_ADDR'], os.environ['TORCHELASTIC_RESTART_COUNT'], flush=True)\n"
        "sys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)\n"
    )
    process = mpi(script, "-n", 1, "--max-restarts", 1)
    out, err = process.communicate(timeout=40)
    assert process.returncode == 0, err
    assert re.findall(r"true 127\.0\.0\.1 \d", out) == ["true 127.0.0.1 0", "true 127.0.0.1 1"]
    assert "starting all ranks again (1 of 1 restarts)" in err


def test_ctrl_c_ends_all_ranks(mpi, tmp_path):
    process = mpi(RANK + f"open({str(tmp_path)!r} + '/up-' + rank, 'w').close()\ntime.sleep(100)\n", "-n", 2)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("up-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["-n", "2", "--mpi-program", "no-such-mpirun"], 1, "no program no-such-mpirun"),
        (["-n", "2", "--mpi-hostfile", "absent"], 2, "no file absent"),
        (["-n", "2", "--mpi-hosts", "a", "--mpi-hostfile", sys.executable], 2, "same thing"),
        (["-n", "2", "--nnodes", "2"], 2, "--mpi-hostfile"),
        (["-n", "2", "--log-dir", "logs"], 2, "log_dir"),
        (["--mpi-hosts", "a"], 2, "can't be seen from here"),
    ],
)
def test_mistakes(tmp_path, flags, code, message):
    (tmp_path / "script.py").touch()
    command = [sys.executable, "-m", "drivetrain", "launch", "--on", "mpi", *flags, "script.py"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": PATH}
    )
    if shutil.which("mpirun", path=PATH) is None and code == 2 and "can't be seen" not in message:
        pytest.skip("there is no mpirun here")
    assert (result.returncode, message in result.stderr) == (code, True), result.stderr


@pytest.mark.skipif(shutil.which("mpirun", path=PATH) is None, reason="there is no mpirun here")
def test_several_machines_in_a_dry_run(tmp_path):
    (tmp_path / "script.py").touch()
    (tmp_path / "hosts").write_text("# ours\nnode7 slots=4\nnode8 slots=4\n")
    command = [sys.executable, "-m", "drivetrain", "launch", "--on", "mpi", "--dry-run", "-n", "8", "--nnodes", "2"]
    command += ["--mpi-hostfile", "hosts", "script.py"]
    environ = {**os.environ, "PATH": PATH}
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=environ)
    assert result.returncode == 0, result.stderr
    assert "--map-by ppr:4:node" in result.stdout
    assert "MASTER_ADDR=node7" in result.stdout
