"""Jobs on a small cluster that checks what it is given and runs pods as processes."""

from __future__ import annotations

import re
import signal

import pytest

GATHER = """
import torch
from drivetrain import Accelerator
accelerator = Accelerator()
ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
print("rank", accelerator.process_index, "local", accelerator.local_process_index, "sees", ranks, flush=True)
accelerator.end_training()
"""


def end(process, seconds):
    return process.communicate(timeout=seconds)


@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_pods_meet_and_their_output_is_shown_with_labels(job, cluster, kind):
    process = job(GATHER, "-n", 2, "--nnodes", 2, "--kubernetes-kind", kind, "--kubernetes-name", "run")
    out, err = end(process, 120)
    assert process.returncode == 0, (out, err)
    lines = sorted(line for line in out.splitlines() if "sees" in line)
    assert lines == [f"[rank {r}] rank {r} local 0 sees [0, 1]" for r in (0, 1)]
    assert re.search(r"submitted (Job|TrainJob) run in namespace lab", err)


@pytest.mark.slow
def test_several_processes_in_each_pod(job):
    process = job(GATHER, "-n", 4, "--nnodes", 2)
    out, err = end(process, 180)
    assert process.returncode == 0, (out, err)
    lines = sorted(line for line in out.splitlines() if "sees" in line)
    assert lines == [f"[rank {r}] rank {r} local {r % 2} sees [0, 1, 2, 3]" for r in range(4)]


HANG = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("leaving", flush=True)
    sys.exit(7)
time.sleep(100)
"""


def test_the_first_failures_code_is_passed_on_while_another_pod_hangs(job, cluster):
    process = job(HANG, "-n", 2, "--nnodes", 2)
    out, err = end(process, 90)
    assert process.returncode == 7, (out, err)
    assert "[rank 1] leaving" in out
    assert "[machine 1] drivetrain: rank 1 of 2 failed with exit code 7" in out
    assert "machine 1 failed first, with exit code 7" in err
    assert "BackoffLimitExceeded" in err


def test_what_a_job_needs_belongs_to_it(job, cluster, tmp_path):
    (tmp_path / "mine.toml").write_text('mixed_precision = "no"\n')
    script = "import os; print(open(os.environ['DRIVETRAIN_CONFIG_FILE']).read())"
    process = job(script, "-n", 2, "--nnodes", 2, "--config-file", tmp_path / "mine.toml", "--no-kubernetes-wait")
    out, err = end(process, 60)
    assert process.returncode == 0, err
    made = {key[0]: made for key, made in cluster.objects.items()}
    assert sorted(made) == ["ConfigMap", "Job", "Service"]
    uid = made["Job"]["metadata"]["uid"]
    for kind in ("ConfigMap", "Service"):
        (owner,) = made[kind]["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("Job", uid)
    assert made["ConfigMap"]["data"] == {"mine.toml": 'mixed_precision = "no"\n'}


def test_a_secret_reaches_the_script_and_is_seen_nowhere_else(job, cluster):
    cluster.secrets["hub"] = {"token": "s3cret"}
    script = "import os; print(len(os.environ['HUB_TOKEN']), os.environ['MODE'])"
    flags = [
        "--kubernetes-environment-keys",
        "HUB_TOKEN=secret/hub/token",
        "--kubernetes-environment",
        '{"MODE": "fast"}',
    ]
    process = job(script, "-n", 1, *flags, HUB_TOKEN="another")
    out, err = end(process, 60)
    assert process.returncode == 0, (out, err)
    assert "6 fast" in out
    assert "s3cret" not in out + err + str(cluster.objects)
    assert "a-token-that-nobody-may-see" not in out + err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_removes_the_job_and_shows_what_it_still_says(job, cluster, soon, signum):
    script = """
import signal, sys, time
def stop(*_):
    print("saved", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
time.sleep(100)
"""
    process = job(script, "-n", 1)
    assert soon(lambda: any(b"up" in b"".join(p.lines) for p in cluster.pods), 60)
    process.send_signal(signum)
    out, err = end(process, 60)
    assert process.returncode == 128 + signum, (out, err)
    assert "saved" in out and "removing job" in err
    assert cluster.objects == {}


def test_a_server_that_is_busy_and_a_connection_that_breaks(job, cluster):
    script = "import time\nfor i in range(30):\n    print('line', i, flush=True)\n    time.sleep(0.1)\n"
    cluster.failing, cluster.cut = 3, 10
    process = job(script, "-n", 1)
    out, err = end(process, 90)
    assert process.returncode == 0, (out, err)
    assert re.findall(r"line (\d+)", out) == [str(i) for i in range(30)]
    assert "the server is busy. Asking again" in err


def test_why_a_pod_does_not_start_is_said(job, cluster, soon):
    process = job("", "-n", 1, "--kubernetes-image", "missing:1")
    assert soon(lambda: sum(path.endswith("/pods") for _, path in cluster.requests) > 1, 60)
    process.send_signal(signal.SIGINT)
    _, err = end(process, 60)
    assert "machine 0 waits: ErrImagePull: there is no missing:1" in err
    assert process.returncode == 130


@pytest.mark.slow
def test_a_pod_that_is_preempted_saves_and_the_job_goes_on(job, cluster, soon):
    process = job(TRAIN, "-n", 2, "--nnodes", 2)
    assert soon(lambda: (cluster.folder / "running").exists(), 90)
    cluster.preempt(1)
    out, err = end(process, 200)
    print(out, err)
    assert process.returncode == 0, (out, err)
    assert "saved at step" in out and "finished at step 10" in out
    assert "machine 1 must go" in err
    seen = sorted(int(i) for f in cluster.folder.glob("seen-*") for i in f.read_text().split())
    assert seen == list(range(40))
    assert [p.code for p in cluster.pods] == [75, 75, 0, 0]


TRAIN = """
import sys, time
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
first = not Path("run").exists()
accelerator.wait_for_everyone()
seen = open(f"seen-{first}-{accelerator.process_index}", "w", buffering=1)
for epoch in accelerator.epochs(1):
    for samples, x in loader:
        accelerator.backward(model(x).pow(2).mean() * 1e-4)
        optimizer.step()
        optimizer.zero_grad()
        seen.write("".join(f"{i}\\n" for i in samples.tolist()))
        if first:
            Path("running").touch()
            time.sleep(0.4)  # the pod is preempted meanwhile
        if accelerator.should_stop:
            accelerator.save_state()
            accelerator.print("saved at step", accelerator.step)
            accelerator.end_training()
            sys.exit(0)
accelerator.print("finished at step", accelerator.step)
accelerator.end_training()
"""
