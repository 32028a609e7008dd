"""Loaders on live ranks: agreement, exactly-once metrics, shards, failures."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from drivetrain.data import (
    DataLoaderConfiguration,
    LoaderStack,
    gather_for_metrics,
    prepare_data_loader,
    set_seed,
)
from drivetrain.testing.workers import RemoteError


def prepare(loader, stack=None, **settings):
    return prepare_data_loader(
        loader,
        num_processes=dist.get_world_size(),
        process_index=dist.get_rank(),
        config=DataLoaderConfiguration(**settings),
        stack=stack,
    )


def read(loader):
    return [(b.tolist(), loader.batch.rows, loader.batch.rank_rows) for b in loader]


def all_rows(results):
    return sorted(row for rank in results for rows, weight, _ in rank for row in rows[: weight if weight else 0])


class Growing:
    def __len__(self):
        return 5

    def __iter__(self):
        start = 0
        for size in range(1, 6):
            yield list(range(start, start + size))
            start += size


class Private(Sampler):
    """Draws from a generator of its own that nobody can seed."""

    def __init__(self, n):
        self.n = n
        self.numbers = np.random.default_rng()

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(self.numbers.permutation(self.n).tolist())


class Unsized(Private):
    __len__ = None


@pytest.mark.parametrize("world", [2, 3])
def test_unseeded_orders_are_common(workers, world):
    def run():
        torch.manual_seed(100 + dist.get_rank())
        random.seed(dist.get_rank())
        results = []
        own = torch.Generator()
        own.seed()
        loaders = [
            DataLoader(range(23), batch_size=3, shuffle=True),
            DataLoader(range(23), batch_size=3, shuffle=True, generator=own),
            DataLoader(range(23), batch_size=3, sampler=RandomSampler(range(23), generator=own)),
            DataLoader(range(23), batch_size=3, sampler=Private(23)),
            DataLoader(range(23), batch_size=3, sampler=Unsized(23)),
        ]
        stack = LoaderStack()
        for loader in loaders:
            prepared = prepare(loader, stack)
            results.append([read(prepared), read(prepared)])
        return results

    for kind in zip(*workers(world).run(run), strict=True):
        first, second = zip(*kind, strict=True)
        assert all_rows(first) == all_rows(second) == list(range(23))
        assert first != second


def test_batch_samplers_on_two_ranks(ranks):
    def run():
        loader = prepare(DataLoader(range(15), batch_sampler=Growing()))
        return len(loader), read(loader), [loader.plan_window(2).global_rows for _ in loader]

    a, b = ranks.run(run)
    assert [rows for rows, _, _ in a[1]] == [[0], [3, 4, 5], [10, 11, 12]]
    assert b[1][2] == ([13, 14], 2, (3, 2)) and a[0] == b[0] == 3
    assert a[2] == b[2] == [10, 12, 5]


def test_world_2_with_seed_device_specific_keeps_a_common_order(ranks):
    def run():
        set_seed(3, device_specific=True)
        draw = torch.rand(1).item()
        set_seed(3, device_specific=True)
        return draw, read(prepare(DataLoader(range(10), shuffle=True, batch_size=2)))

    (x, a), (y, b) = ranks.run(run)
    assert x != y and all_rows([a, b]) == list(range(10))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("length", "samples=11, and rank 0 one with 10"),
        ("batch", "round_rows"),
        ("dispatch", "dispatches=False"),
        ("even", "even_batches=False"),
    ],
)
def test_ranks_that_disagree_are_told(ranks, change, message):
    def run():
        odd = dist.get_rank() == 1
        length = 11 if odd and change == "length" else 10
        size = 3 if odd and change == "batch" else 2
        dispatch = change == "dispatch" and not odd
        even = not (odd and change == "even")
        prepare(DataLoader(range(length), batch_size=size), dispatch_batches=dispatch, even_batches=even)

    with pytest.raises(RemoteError, match=message) as caught:
        ranks.run(run)
    assert set(caught.value.failures) == {0, 1}


@pytest.mark.parametrize("world", [2, 3])
def test_metrics_cover_each_sample_once(workers, world):
    def run():
        bad = []
        for length in (0, 1, 2, 5, 12, 13, 17):
            for size in (1, 4):
                for settings in (
                    {},
                    {"even_batches": "repeat"},
                    {"strategy": "contiguous"},
                    {"dispatch_batches": True},
                    {"split_batches": size >= dist.get_world_size()},
                ):
                    loader = prepare(DataLoader(range(length), batch_size=size), **settings)
                    tensors, pairs, objects, mixed, scalars = [], [], [], [], []
                    for batch in loader:
                        tensors += gather_for_metrics(batch, loader).tolist()
                        pairs += gather_for_metrics({"b": batch.repeat_interleave(3)}, loader)["b"].tolist()
                        objects += gather_for_metrics([str(i) for i in batch.tolist()], loader)
                        both = gather_for_metrics((batch, [str(i) for i in batch.tolist()]), loader)
                        mixed += list(zip(both[0].tolist(), both[1], strict=True))
                        scalars += gather_for_metrics(batch.float().mean(), loader).reshape(-1).tolist()
                    expected = list(range(length))
                    in_order = settings.get("strategy") is None
                    got = tensors if in_order else sorted(tensors)
                    again = objects if in_order else sorted(objects, key=int)
                    if got != expected or again != [str(i) for i in expected]:
                        bad.append((length, size, settings, tensors, objects))
                    if pairs != [i for i in tensors for _ in range(3)] or mixed != [(i, str(i)) for i in tensors]:
                        bad.append((length, size, settings, pairs, mixed))
                    if any(np.isnan(scalars)):
                        bad.append((length, size, settings, scalars))
        return bad

    assert workers(world).run(run) == [[]] * world


def test_metrics_that_cannot_be_told_apart_are_an_error_on_all_ranks(ranks):
    def run():
        loader = prepare(DataLoader(range(7), batch_size=3), even_batches="repeat")
        for _ in loader:
            gather_for_metrics(torch.zeros(5 if loader.batch.is_last else 3), loader)

    # 7 = 6 + 1: rank 0 has one new sample of three, and five rows.
    with pytest.raises(RemoteError, match="5 rows for a batch of 3 samples of which 2 are repeated") as caught:
        ranks.run(run)
    assert "given up on every rank" in caught.value.failures[1]


class Shards(IterableDataset):
    """Shards of given sizes, as streaming data sets have them."""

    def __init__(self, sizes, fail_in=None):
        self.sizes = list(sizes)
        self.fail_in = fail_in
        self.num_shards = len(self.sizes)
        self.first = [sum(self.sizes[:i]) for i in range(len(self.sizes))]

    def shard(self, num_shards, index):
        new = Shards(self.sizes[index::num_shards], self.fail_in)
        new.first = self.first[index::num_shards]
        return new

    def __iter__(self):
        for first, size in zip(self.first, self.sizes, strict=True):
            for i in range(first, first + size):
                if i == self.fail_in:
                    raise ValueError("broken shard")
                yield i


@pytest.mark.parametrize("sizes", [(5, 4), (9, 1), (3, 3, 8)])
def test_sharded_streams_end_together(ranks, sizes):
    def run(even):
        loader = prepare(DataLoader(Shards(sizes), batch_size=2), dispatch_batches=False, even_batches=even)
        gathered, seen = [], []
        for batch in loader:
            seen.append((batch.tolist(), loader.batch.rows, loader.batch.rank_rows, loader.batch.is_last))
            if even:
                gathered += gather_for_metrics(batch, loader).tolist()
        return seen, gathered, loader.state_per_rank

    total = sum(sizes)
    for even in (True, "repeat"):
        (a, gathered, per_rank), (b, _, _) = ranks.run(run, even)
        assert len(a) == len(b) and sorted(gathered) == list(range(total)) and per_rank
        assert [x[3] for x in a] == [x[3] for x in b] == [False] * (len(a) - 1) + [True]
        assert [x[2] for x in a] == [x[2] for x in b]
    (a, _, _), (b, _, _) = ranks.run(run, False)
    assert sorted(i for x in a + b for i in x[0]) == list(range(total)) and a[0][2] is None


def test_sharded_streams_fail_together(ranks):
    def run(sizes, fail_in):
        loader = prepare(DataLoader(Shards(sizes, fail_in), batch_size=2), dispatch_batches=False)
        seen = []
        try:
            for batch in loader:
                seen += batch.tolist()
        except Exception as error:
            return seen, f"{type(error).__name__}: {error}"

    (a, why_a), (b, why_b) = ranks.run(run, (6, 6), 8)
    assert (a, b) == ([0, 1], [6, 7]) and why_b == "ValueError: broken shard" and "failed on rank 1" in why_a
    (_, why_a), (_, why_b) = ranks.run(run, (4, 0), None)
    assert "shard of rank 1 is empty" in why_a and why_a == why_b


def test_a_sampler_that_fails_fails_everywhere(ranks):
    class Fails(Private):
        def __iter__(self):
            raise KeyError("no order today")

    def run():
        list(prepare(DataLoader(range(5), sampler=Fails(5))))

    with pytest.raises(RemoteError, match="The sampler Fails failed on rank 0: KeyError") as caught:
        ranks.run(run)
    assert set(caught.value.failures) == {0, 1}


def test_generators_are_synchronised_at_the_start_of_an_epoch(ranks):
    def run():
        torch.manual_seed(dist.get_rank()), random.seed(dist.get_rank())
        own = torch.Generator().manual_seed(dist.get_rank())
        loader = prepare_data_loader(
            DataLoader(range(4), generator=own),
            num_processes=2,
            process_index=dist.get_rank(),
            rng_types=["torch", "generator"],
        )
        list(loader)
        return torch.rand(1).item(), torch.rand(1, generator=own).item(), random.random()

    a, b = ranks.run(run)
    assert a[:2] == b[:2] and a[2] != b[2]


def test_a_length_that_follows_from_a_drawn_order_is_known_in_its_epoch(ranks):
    def run():
        loader = prepare(
            DataLoader(range(15), batch_sampler=Growing()), split_batches=True, even_batches=False, data_seed=1
        )
        with pytest.raises(TypeError, match="once its epoch has begun"):
            len(loader)
        lengths = [len(loader) for _ in loader]
        return len(lengths), set(lengths)

    # Batches of 1, 2, 3, 4 and 5 rows: rank 1 has no part of the first.
    assert ranks.run(run) == [(5, {5}), (4, {4})]


def test_a_length_by_a_function_of_the_samples_themselves():
    config = DataLoaderConfiguration(
        data_seed=3, strategy=lambda indices, rank, world: [i for i in indices if i % world == rank]
    )
    sampler = RandomSampler(range(9), replacement=True, num_samples=30)
    for rank in range(2):
        loader = prepare_data_loader(
            DataLoader(range(9), sampler=sampler, batch_size=2), num_processes=2, process_index=rank, config=config
        )
        for _ in range(3):
            assert len(loader) == len(list(loader))


def test_streams_that_all_read_survive_iterators_that_lie_about(ranks):
    def run(even):
        loader = prepare(DataLoader(Shards((13,)), batch_size=2), dispatch_batches=False, even_batches=even)
        lying_about = iter(loader)
        first = next(lying_about).tolist()
        seen = []
        for batch in loader:
            seen += batch.tolist()[: loader.batch.round.new[dist.get_rank()]]
            lying_about = None  # closed in the middle of the newer loop
        return first, seen

    for even in (True, False, "repeat"):
        (first, a), (second, b) = ranks.run(run, even)
        assert (first, second) == ([0, 1], [2, 3]) and sorted(a + b) == list(range(13))


def test_evaluation_of_uneven_streams_goes_on_alone(ranks):
    def run():
        loader = prepare(DataLoader(Shards((9, 2)), batch_size=2), dispatch_batches=False, even_batches=False)
        return [(batch.tolist(), loader.batch.absent) for batch in loader]

    a, b = ranks.run(run)
    assert a == [([0, 1], ()), ([2, 3], (1,)), ([4, 5], (1,)), ([6, 7], (1,)), ([8], (1,))] and b == [([9, 10], ())]


def test_ranks_that_leave_a_stream_apart_are_told(ranks):
    def run():
        loader = prepare(DataLoader(Shards((40,)), batch_size=2), dispatch_batches=False)
        try:
            for _ in range(2):
                for _ in loader:
                    if loader.batch.index == 2 + dist.get_rank():
                        break
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    for text in ranks.run(run):
        assert "leave a loop together" in text
