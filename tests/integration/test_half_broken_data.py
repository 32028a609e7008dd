"""Two ranks in training, one of which has broken data: each ends by itself, with an error that says what happened or without one."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain import Accelerator, DataLoaderConfiguration

from .forked import end, start


def _rank():
    return int(os.environ["RANK"])


class BrokenItem(Dataset):
    """An item that only rank 1 reads can't be read."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        if _rank() == 1 and i == 14:
            raise ValueError("broken item 14")
        return torch.tensor([float(i)])


class Short(IterableDataset):
    """On rank 0 a file is missing, and nobody noticed; or rank 0 fails there."""

    def __init__(self, *, fails=False):
        self.fails = fails

    def __iter__(self):
        for i in range(40):
            if _rank() == 0 and i == 16:
                if self.fails:
                    raise ValueError("broken file")
                return
            yield torch.tensor([float(i)])


def train(folder, make, settings, join):
    """One epoch; leave how it went."""
    steps, error = 0, None
    try:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, make())
        with accelerator.join_uneven_inputs([model]) if join else contextlib.nullcontext():
            for rows in loader:
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        accelerator.wait_for_everyone()
    except Exception as exception:
        error = f"{type(exception).__name__}: {exception}"
    Path(folder, f"{_rank()}").write_text(json.dumps([steps, error]))


def outcome(tmp_path, make, settings, *, join=False):
    assert end(start(2, train, tmp_path, make, settings, join), timeout=60) == [0, 0]
    return [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]


def numbers():
    return DataLoader([torch.tensor([float(i)]) for i in range(13)], batch_size=2)


def short(**kwargs):
    return lambda: DataLoader(Short(**kwargs), batch_size=2)


def test_an_item_that_cannot_be_read_by_one_ranks_worker(tmp_path):
    (steps, error), (broken_steps, cause) = outcome(
        tmp_path, lambda: DataLoader(BrokenItem(), batch_size=2, num_workers=1), {}
    )
    assert steps == broken_steps == 3 and "broken item 14" in cause
    assert "backward failed on rank 0: rank 1 died, raised or stayed away" in error


def test_a_stream_that_fails_on_one_rank(tmp_path):
    (steps, cause), (others, error) = outcome(tmp_path, short(fails=True), {"dispatch_batches": False})
    assert steps == others == 4 and "broken file" in cause and "Reading data failed on rank 0" in error


def test_a_stream_that_ends_early_on_one_rank_of_several_that_must_read_the_same(tmp_path):
    for steps, error in outcome(tmp_path, short(), {"dispatch_batches": False}):
        assert steps == 4 and "Ranks read different streams of Short" in error


def test_a_stream_that_ends_early_without_even_batches(tmp_path):
    (steps, error), (others, cause) = outcome(tmp_path, short(), {"dispatch_batches": False, "even_batches": False})
    assert steps == others == 4 and "Rank 0 has no batch 4 of this epoch" in cause and "join_uneven_inputs" in cause
    assert "wait_for_everyone failed on rank 0" in error


def test_a_map_style_data_set_without_even_batches(tmp_path):
    (steps, cause), (others, error) = outcome(tmp_path, numbers, {"even_batches": False})
    assert steps == others == 3 and "Rank 1 has no batch 3 of this epoch" in cause
    assert "wait_for_everyone failed on rank 1" in error


class Dies(IterableDataset):
    """The process that reads is killed."""

    def __iter__(self):
        yield from torch.arange(8.0).view(8, 1)
        os._exit(9)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_rank_that_reads_for_all_dies(tmp_path, prefetch):
    def make():
        return DataLoader(Dies(), batch_size=2)

    assert end(start(2, train, tmp_path, make, {"dispatch_batches": True, "prefetch": prefetch}, False)) == [9, 0]
    steps, error = json.loads((tmp_path / "1").read_text())
    assert steps == 1 and "lost the connection to rank 0 while batches were dispatched" in error


@pytest.mark.parametrize(
    ("make", "settings", "steps"),
    [
        (short(), {"dispatch_batches": False, "even_batches": False}, [4, 10]),
        (short(), {"dispatch_batches": True, "even_batches": False}, [4, 4]),
        (numbers, {"even_batches": False}, [4, 3]),
    ],
)
def test_joined_ranks_end_without_an_error(tmp_path, make, settings, steps):
    assert outcome(tmp_path, make, settings, join=True) == [[count, None] for count in steps]
