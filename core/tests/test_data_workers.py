"""Real workers: seeds, positions, look-ahead, and what the user's functions see in them."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from drivetrain.data import DataLoaderConfiguration, prepare_data_loader


def prepare(loader, world=1, rank=0, **settings):
    config = DataLoaderConfiguration(**{"data_seed": 5, "dispatch_batches": False, **settings})
    return prepare_data_loader(loader, num_processes=world, process_index=rank, config=config)


class Augmented(Dataset):
    """Draws from all three generators; so does the collation below."""

    def __len__(self):
        return 26

    def __getitem__(self, i):
        return [float(i), torch.rand(1).item(), random.random(), np.random.rand()]


def collate(rows):
    return torch.tensor([[*row, torch.rand(1).item()] for row in rows], dtype=torch.float64)


def values(loader, count=None):
    result = []
    for batch in loader:
        result.append(batch.tolist())
        if len(result) == count:
            break
    return result


def make(workers, **kwargs):
    return DataLoader(Augmented(), batch_size=3, shuffle=True, collate_fn=collate, num_workers=workers, **kwargs)


def test_augmentation_is_the_same_with_and_without_workers_and_differs_by_rank_and_epoch():
    runs = {
        workers: [[values(loader), values(loader)] for loader in (prepare(make(workers), 2, rank) for rank in (0, 1))]
        for workers in (0, 2)
    }
    assert runs[0] == runs[2]
    drawn = [tuple(row[1:]) for rank in runs[0] for epoch in rank for batch in epoch for row in batch]
    assert len(drawn) == len(set(drawn)) == 52


@pytest.mark.parametrize("persistent", [False, True])
def test_resume_with_workers_is_bit_exact_and_not_ahead(persistent):
    whole = prepare(make(2, persistent_workers=persistent))
    expected = [values(whole), values(whole)]
    loader = prepare(make(2, prefetch_factor=4, persistent_workers=persistent))
    assert values(loader, 4) == expected[0][:4]
    state = loader.state_dict()
    assert state["taken"] == 4
    again = prepare(make(1))
    again.load_state_dict(state)
    assert values(again) == expected[0][4:] and values(again) == expected[1]
    loader.load_state_dict(state)  # also in the loader whose workers live on
    assert values(loader) == expected[0][4:] and values(loader) == expected[1]


class Position(IterableDataset):
    def __init__(self):
        self.first = 0

    def __iter__(self):
        info = get_worker_info()
        return iter(range(self.first, 12, 1 if info is None else info.num_workers))


def set_first(worker):
    info = get_worker_info()
    assert type(info.dataset) is Position
    info.dataset.first = worker  # the way of torch's own documentation


def test_worker_init_fn_sees_the_users_data_set():
    loader = prepare(DataLoader(Position(), batch_size=2, num_workers=2, worker_init_fn=set_first))
    assert values(loader) == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11]]
    assert isinstance(loader.dataset, Position) and loader.worker_init_fn is set_first


@pytest.mark.parametrize("workers", [0, 2])
def test_persistent_stream_workers_resume_and_go_on(workers):
    def fresh():
        kwargs = {"worker_init_fn": set_first, "persistent_workers": True} if workers else {}
        return prepare(DataLoader(Position(), batch_size=2, num_workers=workers, **kwargs))

    loader = fresh()
    whole = [values(loader), values(loader)]
    assert whole[0] == whole[1]
    values(loader, 2)
    state = loader.state_dict()
    with pytest.warns(UserWarning, match="read and dropped"):
        loader.load_state_dict(state)
        assert values(loader) == whole[0][2:]
    assert values(loader) == whole[0]


class SeedReport(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        info = get_worker_info()
        return info.seed % 2**31, info.id


def test_worker_seeds_differ_by_rank_and_worker_and_repeat():
    def seeds(rank):
        loader = prepare(DataLoader(SeedReport(), batch_size=1, num_workers=2), 2, rank, seed_batches=False)
        before = torch.get_rng_state()
        found = {tuple(x.item() for x in batch) for batch in loader}
        assert torch.equal(before, torch.get_rng_state())
        return found

    first = seeds(0) | seeds(1)
    assert first == seeds(0) | seeds(1) and len({seed for seed, _ in first}) == len(first) == 4


def test_a_subclass_that_reads_in_a_thread_does_not_disturb_the_training_generators():
    class Background(DataLoader):
        def __iter__(self):
            inner = super().__iter__()
            box = []

            def work():
                box.extend(inner)

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            return iter(box)

    loader = prepare(Background(range(5), batch_size=2))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3], [4]]
    assert torch.equal(before, torch.get_rng_state())


def test_dropout_in_the_loop_is_the_same_whether_data_draws_or_not():
    def losses(dataset, workers):
        torch.manual_seed(1)
        loader = prepare(DataLoader(dataset, batch_size=3, num_workers=workers, collate_fn=lambda rows: rows))
        return [torch.nn.functional.dropout(torch.ones(5)).tolist() for _ in loader]

    assert losses(Augmented(), 0) == losses(Augmented(), 2) == losses(range(26), 0)
