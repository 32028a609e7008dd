"""Jobs on a real SLURM with two nodes."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

GATHER = """
import sys, time
import torch
from drivetrain import Accelerator
from drivetrain.specs import ProcessInfo
accelerator = Accelerator(cpu=True)
ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
print("rank", accelerator.process_index, "local", accelerator.local_process_index, "sees", ranks, flush=True)
accelerator.end_training()
"""


@pytest.fixture
def job(cluster, tmp_path, monkeypatch):
    """``job(script, *flags, arguments=())``: starts `drivetrain launch --on slurm` in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    started = []

    def start(script, *flags, arguments=()):
        (tmp_path / "train.py").write_text(script)
        command = [
            sys.executable,
            "-m",
            "drivetrain",
            "launch",
            "--on",
            "slurm",
            *map(str, flags),
            "train.py",
            *arguments,
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
    subprocess.run(["scancel", "--me"], check=False, capture_output=True)


def end(process, seconds):
    """What a launch has printed; if it doesn't end, the error says what SLURM makes of it."""
    try:
        return process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        jobs = subprocess.run(["scontrol", "show", "job"], capture_output=True, text=True, check=False).stdout
        files = "\n".join(f"{f}: {f.read_text()[-2000:]}" for f in Path().glob("*.out"))
        raise AssertionError(f"{error}\n{jobs}\n{files}") from None


def shown(job, name):
    text = subprocess.run(
        ["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True, check=False
    ).stdout
    match = re.search(rf"\b{name}=(\S+)", text)
    return match and match[1]


def test_two_nodes_meet_and_the_output_is_shown_with_labels(job):
    process = job(GATHER, "-n", 2, "--nnodes", 2)
    out, err = end(process, 120)
    assert process.returncode == 0, err
    lines = sorted(line for line in out.splitlines() if "sees" in line)
    assert lines == [f"[rank {r}] rank {r} local 0 sees [0, 1]" for r in (0, 1)]
    assert re.search(r"submitted job \d+, output in slurm-\d+\.out", err)


def test_several_steps_of_one_allocation_at_once(job, tmp_path, soon):
    (tmp_path / "train.py").write_text(GATHER)
    step = f"srun --exact -N1 -n2 --mem=0 {sys.executable} -u train.py"
    batch = f"#!/bin/bash\n#SBATCH -N2 -n4 --output=steps.out\n{step} & {step} & wait\n"
    answer = subprocess.run(
        ["sbatch", "--parsable"], input=batch, text=True, check=True, timeout=30, capture_output=True
    )
    assert soon(lambda: shown(answer.stdout.strip(), "JobState") == "COMPLETED", 120)
    text = (tmp_path / "steps.out").read_text()
    assert sorted(re.findall(r"rank \d local \d sees .*", text)) == [
        f"rank {r} local {r} sees [0, 1]" for r in (0, 0, 1, 1)
    ], text


def test_the_first_failures_code_is_passed_on_while_another_rank_hangs(job):
    script = "import os, sys, time\nif os.environ['SLURM_PROCID'] == '1': sys.exit(7)\ntime.sleep(100)\n"
    process = job(script, "-n", 2, "--nnodes", 2)
    _, err = end(process, 60)
    assert process.returncode == 7, err
    assert "rank 1 failed first, with exit code 7" in err


def test_the_step_starts_again_after_a_failure(job, tmp_path):
    script = "import os, sys\nprint('start', os.environ['TORCHELASTIC_RESTART_COUNT'])\nsys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    process = job(script, "-n", 1, "--max-restarts", 2)
    out, err = end(process, 60)
    assert process.returncode == 0, err
    assert re.findall(r"start \d", out) == ["start 0", "start 1"]
    assert "starting all ranks again (1 of 2 restarts)" in out


def test_ctrl_c_cancels_the_job(job, soon):
    process = job("import time\nprint('up', flush=True)\ntime.sleep(100)\n", "-n", 1)
    number = re.search(r"submitted job (\d+)", process.stderr.readline())[1]
    assert soon(lambda: shown(number, "JobState") == "RUNNING", 30)
    process.send_signal(signal.SIGINT)
    end(process, 40)
    assert process.returncode == 130
    assert shown(number, "JobState") == "CANCELLED"


def test_without_waiting_the_number_is_said(job, soon):
    process = job("print('done')", "-n", 1, "--no-slurm-wait")
    _, err = end(process, 30)
    assert process.returncode == 0
    number = re.search(r"submitted job (\d+)", err)[1]
    assert soon(lambda: shown(number, "JobState") == "COMPLETED", 40)


def test_slurms_own_words_for_a_job_that_it_refuses(job):
    process = job("", "-n", 1, "--slurm-partition", "no-such-partition")
    _, err = end(process, 30)
    assert process.returncode == 1
    assert "SLURM refused the job: " in err and "partition" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "can't be seen from here"),
        (["-n", "2", "--main-process-ip", "a"], "the nodes find each other"),
        (["-n", "1", "--slurm-array", "0-1"], "--no-slurm-wait"),
        (["-n", "1", "--slurm-template", "absent"], "can't be read"),
        (["-n", "1", "--slurm-times", "3"], "--slurm-time"),
        (["-n", "1", "--slurm-grace", "0"], ">= 1"),
    ],
)
def test_mistakes_are_found_before_anything_is_submitted(job, flags, message):
    process = job("", *flags)
    _, err = end(process, 30)
    assert process.returncode == 2
    assert message in err


