"""Ranks and machines that are killed: the job starts again, resumes from its newest whole checkpoint, and sees every sample of each epoch once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest

from drivetrain.parallel.process_group import find_free_port
from drivetrain.testing.launching import marked_processes

EPOCHS, SAMPLES = 2, 60

TRAIN = f"""
import json, os, signal, sys, time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator, ProjectConfiguration
from drivetrain.utils import broadcast_object_list

here = Path(sys.argv[1])
victim, deadly_step = int(sys.argv[2]), int(sys.argv[3])
project = ProjectConfiguration(project_dir=str(here / "run"), automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=project, resume="auto")
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
index = torch.arange({SAMPLES})
loader = DataLoader(TensorDataset(index, index.float().unsqueeze(1)), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()  # `epochs` would do it; the log wants to know first
first = accelerator.step
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
moment = broadcast_object_list([time.time_ns()])[0]  # a restart after a change of members has the same count
log = open(here / f"seen-{{moment}}-{{accelerator.process_index}}.jsonl", "w", buffering=1)
log.write(json.dumps({{"resumed": first, "world": accelerator.num_processes}}) + "\\n")
for epoch in accelerator.epochs({EPOCHS}):
    for samples, x in loader:
        loss = model(x).pow(2).mean() * 1e-4
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        log.write(json.dumps({{"step": accelerator.step, "epoch": epoch, "samples": samples.tolist()}}) + "\\n")
        if accelerator.process_index == victim and accelerator.step == deadly_step and start == "0":
            if os.environ.get("KILL_LAUNCHER"):
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        if accelerator.step % 2 == 0:
            accelerator.save_state()
accelerator.end_training()
"""


def launcher(folder, *flags, victim, step, mark, **environ):
    script = folder / "train.py"
    script.write_text(TRAIN)
    command = [
        sys.executable,
        "-m",
        "drivetrain",
        "launch",
        "--cpu",
        *map(str, flags),
        script,
        folder,
        str(victim),
        str(step),
    ]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "MARK": mark, **environ},
    )


def starts(folder):
    """By start: the step that it resumed from, its world size, and what its ranks saw."""
    found = {}
    for file in sorted(folder.glob("seen-*.jsonl")):
        start = int(file.stem.split("-")[1])
        head, *rows = [json.loads(line) for line in file.read_text().splitlines()]
        entry = found.setdefault(start, {"resumed": head["resumed"], "world": head["world"], "rows": []})
        assert (head["resumed"], head["world"]) == (entry["resumed"], entry["world"])
        entry["rows"] += rows
    return [found[n] for n in sorted(found)]


def seen_by_epoch(folder):
    """How often each sample was seen by the model as it is in the end: what was done after the checkpoint that the next start took doesn't count."""
    every = starts(folder)
    seen = {epoch: Counter() for epoch in range(EPOCHS)}
    for start, following in zip(every, [*every[1:], None], strict=True):
        for row in start["rows"]:
            if following is None or row["step"] <= following["resumed"]:
                seen[row["epoch"]].update(row["samples"])
    return seen


ONCE = {epoch: Counter(range(SAMPLES)) for epoch in range(EPOCHS)}


def test_a_killed_rank_costs_what_came_after_the_newest_checkpoint_and_nothing_else(tmp_path):
    process = launcher(tmp_path, "-n", 3, "--max-restarts", 2, victim=1, step=7, mark="fault-rank")
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    assert "rank 1 of 3 was killed by signal 9 (SIGKILL)" in output
    assert "starting all ranks again (1 of 2 restarts)" in output
    first, second = starts(tmp_path)
    assert (first["resumed"], second["resumed"], second["world"]) == (0, 6, 3)
    assert seen_by_epoch(tmp_path) == ONCE
    assert marked_processes("fault-rank", within=5) == []


@pytest.mark.slow
def test_a_killed_machine_leaves_a_smaller_world_that_goes_on(tmp_path):
    conf = "last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=5"
    flags = ["--nnodes", "2:3", "--nproc-per-node", 1, "--max-restarts", 2]
    flags += ["--rdzv-endpoint", f"127.0.0.1:{find_free_port()}", "--rdzv-conf", conf]
    machines = []
    try:
        for _ in range(3):
            # Whichever machine becomes rank 2 dies, with its launcher. The first one here holds the store and is rank 0 or 1.
            machines.append(launcher(tmp_path, *flags, victim=2, step=7, mark="fault-machine", KILL_LAUNCHER="1"))
            time.sleep(3 if len(machines) == 1 else 0)
        outputs = [machine.communicate(timeout=250)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    codes = [machine.returncode for machine in machines]
    ends = [f"exit code {code}:\n{text[-3000:]}" for code, text in zip(codes, outputs, strict=True)]
    assert sorted(codes) == [-signal.SIGKILL, 0, 0], "\n".join(ends)
    first, *between, last = starts(tmp_path)
    assert (first["world"], last["world"]) == (3, 2)
    assert all(start["resumed"] >= 6 for start in (*between, last))
    assert seen_by_epoch(tmp_path) == ONCE
    survivors = [text for text, code in zip(outputs, codes, strict=True) if code == 0]
    assert all("starting all ranks again, 2 instead of 3" in text for text in survivors)
    assert marked_processes("fault-machine", within=5) == []


def test_a_rank_that_ends_last_does_not_wait_for_a_store_that_is_gone(tmp_path):
    """Without a launcher that holds the store, it ends with rank 0."""
    (tmp_path / "late.py").write_text(
        "import time\n"
        "from pathlib import Path\n"
        "from drivetrain import Accelerator\n"
        "accelerator = Accelerator(cpu=True)\n"
        "accelerator.wait_for_everyone()\n"
        "while accelerator.process_index and not Path('gone').exists():\n"
        "    time.sleep(0.05)\n"
        "accelerator.end_training()\n"
    )
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "late.py"],
            cwd=tmp_path,
            env={**os.environ, **common, "RANK": str(r), "LOCAL_RANK": str(r)},
        )
        for r in (0, 1)
    ]
    try:
        assert ranks[0].wait(60) == 0
        (tmp_path / "gone").touch()
        assert ranks[1].wait(60) == 0
    finally:
        for rank in ranks:
            rank.kill()
