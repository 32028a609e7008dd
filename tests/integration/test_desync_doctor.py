"""Planted desyncs on gloo: the launcher names the ranks' lines, what they called there, the step at which they parted, and why."""

from __future__ import annotations

import re

import pytest

from drivetrain.specs import LauncherSpec
from drivetrain.testing.launching import LaunchRunner

#: One training for all cases: two steps that are well, then what was planted, in step 2.
TRAIN = """
import os, sys, time
from datetime import timedelta

import torch
import torch.distributed as dist
from drivetrain import Accelerator

case = sys.argv[1]
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True)
rank = accelerator.process_index
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.wait_for_everyone()
# The timeout of the group itself would hold for meeting, too, which takes as long as importing torch on a busy machine.
dist.group.WORLD._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=6))


def evaluate(loss):
    return accelerator.gather(loss)  # GATHER


def train(batches):
    for i in range(batches):
        loss = model(torch.ones(2, 4)).mean()
        if case == "raise" and i == 2 and rank == 1:
            raise ValueError("no such sample")  # RAISE
        if case == "kill" and i == 2 and rank == 1:
            os.kill(os.getpid(), 9)
        if case != "skip" or i != 2 or rank != 1:
            accelerator.backward(loss)  # BACKWARD
        optimizer.step()
        optimizer.zero_grad()
        if case == "main" and i == 1 and accelerator.is_main_process:
            evaluate(loss.detach())  # UNDER
        if case == "order" and i == 1:
            if rank == 0:
                dist.all_reduce(torch.ones(3))  # REDUCE
            dist.broadcast(torch.ones(5), 0)  # BROADCAST
            if rank == 1:
                dist.all_reduce(torch.ones(3))
        if case == "shape" and i == 1:
            dist.all_reduce(torch.ones(3 + 4 * rank))  # SHAPE
        if case == "busy" and i == 1 and rank == 1:
            time.sleep(600)  # SLEEP


train(3 if case == "uneven" and rank == 1 else 2 if case == "uneven" else 4)
if case == "barrier" and rank == 1:
    dist.barrier()  # BARRIER
accelerator.wait_for_everyone()  # END
print("done")
"""

LINES = {name: i for i, line in enumerate(TRAIN.splitlines(), 1) for name in re.findall(r"  # ([A-Z]+)$", line)}


@pytest.fixture
def run(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return LaunchRunner(tmp_path, capfd, LauncherSpec(name="local", target="drivetrain.launch.local:LocalLauncher"))


def report_of(result):
    """The report, with names in place of lines."""
    found = re.search(r"^drivetrain: the ranks parted at .*(\n  .*)*", result.err, re.MULTILINE)
    assert found is not None, result.err
    text = found[0]
    for name, line in LINES.items():
        text = re.sub(rf"script\.py:{line}\b", name, text)
    return text


full = pytest.mark.full

CASES = [
    pytest.param(
        "main",
        3,
        2,
        [
            "rank 0 waits at GATHER gather",
            "ranks 1, 2 wait at BACKWARD backward",
            r"UNDER stands under `if case == 'main' and i == 1 and accelerator\.is_main_process:` .* depends on the rank",
        ],
        id="a gather on the main process alone",
    ),
    pytest.param(
        "raise",
        2,
        2,
        [
            "rank 0 waits at BACKWARD backward",
            r"rank 1 raised ValueError: no such sample at RAISE \(train\); its last collective was BACKWARD backward, at step 1",
            "rank 1 failed by itself",
        ],
        id="one raises while the other waits",
    ),
    pytest.param(
        "order",
        2,
        2,
        [
            "rank 0 waits at REDUCE all_reduce",
            "rank 1 waits at BROADCAST broadcast",
            "the last that they did together: BACKWARD backward, at step 1",
            "REDUCE stands under `if rank == 0:`",
        ],
        id="two collectives in another order",
    ),
    pytest.param(
        "uneven",
        2,
        2,
        [
            "rank 0 waits at END wait_for_everyone",
            "rank 1 waits at BACKWARD backward",
            r"rank 0 has left the loop `for i in range\(batches\)` .*, and rank 1 hasn't: it has fewer batches",
        ],
        id="one has a batch less",
        marks=full,
    ),
    pytest.param(
        "skip",  # a step without a backward isn't counted, and the next one takes its place, up to the end of the loop
        2,
        3,
        [
            "rank 0 waits at BACKWARD backward",
            "rank 1 waits at END wait_for_everyone",
            r"rank 1 has left the loop .*, and rank 0 hasn't: .* or left out a backward before",
        ],
        id="a backward under a condition",
        marks=full,
    ),
    pytest.param(
        "barrier",
        2,
        4,
        [
            "rank 0 waits at END wait_for_everyone",
            "rank 1 waits at BARRIER barrier",
            "BARRIER stands under `if case == 'barrier'",
        ],
        id="a barrier on one",
        marks=full,
    ),
    pytest.param(
        "shape",
        3,
        2,
        ["waits? at SHAPE all_reduce", r"shape"],
        id="tensors of different shapes",
        marks=full,
    ),
    pytest.param(
        "kill",
        3,
        2,
        [
            "ranks 0, 2 wait at BACKWARD backward",
            r"rank 1 was killed by signal 9 \(SIGKILL\); its last collective was BACKWARD backward, at step 1",
        ],
        id="one is killed",
        marks=full,
    ),
    pytest.param(
        "busy",
        2,
        2,
        ["rank 0 waits at BACKWARD backward", r"rank 1 is at SLEEP \(train\)", "rank 1 was still busy at SLEEP"],
        id="one doesn't come in time",
        marks=full,
    ),
]


@pytest.mark.parametrize(("case", "ranks", "step", "expected"), CASES)
def test_a_planted_desync_is_named(run, case, ranks, step, expected):
    result = run(TRAIN, ranks, (case,))
    assert result.code != 0
    text = report_of(result)
    assert text.startswith(f"drivetrain: the ranks parted at step {step}:\n"), text
    for pattern in expected:
        assert re.search(pattern, text), f"{pattern}\n{text}"


def test_healthy_ranks_are_not_reported(run):
    result = run(TRAIN, 2, ("none",))
    assert (result.code, result.lines(0), result.lines(1)) == (0, ["done"], ["done"])
    assert "parted" not in result.err
