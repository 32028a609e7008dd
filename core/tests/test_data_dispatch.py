"""Rank 0 reads for all: any structure, any length, no more bytes than needed, and no hang."""

from __future__ import annotations

import random
from difflib import Match

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain.data import DataLoaderConfiguration, LoaderStack, prepare_data_loader
from drivetrain.data.packing import pack, unpack
from drivetrain.errors import DistributedOperationError


def prepare(loader, stack=None, slice_fn=None, **settings):
    settings = {"dispatch_batches": True, **settings}
    return prepare_data_loader(
        loader,
        num_processes=dist.get_world_size(),
        process_index=dist.get_rank(),
        config=DataLoaderConfiguration(**settings),
        stack=stack,
        slice_fn_for_dispatch=slice_fn,
    )


class Stream(IterableDataset):
    def __init__(self, n, fail_at=None):
        self.n, self.fail_at = n, fail_at

    def __iter__(self):
        for i in range(self.n):
            if i == self.fail_at:
                raise ValueError(f"broken sample {i}")
            yield i


class OnlyOnFirst(Dataset):
    """Rank 0 alone has the data; the others have their length."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        assert dist.get_rank() == 0, "only rank 0 may read"
        return i


def _case(generator):
    world = dist.get_world_size()
    size = generator.randrange(1, 6)
    return {
        "length": generator.randrange(0, 40),
        "size": size,
        "kind": generator.choice(["map", "stream"]),
        "drop_last": generator.random() < 0.3,
        "settings": {
            "even_batches": generator.choice([True, False, "repeat"]),
            "split_batches": size >= world and generator.random() < 0.5,
            "prefetch": generator.randrange(2),
        },
    }


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.full)])
def test_dispatched_equals_read_by_each(workers, world):
    """A sample of all settings, drawn with a fixed seed: dispatching must not change what any rank gets."""

    def run(count):
        generator = random.Random(7)
        stack = LoaderStack()
        bad = []
        for _ in range(count):
            case = _case(generator)
            results = []
            for dispatch in (True, False):
                data = OnlyOnFirst(case["length"]) if case["kind"] == "map" else Stream(case["length"])
                data = list(range(case["length"])) if not dispatch and case["kind"] == "map" else data
                loader = DataLoader(data, batch_size=case["size"], drop_last=case["drop_last"])
                prepared = prepare(loader, stack, dispatch_batches=dispatch, **case["settings"])
                results.append(
                    [[(b.tolist(), prepared.batch, prepared.plan_window(2)) for b in prepared] for _ in range(2)]
                )
            if results[0] != results[1]:
                bad.append((case, results))
        return bad

    assert workers(world).run(run, 25) == [[]] * world


def test_any_structure_arrives_as_it_was(ranks):
    def structure(rows):
        return {
            "ragged": [torch.arange(i + 1.0) for i in rows],
            "tuple": Match(torch.tensor(rows, dtype=torch.bfloat16), None, 2),  # a named tuple
            "names": [f"row {i}" for i in rows],
            "scalar": torch.tensor(3, dtype=torch.uint8),
            "empty": torch.empty(0, 4),
            "bool": torch.tensor([True]),
            "complex": torch.tensor([1 + 2j]),
            "strided": torch.arange(6).view(2, 3).t(),
            "sparse": torch.eye(2).to_sparse(),
            "nested": ({"a": [1, "b"]}, {3}),
        }

    def run():
        results = []
        for prefetch in (0, 1):
            loader = prepare(DataLoader(range(5), batch_size=2, collate_fn=structure), prefetch=prefetch)
            for batch in loader:
                assert type(batch["tuple"]) is Match and batch["tuple"].b is None
                assert batch["names"] == [f"row {int(i)}" for i in batch["tuple"].a.tolist()]
                assert [t.numel() for t in batch["ragged"]] == [int(i) + 1 for i in batch["tuple"].a]
                assert batch["empty"].shape == (0, 4) and batch["bool"].tolist() == [True]
                assert batch["scalar"].ndim == 0 and batch["scalar"].dtype is torch.uint8
                assert batch["complex"][0].item() == 1 + 2j and batch["strided"].tolist() == [[0, 3], [1, 4], [2, 5]]
                assert batch["sparse"].to_dense().tolist() == [[1, 0], [0, 1]] and batch["nested"] == (
                    {"a": [1, "b"]},
                    {3},
                )
                batch["bool"].logical_not_()  # tensors are one's own to write to
                results.append(batch["tuple"].a.tolist())
        return results

    a, b = ranks.run(run)
    assert a == [[0, 1], [4]] * 2 and b == [[2, 3], [4]] * 2


def test_packing_keeps_shared_tensors_shared_and_alignment():
    shared = torch.arange(3, dtype=torch.int8)
    value = [shared, torch.tensor(2.5, dtype=torch.float64), shared, torch.arange(5, dtype=torch.int16)]
    back = unpack(pack(value))
    assert back[0] is back[2] and back[1].item() == 2.5 and back[3].tolist() == [0, 1, 2, 3, 4]
    assert pack({}).numel() < 64


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_an_error_of_the_data_set_reaches_every_rank_after_the_batches_before(ranks, prefetch, kind):
    class Breaks(OnlyOnFirst):
        def __getitem__(self, i):
            if i == 9:
                raise ValueError("broken sample 9")
            return i

    def run():
        data = Breaks(20) if kind == "map" else Stream(20, fail_at=9)
        loader = prepare(DataLoader(data, batch_size=2), prefetch=prefetch)
        seen = []
        try:
            for batch in loader:
                seen.append(batch.tolist())
        except Exception as error:
            return seen, type(error).__name__, str(error)

    (a, kind_a, text_a), (b, kind_b, text_b) = ranks.run(run)
    assert (a, b) == ([[0, 1], [4, 5]], [[2, 3], [6, 7]])
    assert kind_a == "ValueError" and kind_b == "DistributedOperationError"
    assert "broken sample 9" in text_a and "Reading data failed on rank 0" in text_b and "broken sample 9" in text_b


def test_an_object_that_cannot_be_sent_is_an_error_on_every_rank(ranks):
    def run():
        try:
            list(prepare(DataLoader(range(8), batch_size=2, collate_fn=lambda rows: lambda: rows)))
        except Exception as error:
            return f"{type(error).__name__} {error}"

    a, b = ranks.run(run)
    assert "pickle" in a.lower() and "pickle" in b.lower() and "DistributedOperationError" in b


@pytest.mark.parametrize("prefetch", [0, 1])
def test_breaking_early_and_starting_again(ranks, prefetch):
    def run():
        stack = LoaderStack()
        loader = prepare(DataLoader(range(12), batch_size=2, shuffle=True), stack, prefetch=prefetch)
        other = prepare(DataLoader(Stream(5), batch_size=1), stack, prefetch=prefetch)
        firsts, whole, inner = [], [], []
        for _ in range(3):
            for batch in loader:
                firsts.append(batch.tolist())
                for row in other:
                    inner.append(row.item())
                    if other.batch.index == 1:
                        break
                break
        whole = [batch.tolist() for batch in loader]
        return firsts, whole, inner, loader.epoch

    a, b = ranks.run(run)
    assert a[3] == b[3] == 4 and a[2] == [0, 2] * 3 and b[2] == [1, 3] * 3
    assert sorted(i for rows in a[1] + b[1] for i in rows) == list(range(12))


def received_bytes(data, size):
    """Bytes that this rank receives in an epoch, those of its own batches, and their number."""
    received = []
    plain = dist.irecv

    def counting(tensor, *args, **kwargs):
        received.append(tensor.numel() * tensor.element_size())
        return plain(tensor, *args, **kwargs)

    dist.irecv = counting
    try:
        batches = list(prepare(DataLoader(data, batch_size=size, collate_fn=torch.cat)))
    finally:
        dist.irecv = plain
    return sum(received), sum(batch.numel() * batch.element_size() for batch in batches), len(batches)


@pytest.mark.parametrize("width", [1, 1100, 20000])
def test_each_rank_receives_its_own_bytes_only(workers, width):
    """Besides them: a skeleton per batch, and at the end, if batches are small, place for one that didn't come."""
    for rank, (received, own, steps) in enumerate(workers(3).run(received_bytes, torch.zeros(48, 1, width), 4)):
        in_vain = own // steps if own // steps < 2**16 else 0
        assert received == 0 if rank == 0 else own < received < own + 600 * (steps + 1) + in_vain


