"""Any loader with any settings: each sample once, lengths as promised, the same order again by (seed, epoch).

Ranks are simulated in this process where index arithmetic is all there is to it, also with real workers; a sample of cases runs on live ranks.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from drivetrain.data import DataLoaderConfiguration, LoaderStack, gather_for_metrics, prepare_data_loader


class Stream(IterableDataset):
    """Numbers, divided over workers."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.length, step))


class SizedStream(Stream):
    def __len__(self):
        return self.length


class Growing:
    """A batch sampler: batches of 1, 2, 3, ... rows."""

    def __init__(self, length):
        self.length = length

    def batches(self):
        start, size = 0, 1
        while start < self.length:
            yield list(range(start, min(start + size, self.length)))
            start, size = start + size, size + 1

    def __len__(self):
        return len(list(self.batches()))

    def __iter__(self):
        return self.batches()


class Jumbled:
    """A sampler that draws from Python's generator."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(random.sample(range(self.length), self.length))


def every_third(indices, rank, world_size):
    """A user's strategy: neither whole batches nor equal parts."""
    return [row for place, row in enumerate(indices) if place // 3 % world_size == rank]


@dataclass(frozen=True)
class Case:
    """A loader and its settings."""

    kind: str
    length: int
    size: int
    drop_last: bool
    workers: int
    settings: dict[str, Any]

    def loader(self):
        worker_settings = {"num_workers": self.workers, "multiprocessing_context": "fork"} if self.workers else {}
        if self.kind == "batches":
            return DataLoader(range(self.length), batch_sampler=Growing(self.length), **worker_settings)
        dataset = {"stream": Stream, "sized stream": SizedStream}.get(self.kind, range)(self.length)
        if self.kind == "items":
            return DataLoader(range(self.length), batch_size=None, **worker_settings)
        order = {"shuffled": {"shuffle": True}, "sampler": {"sampler": Jumbled(self.length)}}.get(self.kind, {})
        return DataLoader(dataset, batch_size=self.size, drop_last=self.drop_last, **order, **worker_settings)

    def kept(self, world):
        """How many samples an epoch has."""
        if not self.drop_last or self.kind in ("batches", "items"):
            return self.length
        whole = self.size if self.settings["split_batches"] else self.size * world
        return self.length // whole * whole

    def promises_length(self, world):
        """Whether ranks know how many batches they get before the epoch begins."""
        if self.kind == "stream" or (self.kind == "sized stream" and self.workers > 1):
            return False
        if world == 1 or self.kind not in ("batches", "sampler"):
            return True
        empty_parts = self.kind == "batches" and self.settings["split_batches"] and not self.settings["even_batches"]
        return not (empty_parts or self.settings["strategy"] is every_third)


@st.composite
def cases(draw, *, world, kinds, workers=(0,), dispatch=(False,)):
    kind = draw(st.sampled_from(kinds))
    batched = kind not in ("items",)
    size = draw(st.integers(1, 6))
    split = batched and draw(st.booleans()) and (size >= world or kind == "batches")
    in_order = "stream" in kind
    custom = [every_third] if not (split or in_order) and kind != "items" else []
    named = (
        ["auto"]
        if in_order
        else ["auto", "random"]
        if split and kind == "batches"
        else ["auto", "random", "contiguous"]
    )
    strategy = draw(st.sampled_from([*named, *custom]))
    plain = strategy is not every_third  # how much a function's strategy drops depends on its parts
    return Case(
        kind=kind,
        length=draw(st.integers(int(kind == "shuffled"), 45)),  # torch refuses to shuffle nothing
        size=size,
        drop_last=plain and kind not in ("batches", "items") and draw(st.booleans()),
        workers=draw(st.sampled_from(workers)),
        settings={
            "data_seed": draw(st.integers(0, 5)),
            "strategy": strategy,
            "split_batches": split,
            "even_batches": draw(st.sampled_from([True, False, "repeat"])),
            "dispatch_batches": draw(st.sampled_from(dispatch)),
            "prefetch": draw(st.integers(0, 1)),
        },
    )


def length(loader):
    try:
        return len(loader)
    except TypeError:
        return None


def epochs_of(loader, rank, count=2):
    """Per epoch: each batch's rows, those of them that are new, and the length that was promised."""
    result = []
    for _ in range(count):
        promised = length(loader)
        rows, new = [], []
        for batch in loader:
            promised = length(loader) if promised is None else promised
            got = batch.tolist() if hasattr(batch, "tolist") else batch
            got = got if isinstance(got, list) else [got]
            assert len(got) == loader.batch.round.received[rank]
            rows.append(got)
            new.append(got[: loader.batch.round.new[rank]])
        result.append((rows, new, promised))
    return result


def check(case, ranks):
    """What must hold for the epochs of all ranks."""
    world = len(ranks)
    for epoch in zip(*ranks, strict=True):
        counted = Counter(row for _, new, _ in epoch for batch in new for row in batch)
        assert not counted or max(counted.values()) == 1
        kept = case.kept(world)
        if "stream" in case.kind and case.drop_last and case.workers > 1:
            assert sum(counted.values()) <= case.length  # each worker drops what doesn't fill a round
        else:
            assert sum(counted.values()) == kept and set(counted) <= set(range(case.length))
        if case.settings["even_batches"]:
            assert len({len(rows) for rows, _, _ in epoch}) == 1
        for rows, _, promised in epoch:
            if case.promises_length(world):
                assert promised is not None
            if promised is not None and not ("stream" in case.kind and case.workers > 1):
                assert len(rows) == promised


def simulate(case, world):
    """Ranks one after the other."""
    config = DataLoaderConfiguration(**case.settings)
    loaders = [
        prepare_data_loader(case.loader(), num_processes=world, process_index=rank, config=config)
        for rank in range(world)
    ]
    return [epochs_of(loader, rank) for rank, loader in enumerate(loaders)]


ARITHMETIC = ("map", "shuffled", "stream", "sized stream", "items")
worlds = st.integers(1, 4)


def _both(case, world):
    ranks = simulate(case, world)
    check(case, ranks)
    assert simulate(case, world) == ranks  # by (seed, epoch) alone
    if case.kind == "shuffled" and case.length > 20:
        assert ranks[0][0] != ranks[0][1]


@given(worlds.flatmap(lambda world: st.tuples(st.just(world), cases(world=world, kinds=ARITHMETIC))))
@settings(max_examples=150, deadline=None)
def test_each_sample_once_in_a_common_order(drawn):
    world, case = drawn
    _both(case, world)


@pytest.mark.parametrize("examples", [4, pytest.param(60, marks=pytest.mark.full)])
def test_also_with_workers(examples):
    @given(
        st.integers(1, 3).flatmap(
            lambda world: st.tuples(st.just(world), cases(world=world, kinds=ARITHMETIC, workers=(1, 2)))
        )
    )
    @settings(max_examples=examples, deadline=None)
    def run(drawn):
        world, case = drawn
        _both(case, world)
        if case.kind in ("map", "shuffled", "items"):
            assert simulate(case, world) == simulate(replace(case, workers=0), world)

    run()


# -- live ranks ------------------------------------------------------------------------------------------------------------

LIVE = (*ARITHMETIC, "batches", "sampler")


def _run_live(drawn):
    """On a live rank: several cases, each twice with loaders of their own; metrics, too."""
    stack = LoaderStack()
    results = []
    rank, world = dist.get_rank(), dist.get_world_size()
    for case in drawn:
        config = DataLoaderConfiguration(**case.settings)

        def fresh(case=case, config=config):
            return prepare_data_loader(
                case.loader(), num_processes=world, process_index=rank, config=config, stack=stack
            )

        first, second, loader = epochs_of(fresh(), rank), epochs_of(fresh(), rank), fresh()
        gathered = []
        if case.settings["even_batches"] and case.kind != "items":
            for batch in loader:
                gathered += gather_for_metrics(batch, loader).tolist()
        results.append((first, second, gathered))
    return results


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)])
def test_on_live_ranks(workers, world):
    @given(st.lists(cases(world=world, kinds=LIVE, dispatch=(None, True, False)), min_size=12, max_size=12))
    @settings(
        max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.reuse, Phase.generate]
    )
    def run(drawn):
        for case, *ranks in zip(drawn, *workers(world).run(_run_live, drawn), strict=True):
            check(case, [first for first, _, _ in ranks])
            assert [first for first, _, _ in ranks] == [second for _, second, _ in ranks]
            seen = sorted(row for first, _, _ in ranks for batch in first[0][1] for row in batch)
            if case.settings["even_batches"] and case.kind != "items":
                assert all(sorted(gathered) == seen for _, _, gathered in ranks)

    run()
