"""Jobs on a small cluster that checks what it is given and runs pods as processes."""

from __future__ import annotations

import re
import signal

import pytest
from click.testing import CliRunner

from drivetrain.cli import main

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


@pytest.mark.slow
def test_pods_meet_and_their_output_is_shown_with_labels(job, cluster):
    process = job(GATHER, "-n", 4, "--nnodes", 2, "--kubernetes-name", "run")
    out, err = end(process, 200)
    assert process.returncode == 0, (out, err)
    lines = sorted(line for line in out.splitlines() if "sees" in line)
    assert lines == [f"[rank {r}] rank {r} local {r % 2} sees [0, 1, 2, 3]" for r in range(4)]
    assert "submitted Job run in namespace lab" in err


def test_a_train_job(job, cluster):
    script = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['PET_NNODES'])"
    process = job(script, "-n", 2, "--kubernetes-kind", "trainjob", "--kubernetes-name", "run")
    out, err = end(process, 90)
    assert process.returncode == 0, (out, err)
    assert sorted(out.splitlines()) == ["[rank 0] 0 2 1", "[rank 1] 1 2 1"]
    assert "submitted TrainJob run in namespace lab" in err


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
    cluster.queue = True
    flags = ["--kubernetes-gang", "kueue", "--kubernetes-queue", "main"]
    process = job("", "-n", 1, "--kubernetes-image", "missing:1", *flags)
    assert soon(lambda: sum("/jobs/" in path for _, path in cluster.requests) > 0, 60)
    cluster.release()
    assert soon(lambda: sum(path.endswith("/pods") for _, path in cluster.requests) > 1, 60)
    process.send_signal(signal.SIGINT)
    _, err = end(process, 60)
    assert "is suspended: it waits for its queue" in err
    assert "machine 0 waits: ErrImagePull: there is no missing:1" in err
    assert process.returncode == 130


@pytest.mark.slow
def test_a_pod_that_is_preempted_saves_and_the_job_goes_on(job, cluster, soon):
    process = job(TRAIN, "-n", 2, "--nnodes", 2)
    assert soon(lambda: (cluster.folder / "running").exists(), 90)
    cluster.preempt(1)
    out, err = end(process, 200)
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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "can't be seen from here"),
        (["-n", "2", "--main-process-ip", "a"], "the pods find each other"),
        (["--nnodes", "1:2", "-n", "2"], "their number is fixed"),
        (["-n", "1", "--kubernetes-volumes", "data:/data"], "pvc:CLAIM:/path"),
        (["-n", "1", "--kubernetes-environment-keys", "TOKEN=abcdef"], "VARIABLE=secret/NAME/KEY"),
        (["-n", "1", "--kubernetes-environment", '{"HUB_TOKEN": "abcdef"}'], "HUB_TOKEN=secret/NAME/KEY"),
        (
            ["-n", "1", "--kubernetes-environment", '{"A": "1"}', "--kubernetes-environment-keys", "A=secret/s/k"],
            "both",
        ),
        (["-n", "1", "--kubernetes-tolerations", "gpu:Never"], "NoSchedule"),
        (["-n", "1", "--kubernetes-gang", "kueue"], "--kubernetes-queue"),
        (["-n", "1", "--kubernetes-kind", "trainjob", "--kubernetes-ttl", "3"], "its runtime"),
        (["-n", "1", "--kubernetes-names", "a"], "--kubernetes-name"),
        (["-n", "1", "--kubernetes-name", "Big"], "lower-case"),
        (["-n", "1", "--shutdown-timeout", "3"], "shutdown_timeout"),
    ],
)
def test_mistakes_are_found_before_anything_is_submitted(cluster, flags, message):
    words = ["launch", "--on", "kubernetes", "--kubernetes-image", "train:1", *flags, "train.py"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert "abcdef" not in result.output
    assert cluster.requests == []


@pytest.mark.parametrize(
    ("made", "code", "message"),
    [
        ("taken", 1, "Job run can't be made: jobs 'run' already exists"),
        ("unauthorized", 1, "Unauthorized"),
        ("nobody", 1, "doesn't answer"),
        ("nothing", 1, "no way to a cluster"),
    ],
)
def test_what_the_cluster_refuses(cluster, tmp_path, monkeypatch, made, code, message):
    words = [
        "launch",
        "-q",
        "--on",
        "kubernetes",
        "--kubernetes-image",
        "missing:1",
        "--kubernetes-name",
        "run",
        "-n",
        "1",
    ]
    words += ["--no-kubernetes-wait", "train.py"]
    if made == "taken":
        assert CliRunner().invoke(main, words).exit_code == 0
    elif made == "nothing":
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    else:
        old, new = {"unauthorized": ("a-token-", "another-"), "nobody": (cluster.url, "http://127.0.0.1:9")}[made]
        (tmp_path / "config").write_text(cluster.kubeconfig.read_text().replace(old, new))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    result = CliRunner().invoke(main, words)
    assert (result.exit_code, message in result.output) == (code, True), result.output
    assert "Traceback" not in result.output and "that-nobody-may-see" not in result.output
