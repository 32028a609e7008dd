"""How loaders are sharded, moved and resumed."""

from __future__ import annotations

import random

import torch

from drivetrain import Accelerator, DataLoaderConfiguration
from drivetrain.data import prepare_data_loader

from . import effect
from .scene import quiet


class Counted(torch.utils.data.Dataset):
    """Counts what is read."""

    def __init__(self, length):
        self.length = length
        self.reads = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads += 1
        return index


class Noisy(Counted):
    def __getitem__(self, index):
        return random.random()


class Parcel:
    """A batch that notes how it was moved."""

    moves: list = []

    def to(self, device, non_blocking=False):
        self.moves.append(non_blocking)
        return self


def loader(data, *, batch_size=1, shuffle=False, collate_fn=None, **options):
    with quiet():
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
        plain = torch.utils.data.DataLoader(data, batch_size=batch_size, shuffle=shuffle, collate_fn=collate_fn)
        return accelerator.prepare(plain)


@effect("DataLoaderConfiguration.split_batches", (True, [2, 2]), (False, [4, 4]), ranks=2)
def split_batches(value, folder):
    return len(next(iter(loader(range(8), batch_size=4, split_batches=value))))


@effect("DataLoaderConfiguration.dispatch_batches", (True, [8, 0]), (False, [4, 4]), ranks=2)
def dispatch_batches(value, folder):
    data = Counted(8)
    for _ in loader(data, dispatch_batches=value):
        pass
    return data.reads


@effect("DataLoaderConfiguration.even_batches", (True, [2, 2]), (False, [2, 1]), ranks=2)
def even_batches(value, folder):
    return len(list(loader(range(3), even_batches=value)))


def told(**options):
    with quiet():
        plan = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options)).plan
    return [name for name in options for note in plan.notes if name in note]


@effect("DataLoaderConfiguration.use_seedable_sampler", (True, []), (False, ["use_seedable_sampler"]))
def use_seedable_sampler(value, folder):
    return told(use_seedable_sampler=value)


@effect("DataLoaderConfiguration.use_stateful_dataloader", (True, []), (False, ["use_stateful_dataloader"]))
def use_stateful_dataloader(value, folder):
    return told(use_stateful_dataloader=value)


@effect("DataLoaderConfiguration.data_seed", (1, True), (2, False))
def data_seed(value, folder):
    """Whether the order is that of seed 1."""
    orders = [[int(b) for b in loader(range(50), shuffle=True, data_seed=seed)] for seed in (1, value)]
    return orders[0] == orders[1]


@effect("DataLoaderConfiguration.non_blocking", (True, [True]), (False, [False]))
def non_blocking(value, folder):
    Parcel.moves.clear()
    next(iter(loader(range(1), collate_fn=lambda rows: Parcel(), non_blocking=value)))
    return list(Parcel.moves)


@effect(
    "DataLoaderConfiguration.strategy", ("interleaved", [[0, 2], [1, 3]]), ("contiguous", [[0, 1], [2, 3]]), ranks=2
)
def strategy(value, folder):
    return [int(b) for b in loader(range(4), strategy=value)]


def large(rows):
    """A batch that doesn't fit beside its announcement."""
    return torch.zeros(1 << 15)


@effect("DataLoaderConfiguration.prefetch", (0, [3, 0]), (1, [4, 0]), ranks=2)
def prefetch(value, folder):
    """Messages that rank 0 sent when the first batch is there: the next batch among them, or only what announces it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in loader(range(8), collate_fn=large, dispatch_batches=True, prefetch=value):
            with torch.profiler.record_function("in the loop"):
                pass
    first = min(e.time_range.start for e in profiler.events() if e.name == "in the loop")
    return sum(e.name == "gloo:send" and e.time_range.start < first for e in profiler.events())


@effect("DataLoaderConfiguration.seed_batches", (True, True), (False, False))
def seed_batches(value, folder):
    """Whether augmentation repeats when an epoch does."""
    prepared = loader(Noisy(4), seed_batches=value)
    first = [float(b) for b in prepared]
    prepared.set_epoch(0)
    return first == [float(b) for b in prepared]


@effect("DataLoaderConfiguration.keep_global_batch", (True, [4, 4, 4]), (False, [2] * 6))
def keep_global_batch(value, folder):
    """The epoch goes on with one process where two had read a batch of 2 each."""
    plain = torch.utils.data.DataLoader(range(16), batch_size=2)
    before = prepare_data_loader(plain, num_processes=2, config=DataLoaderConfiguration(data_seed=0))
    for _ in before:
        state = before.state_dict()
        break
    after = loader(range(16), batch_size=2, data_seed=0, keep_global_batch=value)
    after.load_state_dict(state)
    return [len(b) for b in after]