TRAIN = """
import os, sys, time
import torch
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Accelerator, ProjectConfiguration

project = ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project, resume="auto")
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
index = torch.arange(40)
loader = DataLoader(TensorDataset(index, index.float().unsqueeze(1)), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
start = os.environ.get("SLURM_RESTART_COUNT", "0")
seen = open(f"seen-{start}-{accelerator.process_index}", "w", buffering=1)
for epoch in accelerator.epochs(1):
    for samples, x in loader:
        accelerator.backward(model(x).pow(2).mean() * 1e-4)
        optimizer.step()
        optimizer.zero_grad()
        seen.write("".join(f"{i}\\n" for i in samples.tolist()))
        if start == "0":
            Path("running").touch()
            time.sleep(0.4)  # the signal comes meanwhile
        if accelerator.should_stop:
            accelerator.save_state()
            accelerator.print("saved at step", accelerator.step)
            accelerator.end_training()
            sys.exit(0)
accelerator.print("finished at step", accelerator.step)
accelerator.end_training()
"""


@pytest.mark.slow
def test_a_job_that_must_go_saves_is_queued_again_and_finishes(job, tmp_path, soon):
    process = job(TRAIN, "-n", 2, "--nnodes", 2)
    number = re.search(r"submitted job (\d+)", process.stderr.readline())[1]
    assert soon(lambda: (tmp_path / "running").exists(), 90)
    subprocess.run(["scancel", "--signal=USR1", "--batch", number], check=True)  # as SLURM does before the time limit
    out, err = end(process, 200)
    assert process.returncode == 0, (out, err)
    assert "saved at step" in out and f"queueing job {number} again" in out and "finished at step 10" in out
    assert shown(number, "Restarts") == "1"
    seen = sorted(int(i) for f in tmp_path.glob("seen-*") for i in f.read_text().split())
    assert seen == list(range(40))
    assert len(list(tmp_path.glob("seen-1-*"))) == 2


FINISH = """
import time
from pathlib import Path
import torch
from drivetrain import Accelerator
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(3, 1), batch_size=1))
for epoch in accelerator.epochs(1):
    for i, x in enumerate(loader):
        if i == 2:
            Path("running").touch()
            end = time.monotonic() + 60
            while not Path("told").exists() and time.monotonic() < end:
                time.sleep(0.1)
            time.sleep(1)
        accelerator.backward(model(x).mean())
        optimizer.step()
print("finished at step", accelerator.step, "told" if accelerator.should_stop else "not told")
"""


@pytest.mark.slow
def test_a_job_that_is_told_and_finishes_all_the_same_is_not_queued_again(job, tmp_path, soon):
    process = job(FINISH, "-n", 1)
    number = re.search(r"submitted job (\d+)", process.stderr.readline())[1]
    assert soon(lambda: (tmp_path / "running").exists(), 90)
    subprocess.run(["scancel", "--signal=USR1", "--batch", number], check=True)
    (tmp_path / "told").touch()
    out, err = end(process, 60)
    assert process.returncode == 0, (out, err)
    assert "finished at step 3 told" in out and "queueing" not in out
    assert shown(number, "Restarts") == "0" and shown(number, "JobState") == "COMPLETED"
    assert list(tmp_path.glob(".drivetrain-*")) == []


def test_a_program_of_ones_own_says_by_the_file_that_it_is_not_done(job, tmp_path, soon):
    script = """
import os, signal, sys, time
from pathlib import Path
if os.environ.get("SLURM_RESTART_COUNT"):
    print("second start")
    sys.exit(0)
def save(*_):
    Path(os.environ["DRIVETRAIN_STOPPED_FILE"]).touch()
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
Path("running").touch()
time.sleep(60)
"""
    process = job(script, "-n", 1)
    number = re.search(r"submitted job (\d+)", process.stderr.readline())[1]
    assert soon(lambda: (tmp_path / "running").exists(), 60)
    subprocess.run(["scancel", "--signal=USR1", "--batch", number], check=True)
    out, err = end(process, 120)
    assert process.returncode == 0, (out, err)
    assert f"queueing job {number} again" in out and "second start" in out


def test_detection_is_explained(job, cluster):
    command = ["srun", "-N2", "-n3", sys.executable, "-m", "drivetrain", "explain", "--cpu"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout
    assert re.search(r"task [012] of 3 in step\s+\d+\.0", text)
