"""Where batches come from: DataPipes, torchdata's loader, batches by length, streams of ragged rows, and workers out of order."""

from __future__ import annotations

import importlib
import json
import random
import warnings
from itertools import pairwise

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, IterDataPipe, MapDataPipe, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

from drivetrain.data import DataLoaderConfiguration, prepare_data_loader
from drivetrain.errors import UnsupportedError


def prepare(make, world=1, **settings):
    config = DataLoaderConfiguration(**{"data_seed": 5, "dispatch_batches": False, **settings})
    return [prepare_data_loader(make(), num_processes=world, process_index=r, config=config) for r in range(world)]


def new_rows(loader, count=None):
    """Each batch's rows, without repeated ones; of the first batches only, if so many are asked for."""
    rank = loader._drivetrain.context.ranks.index
    result = []
    for batch in loader:
        rows = batch.tolist() if isinstance(batch, torch.Tensor) else batch
        result.append(rows[: loader.batch.round.new[rank]])
        if len(result) == count:
            break
    return result


def saved(loader):
    return json.loads(json.dumps(loader.state_dict()))


def flat(batches):
    return sorted(row for batch in batches for row in batch)


# -- DataPipes -------------------------------------------------------------------------------------------------------------


def pipe_loader(workers=0, *, shuffle=True, **settings):
    pipe = IterableWrapper(range(22)).shuffle(buffer_size=30).sharding_filter()
    return DataLoader(pipe, batch_size=2, shuffle=shuffle, num_workers=workers, **settings)


class Own(MapDataPipe):
    """Would be divided by torch's loader, and by us again."""

    def apply_sharding(self, instances, instance):
        raise AssertionError

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return i


class Count(IterDataPipe):
    def __iter__(self):
        yield from range(5)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_pipes_are_divided_shuffled_by_epoch_and_resumed(workers, persistent):
    def fresh():
        return prepare(lambda: pipe_loader(workers, persistent_workers=persistent), 2)

    torch.manual_seed(0)
    loaders = fresh()
    epochs = [[new_rows(loader) for loader in loaders] for _ in range(2)]
    for epoch in epochs:
        assert flat(epoch[0] + epoch[1]) == list(range(22))
    assert epochs[0] != epochs[1]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert [new_rows(loader) for loader in fresh()] == epochs[0]
    assert torch.equal(before, torch.get_rng_state())
    stopped, again = fresh()[1], fresh()[1]
    new_rows(stopped, 2)
    again.load_state_dict(saved(stopped))
    assert new_rows(again) == epochs[0][1][2:] and new_rows(again) == epochs[1][1]


def test_pipes_in_order_and_seeding_off():
    plain = prepare(lambda: pipe_loader(shuffle=False), 2)
    assert [new_rows(loader)[:2] for loader in plain] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    ranks = [new_rows(loader) for loader in prepare(pipe_loader, 2, seed_batches=False)]
    assert flat(ranks[0] + ranks[1]) == list(range(22))  # both drew the same order


def test_pipes_are_dispatched(ranks):
    def run():
        rank = torch.distributed.get_rank()
        loader = prepare_data_loader(pipe_loader(), num_processes=2, process_index=rank)
        assert loader._drivetrain.context.channel is not None
        return [new_rows(loader) for _ in range(2)]

    (a, c), (b, d) = ranks.run(run)
    assert flat(a + b) == flat(c + d) == list(range(22)) and (a, b) != (c, d)


def test_map_pipes_are_data_sets_unless_they_divide_themselves():
    loaders = prepare(lambda: DataLoader(SequenceWrapper(range(7)), batch_size=2, shuffle=True), 2)
    assert flat(new_rows(loaders[0]) + new_rows(loaders[1])) == list(range(7))

    with pytest.raises(UnsupportedError, match="divides itself over ranks"):
        prepare(lambda: DataLoader(Own()))


def test_a_pipe_of_ones_own_without_shuffling():
    assert [new_rows(loader) for loader in prepare(lambda: DataLoader(Count(), batch_size=2), 2)] == [
        [[0, 1], [4]],
        [[2, 3], []],
    ]


# -- torchdata -------------------------------------------------------------------------------------------------------------