def test_batches_of_changing_size_cost_little_more(ranks):
    rows = [torch.zeros(n % 7 * 2000 + 1) for n in range(64)]  # some batches fit beside their header, some do not
    _, (received, own, steps) = ranks.run(received_bytes, rows, 2)
    assert steps == 16 and own < received < 1.15 * own


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("width", [1, 40000])
def test_every_batch_of_any_size_arrives_after_loops_that_were_left(ranks, width, prefetch):
    rows = [torch.full((n % 5 * width + 1,), float(n)) for n in range(40)]

    def run():
        loader = prepare(DataLoader(rows, batch_size=2, collate_fn=list), prefetch=prefetch)
        sums = []
        for left_at in (0, 3, None, 1, 8, None):
            got = []
            for batch in loader:
                assert all(row.unique().numel() == 1 for row in batch)
                got += [int(row[0]) for row in batch]
                if loader.batch.index == left_at:
                    break
            sums.append(got)
        return sums

    for a, b in zip(*ranks.run(run), strict=True):
        assert sorted(a + b) == list(range(len(a + b))) and len(a + b) in (4, 8, 16, 36, 40)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_iterator_that_is_left_lying_about_does_no_harm(ranks, prefetch):
    def run():
        loader = prepare(DataLoader(range(16), batch_size=2), prefetch=prefetch)
        lying_about = iter(loader)
        first = next(lying_about).tolist()
        whole = [batch.tolist() for batch in loader]
        with pytest.raises(DistributedOperationError, match="Another loop over this loader has begun"):
            next(lying_about)
        again = iter(loader)
        next(again)
        return (
            first,
            whole,
            [batch.tolist() for batch in loader] == whole,
            [batch.tolist() for batch in loader] == whole,
        )

    (first, whole, *same), (second, rest, *also) = ranks.run(run)
    assert (first, second) == ([0, 1], [2, 3]) and all(same + also)
    assert sorted(row for batch in whole + rest for row in batch) == list(range(16))


