"""Prepared loaders in one process: ranks are simulated one after the other, which index arithmetic allows."""

from __future__ import annotations

import random
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from drivetrain.data import DataLoaderConfiguration, LoaderStack, PreparedDataLoader, prepare_data_loader
from drivetrain.errors import ConfigurationError, DistributedOperationError, UnsupportedError


class Numbers(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


class SizedNumbers(Numbers):
    def __len__(self):
        return self.n


class Batches:
    """A batch sampler of the user's: batches of growing size."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __iter__(self):
        start = 0
        for size in range(1, self.n + 1):
            yield list(range(start, start + size))
            start += size


def prepare(make, world=1, **settings):
    config = DataLoaderConfiguration(data_seed=settings.pop("data_seed", 5), **settings)
    return [prepare_data_loader(make(), num_processes=world, process_index=r, config=config) for r in range(world)]


def read(loader):
    return [(b.tolist() if isinstance(b, torch.Tensor) else b, loader.batch) for b in loader]


def new_rows(ranks):
    return [row for rank, batches in enumerate(ranks) for b, info in batches for row in b[: info.round.new[rank]]]


@given(
    st.integers(0, 60),
    st.integers(1, 8),
    st.integers(1, 4),
    st.sampled_from(["map", "shuffled", "stream", "sized stream"]),
    st.sampled_from(["auto", "contiguous", "random"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([True, False, "repeat"]),
)
@settings(max_examples=150, deadline=None)
def test_any_loader_covers_each_sample_once(length, batch, world, kind, strategy, drop_last, split, even):
    split = split and batch >= world
    if "stream" in kind:
        strategy = "auto"

    def make():
        dataset = {"stream": Numbers(length), "sized stream": SizedNumbers(length)}.get(kind, range(length))
        return DataLoader(
            dataset, batch_size=batch, drop_last=drop_last, shuffle=(kind == "shuffled" and length > 0) or None
        )

    loaders = prepare(make, world, strategy=strategy, split_batches=split, even_batches=even, dispatch_batches=False)
    total = batch if split else batch * world
    for epoch in range(2):
        assert {loader.epoch for loader in loaders} == {epoch}
        ranks = [read(loader) for loader in loaders]
        rows = new_rows(ranks)
        assert len(rows) == (length // total * total if drop_last else length) == len(set(rows))
        for loader, batches in zip(loaders, ranks, strict=True):
            assert [info.index for _, info in batches] == list(range(len(batches)))
            assert [info.is_last for _, info in batches] == [False] * (len(batches) - 1) + [True] * bool(batches)
            if kind != "stream":
                assert len(loader) == len(batches)
            for rows_of_batch, info in batches:
                assert len(rows_of_batch) == info.round.received[loaders.index(loader)]
        if even:
            assert len({len(batches) for batches in ranks}) == 1
        if not drop_last and kind in ("map", "stream", "sized stream") and strategy == "auto":
            steps = max(map(len, ranks))
            by_step = [r[s] for s in range(steps) for r in ranks if s < len(r)]
            in_order = [row for b, info in by_step for row in b if info.rows or even == "repeat"]
            assert in_order[:length] == list(range(length))


def test_order_follows_from_seed_and_epoch():
    def epochs(seed, world=2):
        loaders = prepare(lambda: DataLoader(range(20), batch_size=3, shuffle=True), world, data_seed=seed)
        return [[b for loader in loaders for b, _ in read(loader)] for _ in range(2)]

    assert epochs(1) == epochs(1)
    first, second = epochs(1)
    assert first != second != epochs(2)[1]
    loader = prepare(lambda: DataLoader(range(20), batch_size=3, shuffle=True), data_seed=1)[0]
    loader.set_epoch(1)
    assert sorted(row for b, _ in read(loader) for row in b) == list(range(20))
    loader.set_epoch(1)
    again = [b for b, _ in read(loader)]
    loader.set_epoch(0)
    assert again != [b for b, _ in read(loader)] and loader.epoch == 1


def test_the_loop_does_not_touch_the_training_generators():
    class Draws(Dataset):
        def __len__(self):
            return 9

        def __getitem__(self, i):
            return torch.rand(1).item(), random.random(), np.random.rand()

    loader = prepare(lambda: DataLoader(Draws(), batch_size=2, shuffle=True))[0]
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    a = [b for b, _ in read(loader)]
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()
    loader.set_epoch(0)
    torch.rand(3), random.random(), np.random.rand()
    b = [b for b, _ in read(loader)]
    assert all(torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))
    values = torch.cat([p[0] for p in a])
    assert len(set(values.tolist())) == 9


def test_seeding_off_draws_from_the_training_generators():
    class Draws(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return torch.rand(1)

    loader = prepare(lambda: DataLoader(Draws(), batch_size=1), seed_batches=False)[0]
    torch.manual_seed(3)
    expected = [torch.rand(1).item() for _ in range(4)]
    torch.manual_seed(3)
    assert [b[0][0] for b, _ in read(loader)] == expected


def test_seed_comes_from_the_loaders_generator_or_from_torch():
    def order(generator, seed):
        torch.manual_seed(seed)
        loader = prepare_data_loader(DataLoader(range(30), shuffle=True, generator=generator))
        state = torch.get_rng_state()
        result = [b.item() for b in loader]
        assert torch.equal(state, torch.get_rng_state())
        return result

    assert order(torch.Generator().manual_seed(1), 0) == order(torch.Generator().manual_seed(1), 9)
    assert order(None, 0) == order(None, 0) != order(None, 1)
    torch.manual_seed(0)
    stack = LoaderStack()
    a, b = (prepare_data_loader(DataLoader(range(30), shuffle=True), stack=stack) for _ in range(2))
    assert [x.item() for x in a] != [x.item() for x in b]


def test_user_samplers_are_drawn_with_seeded_generators():
    class Global:
        def __len__(self):
            return 12

        def __iter__(self):
            order = list(range(12))
            random.shuffle(order)
            return iter(order)

    for sampler in (Global(), WeightedRandomSampler([1.0] * 12, 12), RandomSampler(range(12), replacement=True)):
        loader = prepare(lambda s=sampler: DataLoader(range(12), sampler=s, batch_size=5))[0]
        first, second = read(loader), read(loader)
        loader.set_epoch(0)
        assert [b for b, _ in read(loader)] == [b for b, _ in first] != [b for b, _ in second]
        assert len(loader) == 3


def test_samplers_and_datasets_hear_of_epochs():
    heard = []

    class Told(SequentialSampler):
        def set_epoch(self, epoch):
            heard.append(("sampler", epoch))

    class Data(list):
        def set_epoch(self, epoch):
            heard.append(("data", epoch))

    data = Data([1, 2])
    loader = prepare(lambda: DataLoader(data, sampler=Told(data)))[0]
    list(loader), list(loader)
    assert heard == [("data", 0), ("sampler", 0), ("data", 1), ("sampler", 1)]


def test_distributed_sampler_is_translated_and_others_like_it_refused():
    def make(**kwargs):
        return lambda: DataLoader(range(11), batch_size=2, sampler=DistributedSampler(range(11), 2, 0, **kwargs))

    ranks = [read(loader) for loader in prepare(make(shuffle=True, seed=3), 2)]
    assert sorted(new_rows(ranks)) == list(range(11))
    with pytest.raises(ConfigurationError, match="num_replicas=2"):
        prepare(make(), 3)

    class Own(DistributedSampler):
        pass

    with pytest.raises(UnsupportedError, match="Own gives each rank its own samples"):
        prepare(lambda: DataLoader(range(11), sampler=Own(range(11), 2, 0)), 2)


def test_batch_samplers():
    loader = prepare(lambda: DataLoader(range(15), batch_sampler=Batches(5)))[0]
    batches = read(loader)
    assert [b for b, _ in batches] == list(Batches(5)) and batches[2][1].rank_rows == (3,) and len(loader) == 5
    assert loader.total_batch_size == 0 and loader.remainder == -1
    assert loader.batch_size is None and isinstance(loader.batch_sampler, Batches)
    plain = prepare(lambda: DataLoader(range(5), batch_sampler=BatchSampler(SequentialSampler(range(5)), 2, True)), 2)
    assert [len(loader) for loader in plain] == [1, 1] and plain[0].batch_size is None
    assert plain[0].total_batch_size == 4 and isinstance(plain[0].batch_sampler, BatchSampler)


def test_batch_size_none_deals_items():
    data = [torch.full((n, 2), float(n)) for n in (3, 1, 4)]
    loaders = prepare(lambda: DataLoader(data, batch_size=None), 2)
    (a, b) = [[(batch.shape[0], loader.batch) for batch in loader] for loader in loaders]
    assert [n for n, _ in a] == [3, 4] and [n for n, _ in b] == [1, 4]
    assert [i.rows for _, i in a] == [3, 4] and [i.rows for _, i in b] == [1, 0]
    assert a[0][1].rank_rows is None and loaders[0].plan_window(2) is None
    stream = prepare(lambda: DataLoader(Numbers(3), batch_size=None), 2, dispatch_batches=False)
    assert [[b for b, _ in read(loader)] for loader in stream] == [[0, 2], [1, 2]]
    with pytest.raises(ConfigurationError, match="batch_size=None"):
        prepare(lambda: DataLoader(data, batch_size=None), 2, split_batches=True)


def test_sampler_without_a_length():
    class Endless:
        def __iter__(self):
            while True:
                yield random.randrange(100)

    class Unsized:
        def __iter__(self):
            return iter(range(9))

    loader = prepare(lambda: DataLoader(range(100), sampler=Endless(), batch_size=4))[0]
    rows = [b.tolist() for b, _ in zip(loader, range(300), strict=False)]
    loader.set_epoch(0)
    assert rows == [b.tolist() for b, _ in zip(loader, range(300), strict=False)]
    with pytest.raises(TypeError, match="Endless has no length"):
        len(loader)
    loader = prepare(lambda: DataLoader(range(9), sampler=Unsized(), batch_size=4))[0]
    assert [(b, i.is_last) for b, i in read(loader)] == [([0, 1, 2, 3], False), ([4, 5, 6, 7], False), ([8], True)]
    with pytest.raises(UnsupportedError, match="'random'"):
        prepare(lambda: DataLoader(range(9), sampler=Unsized()), strategy="random")


def test_loader_is_a_data_loader_with_the_users_attributes():
    class Mine(DataLoader):
        """A user's class with a method and an attribute."""

        def __init__(self, *args, note, **kwargs):
            self.note = note
            super().__init__(*args, **kwargs)

        def describe(self):
            return f"{self.note} {self.batch_size} {len(self.dataset)}"

    data = TensorDataset(torch.arange(5.0))
    original = Mine(data, batch_size=2, note="n", drop_last=True)
    loader = prepare_data_loader(original)
    assert (
        isinstance(loader, (DataLoader, Mine)) and isinstance(loader, Mine) and isinstance(loader, PreparedDataLoader)
    )
    assert loader.describe() == "n 2 5" and loader.note == "n"
    for name in (
        "dataset",
        "batch_size",
        "sampler",
        "batch_sampler",
        "collate_fn",
        "num_workers",
        "drop_last",
        "generator",
    ):
        assert getattr(loader, name) is getattr(original, name)
    assert loader.total_batch_size == 2 and loader.total_dataset_length == 5
    assert prepare_data_loader(loader) is loader
    with pytest.raises(TypeError, match="pickle the loader that was prepared"):
        __import__("pickle").dumps(loader)
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        loader.batch_size = 3


def test_preparing_twice_gives_the_same_object_per_stack():
    original, stack = DataLoader(range(3)), LoaderStack()
    assert prepare_data_loader(original, stack=stack) is prepare_data_loader(original, stack=stack)
    assert prepare_data_loader(original) is not prepare_data_loader(original)
    import gc
    import weakref

    alive = weakref.ref(original)
    del original
    gc.collect()
    assert alive() is None


def test_subclass_that_makes_its_own_batches():
    class Doubles(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                yield batch
                yield -batch

        def __len__(self):
            return 2 * super().__len__()

    loaders = prepare(lambda: Doubles(range(1, 6), batch_size=2), 2)
    (a, b) = [read(loader) for loader in loaders]
    assert [x for x, _ in a] == [[1, 2], [-1, -2], [5], [-5]] and [x for x, _ in b][:2] == [[3, 4], [-3, -4]]
    assert [i.is_last for _, i in a] == [False] * 3 + [True] and a[0][1].rows == 2 and a[0][1].rank_rows is None
    assert len(loaders[0]) == 4
    with pytest.raises(UnsupportedError, match="Doubles makes its batches"):
        prepare(lambda: Doubles(range(5)), 2, dispatch_batches=True)


def test_breaking_out_and_nesting():
    stack = LoaderStack()
    train = prepare_data_loader(DataLoader(range(8), batch_size=2), stack=stack)
    valid = prepare_data_loader(DataLoader(range(3)), stack=stack)
    assert stack.active is None and train.batch is None
    for batch in train:
        assert stack.active is train
        for _ in valid:
            assert stack.active is valid
        assert stack.active is train and train.batch.index == batch[0].item() // 2
        if train.batch.index == 1:
            break
    assert stack.active is None and train.batch is None and not train.end_of_dataloader
    assert (train.epoch, train.state_dict()["taken"], valid.epoch) == (0, 2, 2)
    assert len(list(train)) == 4 and train.epoch == 2 and train.end_of_dataloader
    lying_about = iter(valid)
    next(lying_about)
    for _ in train:
        assert stack.active is train
    with pytest.raises(ZeroDivisionError):
        for _ in train:
            1 / 0
    for a, _b in zip(train, valid, strict=False):
        assert stack.active is valid and train.batch.index == a[0].item() // 2


def test_even_batches_may_change_between_epochs():
    loaders = prepare(lambda: DataLoader(range(5), batch_size=2), 2)
    for loader in loaders:
        loader.even_batches = False
    assert [len(list(loader)) for loader in loaders] == [2, 1] == [len(loader) for loader in loaders]
    for loader in loaders:
        loader.even_batches = True
    assert [len(list(loader)) for loader in loaders] == [2, 2]
    with pytest.raises(ConfigurationError, match="'sometimes'"):
        loaders[0].even_batches = "sometimes"
    assert loaders[0].even_batches is True


def test_remainder_and_end_as_accelerate_has_them():
    loader = prepare(lambda: DataLoader(range(10), batch_size=2), 2)[0]
    seen = [(loader.end_of_dataloader, loader.remainder) for _ in loader]
    assert seen == [(False, 2), (False, 2), (True, 2)]
    stream = prepare(lambda: DataLoader(Numbers(7), batch_size=2), 2, dispatch_batches=False)[0]
    assert [(stream.end_of_dataloader, stream.remainder) for _ in stream] == [(False, -1), (True, 3)]


def test_windows_by_hand():
    # 2 ranks, batches of 2, 11 samples: 4, 4, then 3 rows (2 + 1).
    loader = prepare(lambda: DataLoader(range(11), batch_size=2), 2)[1]
    windows = [(loader.plan_window(2), loader.batch.rows, loader.batch.rank_rows) for _ in loader]
    assert [(w.size, w.global_rows, rows) for w, rows, _ in windows] == [(2, 8, 2), (2, 7, 2), (1, 3, 1)]
    assert windows[2][2] == (2, 1)
    stream = prepare(lambda: DataLoader(Numbers(11), batch_size=2), 2, dispatch_batches=False)[1]
    assert [(stream.plan_window(2), stream.batch.rank_rows) for _ in stream] == [
        (None, (2, 2)),
        (None, (2, 2)),
        (None, (2, 1)),
    ]


def test_a_dataset_that_raises_ahead_does_not_cost_the_batch_before():
    class Breaks(IterableDataset):
        def __iter__(self):
            yield from range(4)
            raise ValueError("broken sample")

    loader = prepare(lambda: DataLoader(Breaks(), batch_size=2))[0]
    seen = []
    with pytest.raises(ValueError, match="broken sample"):
        for batch in loader:
            seen.append((batch.tolist(), loader.batch.is_last))
    assert seen == [([0, 1], False), ([2, 3], False)]

    class Stops(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            if i == 2:
                raise StopIteration
            return i

    with pytest.raises(Exception, match="can't end it"):
        list(prepare(lambda: DataLoader(Stops(), batch_size=2))[0])


def test_what_cannot_be_honoured_is_refused():
    with pytest.raises(ConfigurationError, match="takes a torch DataLoader"):
        prepare_data_loader([1, 2])
    with pytest.raises(ConfigurationError, match="can't divide batches of 2"):
        prepare(lambda: DataLoader(range(9), batch_size=2), 3, split_batches=True)
    with pytest.raises(UnsupportedError, match="'contiguous' needs an order"):
        prepare(lambda: DataLoader(Numbers(3)), 2, strategy="contiguous", dispatch_batches=False)
    with pytest.raises(DistributedOperationError, match="must agree on a seed"):
        prepare_data_loader(DataLoader(range(3)), num_processes=2)
    with pytest.raises(ConfigurationError, match="prefetch"):
        prepare(lambda: DataLoader(range(3)), prefetch=2)
    with pytest.raises(ConfigurationError, match="strategy is a int"):
        prepare(lambda: DataLoader(range(3)), strategy=3)

    class Liar:
        def __len__(self):
            return 2

        def __iter__(self):
            while True:
                yield 0

    with pytest.raises(ConfigurationError, match="yields 1004 times and more"):
        list(prepare(lambda: DataLoader(range(3), sampler=Liar()))[0])


def test_custom_strategies_by_function_class_and_path():
    def odd_even(indices, rank, world):
        return [i for i in indices if i % world == rank]

    loaders = prepare(lambda: DataLoader(range(6), batch_size=2), 2, strategy=odd_even)
    assert [[b for b, _ in read(loader)] for loader in loaders] == [[[0, 2], [4]], [[1, 3], [5]]]
    by_path = prepare(lambda: DataLoader(range(6), batch_size=2), 2, strategy="drivetrain.data.shardings:Contiguous")
    assert [b for b, _ in read(by_path[0])] == [[0, 1], [2]]
    shuffled = prepare(lambda: DataLoader(range(40), batch_sampler=Batches(5)), strategy="random")[0]
    first, second = [b for b, _ in read(shuffled)], [b for b, _ in read(shuffled)]
    assert first != second and Counter(map(tuple, first)) == Counter(map(tuple, second))


def test_a_data_set_may_grow_between_epochs():
    data = list(range(5))
    for shuffle in (False, True):
        loaders = prepare(lambda s=shuffle: DataLoader(data, batch_size=2, shuffle=s), 2)
        before = new_rows([read(loader) for loader in loaders])
        data += range(len(data), len(data) + 3)
        after = new_rows([read(loader) for loader in loaders])
        assert (sorted(before), sorted(after)) == (list(range(len(data) - 3)), list(range(len(data))))
        assert {len(loader) for loader in loaders} == {-(-len(data) // 4)}


def test_batches_keep_their_container_types_on_the_device():
    from collections import namedtuple

    pair = namedtuple("pair", "x name")

    def collate(rows):
        return pair(torch.tensor(rows), [str(r) for r in rows])

    loader = prepare_data_loader(DataLoader(range(3), batch_size=2, collate_fn=collate), device="meta")
    batch = next(iter(loader))
    assert type(batch) is pair and batch.x.device.type == "meta" and batch.name == ["0", "1"]
    left = prepare_data_loader(DataLoader(range(3)), device="meta", put_on_device=False)
    assert next(iter(left)).device.type == "cpu"


def test_no_warnings_in_ordinary_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        list(prepare_data_loader(DataLoader(range(5), batch_size=2, shuffle=True)))


class Moved:
    """A batch with a way of its own to a device."""

    def __init__(self):
        self.devices = []

    def to(self, device, **kwargs):
        self.devices.append(str(device))
        return self


class Makes(DataLoader):
    def __iter__(self):
        return iter([Moved()])


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(range(1), collate_fn=lambda rows: Moved()),
        DataLoader([Moved()], batch_size=None),
        Makes(range(1)),
    ],
    ids=["collate_fn", "batch_size=None", "__iter__"],
)
def test_batches_that_know_how_to_move_are_told_also_on_the_cpu(loader):
    (batch,) = prepare_data_loader(loader, device="cpu")
    assert batch.devices == ["cpu"]