class Numbers(IterableDataset):
    """Has a state, as torchdata wants it, in each worker."""

    def __init__(self, n):
        self.n, self.next, self.reads = n, 0, 0

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while first + self.next * step < self.n:
            self.next += 1
            self.reads += 1
            yield first + (self.next - 1) * step
        self.next = 0

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_torchdatas_stateful_loader(kind, workers):
    module = importlib.import_module("torchdata.stateful_dataloader")

    def fresh():
        def make():
            shuffle = {"shuffle": True} if kind == "map" else {}
            data = range(30) if kind == "map" else Numbers(30)
            return module.StatefulDataLoader(data, batch_size=3, num_workers=workers, **shuffle)

        return prepare(make, 2)

    whole = [[new_rows(loader) for _ in range(2)] for loader in fresh()]
    assert flat(whole[0][0] + whole[1][0]) == list(range(30))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*read and dropped")
        for rank, loader in enumerate(fresh()):
            assert isinstance(loader, module.StatefulDataLoader)
            assert new_rows(loader, 2) == whole[rank][0][:2]
            again = fresh()[rank]
            again.load_state_dict(saved(loader))
            assert new_rows(again) == whole[rank][0][2:] and new_rows(again) == whole[rank][1]


# -- batches of any size and rows of any length ----------------------------------------------------------------------------


class ByLength(BatchSampler):
    """Batches of rows of about one length, at most so many values each: their sizes differ."""

    def __init__(self, lengths, most):
        self.batches, batch = [], []
        for i in sorted(range(len(lengths)), key=lengths.__getitem__):
            if batch and (len(batch) + 1) * lengths[i] > most:
                self.batches.append(batch)
                batch = []
            batch.append(i)
        self.batches.append(batch)

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(random.sample(self.batches, len(self.batches)))


LENGTHS = random.Random(0).choices(range(1, 20), k=50)


def padded(numbers):
    return torch.tensor([[i] + [0] * (LENGTHS[numbers[-1]] - 1) for i in numbers])


def read_buckets(settings, state=None, count=None):
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    warnings.simplefilter("ignore")  # of the other world size
    loader = prepare_data_loader(
        DataLoader(range(50), batch_sampler=ByLength(LENGTHS, 100), collate_fn=padded),
        num_processes=world,
        process_index=rank,
        config=DataLoaderConfiguration(data_seed=5, **settings),
    )
    if state is not None:
        loader.load_state_dict(state)
    seen = [[row[0] for row in rows] for rows in new_rows(loader, count)]
    return seen, len(loader), saved(loader)


@pytest.mark.parametrize("settings", [{}, {"split_batches": True}, {"even_batches": False}, {"dispatch_batches": True}])
def test_batches_bucketed_by_length(workers, settings):
    whole = workers(2).run(read_buckets, settings)
    assert flat(rows for seen, _, _ in whole for rows in seen) == list(range(50))
    assert [len(seen) for seen, _, _ in whole] == [length for _, length, _ in whole]
    assert len({len(rows) for seen, _, _ in whole for rows in seen}) > 3
    start = workers(2).run(read_buckets, settings, count=2)
    assert [seen for seen, _, _ in start] == [seen[:2] for seen, _, _ in whole]
    rest = workers(3).run(read_buckets, settings, state=start[0][2])  # what is left is dealt anew
    assert flat(rows for seen, _, _ in start + rest for rows in seen) == list(range(50))


class Ragged(IterableDataset):
    """Rows of any length, and no length of its own."""

    def __iter__(self):
        return ((i, torch.arange(LENGTHS[i]), f"row {i}" if i % 2 else None) for i in range(50))


@pytest.mark.parametrize("dispatch", [False, True])
def test_streams_of_ragged_rows_without_a_length(ranks, dispatch):
    def run():
        rank = torch.distributed.get_rank()
        config = DataLoaderConfiguration(dispatch_batches=dispatch)
        loader = DataLoader(Ragged(), batch_size=3, collate_fn=list)
        loader = prepare_data_loader(loader, num_processes=2, process_index=rank, config=config)
        with pytest.raises(TypeError, match="Ragged has no length"):
            len(loader)
        seen = []
        for batch in loader:
            for i, values, name in batch[: loader.batch.round.new[rank]]:
                assert values.tolist() == list(range(LENGTHS[i])) and name == (f"row {i}" if i % 2 else None)
                seen.append(i)
        return seen

    a, b = ranks.run(run)
    assert sorted(a + b) == list(range(50)) and abs(len(a) - len(b)) <= 2 and all(x < y for x, y in pairwise(a))


# -- workers out of order --------------------------------------------------------------------------------------------------


def test_out_of_order_is_accepted_where_nothing_can_overtake():
    loader = prepare(lambda: DataLoader(range(5), batch_size=2, num_workers=1, in_order=False))[0]
    assert new_rows(loader) == [[0, 1], [2, 3], [4]]
    with pytest.raises(UnsupportedError, match="Use in_order=True, or one worker"):
        prepare(lambda: DataLoader(range(5), num_workers=2, in_order=False))
