"""Positions: resume anywhere, at the same or another world size, with nothing read twice and nothing lost."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from drivetrain.data import DataLoaderConfiguration, prepare_data_loader, skip_first_batches
from drivetrain.errors import CheckpointError, UnsupportedError


def prepare(make, world=1, **settings):
    config = DataLoaderConfiguration(**{"data_seed": 5, "dispatch_batches": False, **settings})
    return [prepare_data_loader(make(), num_processes=world, process_index=r, config=config) for r in range(world)]


def take(loader, count=None):
    """The first batches of an iteration that is then left."""
    result = []
    if count == 0:
        return result
    for batch in loader:
        new = len(batch) if loader.batch.round is None else loader.batch.round.new[place(loader)]
        result.append(batch.tolist()[:new])
        if len(result) == count:
            break
    return result


def place(loader):
    return loader._drivetrain.context.ranks.index


def saved(loader):
    return json.loads(json.dumps(loader.state_dict()))


class Reads(Dataset):
    """Counts what is read."""

    def __init__(self, n):
        self.n = n
        self.count = 0

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.count += 1
        return i


class Augmented(Dataset):
    def __init__(self, n=40):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.tensor([i, torch.rand(1).item(), random.random(), np.random.rand()], dtype=torch.float64)


class Plain(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        if info is None:
            return iter(range(self.n))
        return iter(range(info.id, self.n, info.num_workers))


class Stateful(IterableDataset):
    """Knows where it is. Shuffles with the global generator, as a streaming data set with a buffer would."""

    def __init__(self, n):
        self.n = n
        self.place = 0
        self.read = 0

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        step = 1 if info is None else info.num_workers
        first = 0 if info is None else info.id
        start, self.place = self.place, 0
        for number in range(start, (self.n - first + step - 1) // step):
            self.place = number + 1
            self.read += 1
            yield first + number * step
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@given(
    st.integers(1, 50),
    st.integers(1, 5),
    st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)),
    st.sampled_from(["auto", "contiguous", "random"]),
    st.sampled_from([True, False, "repeat"]),
    st.booleans(),
    st.data(),
)
@settings(max_examples=80, deadline=None)
def test_two_resizes_see_the_rest_of_the_epoch_exactly_once(length, batch, worlds, strategy, even, shuffle, data):
    seen = Counter()
    state = None
    for number, world in enumerate(worlds):
        loaders = prepare(
            lambda: DataLoader(range(length), batch_size=batch, shuffle=shuffle),
            world,
            strategy=strategy,
            even_batches=even,
        )
        count = None if number == 2 else data.draw(st.integers(0, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
                if loader.epoch > 0:
                    continue
                loader.set_epoch(0)  # asking for the epoch that a position is in keeps the position
                for rows in take(loader, count):
                    seen.update(rows)
        state = saved(loaders[0])
    assert seen == Counter(range(length))


@pytest.mark.parametrize("shuffle", [False, True])
def test_resume_at_the_same_world_size_is_the_same_run(shuffle):
    def fresh():
        return prepare(lambda: DataLoader(Augmented(), batch_size=3, shuffle=shuffle), 2)

    def epoch(loader, count=None):
        return [b.tolist() for b, _ in zip(loader, range(count or 10**9), strict=False)]

    whole = fresh()
    expected = [[epoch(loader) for _ in range(2)] for loader in whole]
    for stop in (1, 4, 6):
        for rank, loader in enumerate(fresh()):
            assert take_raw(loader, stop) == expected[rank][0][:stop]
            state = saved(loader)
            assert (state["epoch"], state["taken"]) == (0, stop)
            again = fresh()[rank]
            again.load_state_dict(state)
            assert epoch(again) == expected[rank][0][stop:] and epoch(again) == expected[rank][1]


def take_raw(loader, count):
    result = []
    for batch in loader:
        result.append(batch.tolist())
        if len(result) == count:
            break
    return result


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_resume_reads_nothing_of_what_was_seen(share):
    data = Reads(1_000_000)
    loader = prepare(lambda: DataLoader(data, batch_size=10, shuffle=True))[0]
    loader.load_state_dict({**saved(loader), "taken": int(share * 100_000)})
    batch = next(iter(loader))
    assert data.count == len(batch) == 10


def test_position_is_what_the_loop_received():
    loader = prepare(lambda: DataLoader(Plain(20), batch_size=2))[0]
    assert loader.state_dict()["taken"] == 0
    for batch in loader:
        state = loader.state_dict()
        assert state["taken"] == batch[0].item() // 2 + 1 and state["streams"]["0"]["rows"] == batch[-1].item() + 1
        if state["taken"] == 4:
            break
    assert loader.state_dict() == state
    iterator = iter(loader)
    assert loader.state_dict() == state  # nothing was received yet
    next(iterator)
    assert (loader.state_dict()["epoch"], loader.state_dict()["taken"]) == (1, 1)


def test_end_of_epoch():
    make = lambda: DataLoader(range(6), batch_size=2)  # noqa: E731
    loader = prepare(make)[0]
    for _ in loader:
        if loader.batch.is_last:
            inside = saved(loader)
    after = saved(loader)
    assert (inside["epoch"], inside["taken"]) == (0, 3) and (after["epoch"], after["taken"]) == (1, 0)
    again = prepare(make)[0]
    again.load_state_dict(inside)
    assert len(list(again)) == 3 and again.epoch == 2  # nothing is left of epoch 0: the next one
    again.load_state_dict(inside)
    again.set_epoch(0)
    assert list(again) == [] and again.epoch == 1  # unless that very epoch is asked for
    again.load_state_dict(after)
    assert again.epoch == 1 and len(list(again)) == 3


def test_set_epoch_elsewhere_drops_the_position():
    loader = prepare(lambda: DataLoader(range(6), batch_size=2))[0]
    take(loader, 1)
    state = saved(loader)
    loader.load_state_dict(state)
    loader.set_epoch(2)
    assert len(list(loader)) == 3 and loader.epoch == 3
    take(loader, 1)
    loader.set_epoch(3)  # no state was loaded: the epoch starts over
    assert len(list(loader)) == 3


def test_skip_first_batches():
    data = Reads(10)
    loader = prepare(lambda: DataLoader(data, batch_size=2))[0]
    skipped = skip_first_batches(loader, 3)
    assert (len(skipped), len(loader)) == (2, 5) and isinstance(skipped, type(loader))
    assert take(skipped) == [[6, 7], [8, 9]] and data.count == 4
    assert (skipped.epoch, loader.epoch, len(skipped)) == (1, 1, 5)
    assert len(take(skipped)) == 5 and len(take(loader)) == 5 and loader.epoch == 3
    for _ in skip_first_batches(loader, 2):
        assert loader.state_dict()["taken"] == 3
        break
    assert take(skip_first_batches(DataLoader(range(5), batch_size=2), 1)) == [[2, 3], [4]]
    with pytest.warns(UserWarning, match="4 samples are read and dropped"):
        assert take(skip_first_batches(prepare(lambda: DataLoader(Plain(6), batch_size=2))[0], 2)) == [[4, 5]]


def test_a_script_that_loads_and_skips_skips_once():
    make = lambda: DataLoader(range(10), batch_size=1)  # noqa: E731
    loader = prepare(make)[0]
    take(loader, 4)
    again = prepare(make)[0]
    again.load_state_dict(saved(loader))
    assert take(skip_first_batches(again, 4)) == [[i] for i in range(4, 10)]
    # At another world size the position counts, not the number: rank 0 and 1 share what is left.
    rest = prepare(make, 2)
    with pytest.warns(UserWarning, match="begun on 1 ranks, now on 2"):
        for r in rest:
            r.load_state_dict(saved_after(make, 4))
        assert sorted(i for r in rest for rows in take(skip_first_batches(r, 4)) for i in rows) == list(range(4, 10))


def saved_after(make, count):
    loader = prepare(make)[0]
    take(loader, count)
    return saved(loader)


def test_keep_global_batch():
    make = lambda: DataLoader(range(24), batch_size=2)  # noqa: E731
    first = prepare(make, 3)[0]
    take(first, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaders = prepare(make, 2, keep_global_batch=True)
        for loader in loaders:
            loader.load_state_dict(saved(first))
        assert [take(loader) for loader in loaders] == [[[12, 13, 14], [18, 19, 20]], [[15, 16, 17], [21, 22, 23]]]
        assert [len(take(loader)) for loader in loaders] == [4, 4] and loaders[0].total_batch_size == 6
    assert "the global batch stays as it is" in str(caught[0].message)
    between = prepare(make, 2, keep_global_batch=True)[0]
    between.load_state_dict(saved(prepare(make, 3)[0]))  # saved between epochs
    assert between.total_batch_size == 6
    one = prepare(make, 1)[0]
    take(one, 1)
    with pytest.raises(UnsupportedError, match="can't divide global batches of 2 over 4 ranks"):
        prepare(make, 4, keep_global_batch=True)[0].load_state_dict(saved(one))


def test_what_cannot_be_resumed_is_an_error():
    loader = prepare(lambda: DataLoader(range(10), batch_size=2))[0]
    take(loader, 2)
    other = prepare(lambda: DataLoader(range(9), batch_size=2))[0]
    other.load_state_dict(saved(loader))
    with pytest.raises(CheckpointError, match="10 samples or batches, and now there are 9"):
        list(other)
    other.set_epoch(1)
    assert len(list(other)) == 5
    with pytest.raises(CheckpointError, match="format None"):
        other.load_state_dict({"epoch": 1})

    class Private:
        def __init__(self):
            self.numbers = np.random.default_rng()

        def __len__(self):
            return 20

        def __iter__(self):
            return iter(self.numbers.permutation(20).tolist())

    loader = prepare(lambda: DataLoader(range(20), sampler=Private()))[0]
    take(loader, 2)
    again = prepare(lambda: DataLoader(range(20), sampler=Private()))[0]
    again.load_state_dict(saved(loader))
    with pytest.raises(CheckpointError, match="another order than when its state was saved"):
        list(again)


def test_seeded_samplers_resume():
    make = lambda: DataLoader(range(20), sampler=WeightedRandomSampler(list(range(1, 21)), 20), batch_size=3)  # noqa: E731
    whole = take(prepare(make)[0])
    loader = prepare(make)[0]
    take(loader, 2)
    again = prepare(make)[0]
    again.load_state_dict(saved(loader))
    assert take(again) == whole[2:]


# -- iterable data sets ----------------------------------------------------------------------------------------------------


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("kind", "workers", "world"),
    [
        (Plain, 0, 1),
        (Plain, 2, 2),
        (Stateful, 0, 2),
        (Stateful, 2, 1),
        pytest.param(Plain, 0, 2, marks=FULL),
        pytest.param(Plain, 2, 1, marks=FULL),
        pytest.param(Stateful, 0, 1, marks=FULL),
        pytest.param(Stateful, 2, 2, marks=FULL),
    ],
)
def test_streams_resume_in_order(kind, workers, world):
    def fresh():
        return prepare(lambda: DataLoader(kind(37), batch_size=3, num_workers=workers), world)

    whole = [take_raw(loader, None) for loader in fresh()]
    assert sorted(i for r, loader in enumerate(fresh()) for rows in take(loader) for i in rows) == list(range(37))
    for stop in (1, 2, 3):
        for rank, loader in enumerate(fresh()):
            assert take_raw(loader, stop) == whole[rank][:stop]
            again = fresh()[rank]
            again.load_state_dict(saved(loader))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert take_raw(again, None) == whole[rank][stop:]
            told = [str(w.message) for w in caught if "state_dict() and load_state_dict()" in str(w.message)]
            assert len(told) == (kind is Plain and rank == 0)
            assert take_raw(again, None) == whole[rank]  # the next epoch is whole


def test_stateful_streams_are_not_read_again():
    loader = prepare(lambda: DataLoader(Stateful(1000), batch_size=10))[0]
    take(loader, 90)
    data = Stateful(1000)
    again = prepare(lambda: DataLoader(data, batch_size=10))[0]
    again.load_state_dict(saved(loader))
    next(iter(again))
    assert data.read == 20  # the batch and the one ahead


def test_streams_resume_at_another_world_size():
    seen = Counter()
    state = None
    for world, count in ((2, 3), (3, 2), (1, None)):
        loaders = prepare(lambda: DataLoader(Plain(40), batch_size=2), world)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for loader in loaders:
                if state is not None:
                    loader.load_state_dict(state)
                for rows in take(loader, count):
                    seen.update(rows)
        state = saved(loaders[0])
    assert seen == Counter(range(40))


def test_streams_need_the_same_workers():
    loader = prepare(lambda: DataLoader(Plain(40), batch_size=2, num_workers=2))[0]
    take(loader, 3)
    again = prepare(lambda: DataLoader(Plain(40), batch_size=2))[0]
    again.load_state_dict(saved(loader))
    with pytest.raises(CheckpointError, match="num_workers=2, and now has 0"):
        list(again)


class Shuffling(IterableDataset):
    """Draws while reading; has no state."""

    def __iter__(self):
        for i in range(30):
            yield i + torch.rand(1).item() / 2 + random.random() / 4


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_that_draw_are_common_and_repeat_on_resume(workers):
    def fresh(world=2):
        return prepare(lambda: DataLoader(Shuffling(), batch_size=2, num_workers=workers), world)

    a, b = (take_raw(loader, None) for loader in fresh())
    assert sorted(int(x) for batch in a + b for x in batch) == sorted(list(range(30)) * max(workers, 1))
    loader = fresh()[1]
    take_raw(loader, 3)
    again = fresh()[1]
    again.load_state_dict(saved(loader))
    assert take_raw(again, None) == b[3:]


def test_state_is_plain_and_independent_of_the_loader():
    loader = prepare(lambda: DataLoader(Stateful(9), batch_size=2))[0]
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    before = copy.deepcopy(state)
    next(iterator)
    assert state == before == json.loads(json.dumps(state))