def test_a_rank_that_goes_on_where_rank_0_left_is_told(ranks):
    def run():
        loader = prepare(DataLoader(range(40), batch_size=2))
        try:
            for _ in loader:
                if loader.batch.index == 2 + dist.get_rank():
                    break
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    assert "All ranks must leave a loop together" in ranks.run(run)[1]


def test_the_users_function_cuts_the_global_batch(ranks):
    def run(kind, **settings):
        calls = []

        def cut(batch, rows, process_index=None, num_processes=None):
            calls.append((process_index, num_processes, rows.start, rows.stop))
            return {"x": batch[rows], "total": batch.sum()}

        data = range(7) if kind == "map" else Stream(7)
        loader = prepare(DataLoader(data, batch_size=2), slice_fn=cut, **settings)
        return [(b["x"].tolist(), b["total"].item(), loader.batch.rows) for b in loader], calls

    for kind in ("map", "stream"):
        (a, calls), (b, none) = ranks.run(run, kind)
        assert a == [([0, 1], 6, 2), ([4, 5], 15, 2)] and b == [([2, 3], 6, 2), ([6], 15, 1)]
        assert calls == [(0, 2, 0, 2), (1, 2, 2, 4), (0, 2, 0, 2), (1, 2, 2, 3)] and none == []
        (a, _), (b, _) = ranks.run(run, kind, even_batches="repeat")
        assert a[1] == ([4, 5], 15, 2) and b[1] == ([6, 0], 15, 2)


def test_one_batch_size_none_item_per_rank(ranks):
    def run():
        return [(b, loader.batch.rows) for loader in [prepare(DataLoader(Stream(3), batch_size=None))] for b in loader]

    a, b = ranks.run(run)
    assert a == [(0, None), (2, None)] and b == [(1, None), (2, 0)]


def test_iterable_data_sets_are_dispatched_by_default(ranks):
    def run():
        loader = prepare_data_loader(
            DataLoader(Stream(5), batch_size=2), num_processes=2, process_index=dist.get_rank()
        )
        return loader._drivetrain.context.channel is not None, [b.tolist() for b in loader]

    assert ranks.run(run) == [(True, [[0, 1], [4]]), (True, [[2, 3], [4]])]
