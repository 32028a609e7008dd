"""Training that is killed with SIGKILL at a moment of nobody's choosing, and goes on: as if nothing had happened, or at another world size."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain import Accelerator, DataLoaderConfiguration
from drivetrain.utils import ProjectConfiguration, set_seed

from .forked import end, start

ROWS = 46


class Augmented(Dataset):
    """Each row is drawn anew from all of the process's generators."""

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        noise = [torch.rand(1).item(), random.random(), np.random.rand()]
        return i, torch.tensor([i / ROWS, *noise])


def train(folder, epochs, settings, resume):
    """Train, save after each step, and log each step's samples and exact loss, once per rank."""
    warnings.simplefilter("ignore")
    rank = int(os.environ.get("RANK", "0"))
    set_seed(3, device_specific=True)
    loading = {name: settings[name] for name in ("num_workers",) if name in settings}
    sharding = {name: value for name, value in settings.items() if name not in loading}
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(data_seed=1, **sharding),
        project_config=ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2),
    )
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = DataLoader(Augmented(), batch_size=2, shuffle=True, **loading)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state()
    with Path(folder, f"log.{rank}").open("a", buffering=1) as log:
        log.write(json.dumps({"start": accelerator.step}) + "\n")
        for epoch in accelerator.epochs(epochs):
            for numbers, rows in loader:
                new = numbers.tolist()[: loader.batch.round.new[rank]]
                loss = (model(rows) - numbers[:, None] / ROWS).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                log.write(
                    json.dumps({"step": accelerator.step, "epoch": epoch, "rows": new, "loss": loss.item()}) + "\n"
                )
                accelerator.save_state()
    accelerator.end_training()


def entries(folder, rank):
    path = folder / f"log.{rank}"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run_and_kill(world, folder, epochs, settings, *, steps, resume, moment):
    """Kill all ranks once rank 0 has logged so many steps, and a moment later: perhaps in the middle of a save."""
    before = len(entries(folder, 0))
    children = start(world, train, folder, epochs, settings, resume)
    deadline = time.monotonic() + 100
    while len(entries(folder, 0)) < before + 1 + steps:
        assert time.monotonic() < deadline, "the ranks make no steps"
        assert os.waitpid(children[0], os.WNOHANG) == (0, 0), "rank 0 ended by itself"
        time.sleep(0.002)
    time.sleep(moment)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    assert set(end(children)) == {-signal.SIGKILL}


def steps_of(log):
    return [entry for entry in log if "step" in entry]


SAME = [
    (2, {"num_workers": 2}, 4),
    pytest.param(2, {}, 9, marks=pytest.mark.full),
    pytest.param(1, {"num_workers": 2}, 15, marks=pytest.mark.full),
    pytest.param(2, {"dispatch_batches": True}, 13, marks=pytest.mark.full),
    pytest.param(2, {"strategy": "contiguous"}, 2, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("world", "settings", "steps"), SAME)
def test_at_the_same_size_order_and_losses_are_bit_identical(tmp_path, world, settings, steps):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    assert end(start(world, train, whole, 2, settings, False)) == [0] * world
    chance = random.Random(steps)
    run_and_kill(world, killed, 2, settings, steps=steps, resume=False, moment=chance.uniform(0, 0.02))
    run_and_kill(world, killed, 2, settings, steps=3, resume=True, moment=chance.uniform(0, 0.02))
    assert end(start(world, train, killed, 2, settings, True)) == [0] * world
    for rank in range(world):
        expected = {entry["step"]: entry for entry in steps_of(entries(whole, rank))}
        found = steps_of(entries(killed, rank))
        assert {entry["step"] for entry in found} == set(expected)
        for entry in found:  # steps that were made twice, too: once before the kill, once after
            assert entry == expected[entry["step"]]
        starts = [entry["start"] for entry in entries(killed, rank) if "start" in entry]
        assert starts[0] == 0 and starts[1] >= steps - 1 and starts[2] >= starts[1] + 2, "it began anew"


OTHER = [
    ((2, 3, 1), {"dispatch_batches": True}),
    pytest.param((3, 2, 3), {}, marks=pytest.mark.full),
    pytest.param((2, 3, 2), {"strategy": "contiguous"}, marks=pytest.mark.full),
    pytest.param((1, 2, 3), {"even_batches": False}, marks=pytest.mark.full),
    pytest.param((3, 1, 2), {"num_workers": 2}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("worlds", "settings"), OTHER)
def test_at_other_sizes_twice_in_a_row_the_samples_seen_are_one_epoch(tmp_path, worlds, settings):
    chance = random.Random(len(settings))
    for number, world in enumerate(worlds[:-1]):
        moment, steps = chance.uniform(0, 0.02), chance.randrange(2, 4)
        run_and_kill(world, tmp_path, 1, settings, steps=steps, resume=number > 0, moment=moment)
    assert end(start(worlds[-1], train, tmp_path, 1, settings, True)) == [0] * worlds[-1]
    logs = [entries(tmp_path, rank) for rank in range(max(worlds))]
    starts = [entry["start"] for entry in logs[0] if "start" in entry]
    assert len(starts) == len(worlds) and 0 == starts[0] < starts[1] < starts[2]
    seen = Counter()
    for log in logs:
        start_of_run = [i for i, entry in enumerate(log) if "start" in entry] + [len(log)]
        for first, last in pairwise(start_of_run):
            begin = log[first]["start"]
            kept = min(
                (s for s in starts if s > begin), default=10**9
            )  # what came after the last save was lost, and made anew
            for entry in log[first + 1 : last]:
                if entry["step"] <= kept:
                    seen.update(entry["rows"])
    assert seen == Counter(range(ROWS))
