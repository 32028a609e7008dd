"""Values that collectives return, on 2 and 3 live gloo ranks, against what is computed by hand."""

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_padded_sequence

from drivetrain.errors import ConfigurationError, DistributedOperationError
from drivetrain.parallel import (
    broadcast,
    copy_tensor_to_devices,
    gather,
    gather_tensor_shape,
    pad_across_processes,
    reduce,
)

DTYPES = [
    "float32",
    "float64",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "int8",
    "uint8",
    "int16",
    "int32",
    "int64",
    "uint16",
    "bool",
    "complex64",
    "complex128",
]
Point = namedtuple("Point", "x label")


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor
    label: str
    size: int = dataclasses.field(init=False, default=7)


def values(rank, rows, dtype, columns=3):
    """What a rank has: its own values in [0, 6)."""
    return ((torch.arange(rows * columns).view(rows, columns) + rank) % 6).to(getattr(torch, dtype))


def same(a, b):
    if a.dtype.itemsize == 1 and a.dtype.is_floating_point:
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.float(), b.float())
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


# -- gather ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("big", [1, 500])
def test_gather_every_dtype(workers, world, big):
    def run():
        for dtype in DTYPES:
            got = gather(values(dist.get_rank(), 2 * big, dtype))
            assert same(got, torch.cat([values(r, 2 * big, dtype) for r in range(world)])), dtype

    workers(world).run(run)


@given(data=st.data(), world=st.sampled_from([2, 3]))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_gather_is_the_concatenation_of_what_each_rank_had(workers, data, world):
    columns = data.draw(st.lists(st.sampled_from([0, 1, 3, 130]), min_size=1, max_size=4))
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=len(columns), max_size=len(columns)))
    rows = data.draw(
        st.lists(
            st.lists(st.integers(0, 4), min_size=len(columns), max_size=len(columns)), min_size=world, max_size=world
        )
    )

    def run():
        rank = dist.get_rank()
        mine = [values(rank, n, d, c) for n, d, c in zip(rows[rank], dtypes, columns, strict=True)]
        gathered, padded, both = (
            gather(mine),
            pad_across_processes(mine, pad_index=1),
            gather(pad_across_processes(mine)),
        )
        for i, (dtype, c) in enumerate(zip(dtypes, columns, strict=True)):
            assert same(gathered[i], torch.cat([values(r, rows[r][i], dtype, c) for r in range(world)]))
            largest = max(rows[r][i] for r in range(world))
            filler = torch.ones(largest - len(mine[i]), c).to(mine[i].dtype)
            assert same(padded[i], torch.cat([mine[i], filler]))
            assert both[i].shape == (world * largest, c)

    workers(world).run(run)


def test_gather_keeps_the_structure_and_what_is_no_tensor(workers):
    def run():
        r = dist.get_rank()
        x = torch.full((r + 1, 2), float(r))
        return gather(
            defaultdict(
                list,
                ordered=OrderedDict(b=x, a=f"rank {r}"),
                point=Point(x, None),
                record=Record(x, "l"),
                sequence=[x, (x, 3)],
                scalar=torch.tensor(r),
            )
        )

    expected = torch.tensor([[0.0, 0], [1, 1], [1, 1]])
    for rank, got in enumerate(workers(2).run(run)):
        assert type(got) is defaultdict
        assert got.default_factory is list
        assert type(got["ordered"]) is OrderedDict
        assert got["ordered"]["a"] == f"rank {rank}"
        assert (type(got["point"]).__name__, got["point"].label) == ("Point", None)
        assert (got["record"].label, got["record"].size) == ("l", 7)
        assert got["sequence"][1][1] == 3
        assert got["scalar"].tolist() == [0, 1], "a 0-d tensor is one row"
        for tensor in (got["ordered"]["b"], got["point"].x, got["record"].x, got["sequence"][0]):
            assert torch.equal(tensor, expected)
        assert got["point"].x is got["sequence"][0], "one tensor in two places stays one"


def test_gather_does_not_depend_on_the_order_of_keys(workers):
    def run():
        r = dist.get_rank()
        return gather(
            {"a": torch.tensor([r]), "b": torch.tensor([10 + r])}
            if r
            else {"b": torch.tensor([10]), "a": torch.tensor([0])}
        )

    for got in workers(2).run(run):
        assert (got["a"].tolist(), got["b"].tolist()) == ([0, 1], [10, 11])


def test_gather_views_and_tensors_with_gradients(workers):
    def run():
        r = dist.get_rank()
        base = torch.arange(12.0).view(3, 4) + r
        leaf = torch.nn.Parameter(base.clone())
        result = gather(
            {
                "transposed": base.t(),
                "strided": base[:, ::2],
                "one of a column": base[:1, 1],
                "expanded": torch.tensor([float(r)]).expand(4),
                "conjugate": torch.complex(base, base).conj(),
                "negative": torch.complex(base, base).conj().imag,
                "parameter": leaf,
                "computed": leaf * 2,
            }
        )
        return {k: (v.detach(), v.requires_grad, type(v) is torch.Tensor) for k, v in result.items()}

    a = torch.arange(12.0).view(3, 4)
    expected = {
        "transposed": torch.cat([a.t(), a.t() + 1]),
        "strided": torch.cat([a[:, ::2], a[:, ::2] + 1]),
        "one of a column": torch.tensor([1.0, 2.0]),
        "expanded": torch.tensor([0.0] * 4 + [1.0] * 4),
        "conjugate": torch.cat([torch.complex(b, -b) for b in (a, a + 1)]),
        "negative": torch.cat([-a, -a - 1]),
        "parameter": torch.cat([a, a + 1]),
        "computed": torch.cat([2 * a, 2 * a + 2]),
    }
    for got in workers(2).run(run):
        for name, (value, requires_grad, plain) in got.items():
            assert torch.equal(value, expected[name]), name
            assert not requires_grad
            assert plain


def test_gather_more_tensors_than_a_frame_has_places_for(workers):
    def run():
        r = dist.get_rank()
        return gather([torch.full((i % 3 + r,), float(i)) for i in range(60)])

    for got in workers(2).run(run):
        assert [t.tolist() for t in got] == [[float(i)] * (2 * (i % 3) + 1) for i in range(60)]


def test_gather_large_tensors_uneven_and_even(workers):
    def run():
        r = dist.get_rank()
        small, large = torch.full((3 + r, 5), float(r)), torch.full((1_500_000 + 7 * r,), float(r))
        got = gather([small, large, large[:1_500_000]])
        return [(t.shape, t.sum().item()) for t in got]

    for got in workers(2).run(run):
        assert got == [((7, 5), 20.0), ((3_000_007,), 1_500_007.0), ((3_000_000,), 1_500_000.0)]


def test_gather_nothing(workers):
    def run():
        empty = torch.empty(0, 3)
        return gather([]), gather({"a": "text"}), gather([empty, empty.long()]), gather(torch.empty(2, 0))

    for nothing, text, empties, columns in workers(2).run(run):
        assert (nothing, text) == ([], {"a": "text"})
        assert [(t.shape, t.dtype) for t in empties] == [((0, 3), torch.float32), ((0, 3), torch.int64)]
        assert columns.shape == (4, 0)


def test_gather_within_a_group(workers):
    def run():
        r = dist.get_rank()
        group = dist.new_group([0, 2])
        try:
            if r == 1:
                with pytest.raises(DistributedOperationError, match="isn't in"):
                    gather(torch.tensor([r]), group=group)
                return None
            mine = torch.tensor([float(r)])
            return gather(mine, group=group), reduce(mine, "sum", group=group), broadcast(mine, 1, group=group)
        finally:
            if r != 1:
                dist.destroy_process_group(group)

    first, none, last = workers(3).run(run)
    assert none is None
    for got in (first, last):
        assert [t.tolist() for t in got] == [[0, 2], [2], [2]]


# -- reduce ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("big", [1, 500])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_sums_and_means_of_every_dtype(workers, world, big, reduction):
    def run():
        mine = {dtype: values(dist.get_rank() if dist.is_initialized() else 0, big, dtype) for dtype in DTYPES}
        got = reduce(mine, reduction)
        assert all(got[d].data_ptr() != mine[d].data_ptr() for d in DTYPES), "a result is never the input's memory"
        for name in DTYPES:
            dtype = getattr(torch, name)
            parts = torch.stack([values(r, big, name).to(torch.complex128) for r in range(world)])
            exact = parts.sum(0) / (world if reduction == "mean" else 1)
            if dtype.is_floating_point or dtype.is_complex:
                wanted = dtype
            elif reduction == "mean":
                wanted = torch.float32
            else:
                wanted = torch.int64 if dtype == torch.bool else dtype
            exact = exact if wanted.is_complex else exact.real
            assert same(got[name], exact.to(wanted)), name

    workers(world).run(run)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("big", [1, 500])
def test_maxima_and_minima(workers, world, big):
    names = [d for d in DTYPES if not d.startswith("complex")]

    def run():
        mine = [values(dist.get_rank() if dist.is_initialized() else 0, big, d) for d in names]
        high, low = reduce(mine, "max"), reduce(mine, "min")
        for i, name in enumerate(names):
            parts = torch.stack([values(r, big, name).double() for r in range(world)])
            assert same(high[i], parts.amax(0).to(getattr(torch, name))), name
            assert same(low[i], parts.amin(0).to(getattr(torch, name))), name

    workers(world).run(run)


@pytest.mark.parametrize("size", [1, 1000])
def test_reduce_is_exact_where_half_precision_would_overflow_or_round(workers, size):
    def run():
        r = dist.get_rank()
        huge = torch.full((size,), 60000.0, dtype=torch.float16)
        tiny = torch.full((size,), 256.0 if r == 0 else 0.75, dtype=torch.bfloat16)
        nan = torch.full((size,), float("nan") if r == 1 else 5.0)
        return (
            reduce(huge),
            reduce(tiny, "sum"),
            reduce(nan, "max"),
            reduce(nan, "min"),
            reduce(torch.full((size,), 100, dtype=torch.int8)),
        )

    for mean, total, high, low, integers in workers(3).run(run):
        assert mean.eq(60000).all()
        assert total.eq(258).all(), "256 + 0.75 + 0.75 = 257.5, rounded once to 258"
        assert high.isnan().all()
        assert low.isnan().all()
        assert integers.eq(100).all()


@pytest.mark.parametrize("world", [1, 2])
def test_scale_is_applied_everywhere_and_results_carry_no_gradient(workers, world):
    def run():
        r = dist.get_rank() if dist.is_initialized() else 0
        leaf = torch.tensor([2.0 * r, 4.0], requires_grad=True)
        mean = reduce({"x": leaf, "id": r}, "mean", scale=0.5)
        return mean["x"], mean["id"], reduce(torch.tensor([3]), "sum", 0.5), reduce(torch.tensor([3]), "none")

    for rank, (mean, own, total, none) in enumerate(workers(world).run(run)):
        assert mean.tolist() == [[0.0, 2.0], [0.5, 2.0]][world - 1]
        assert not mean.requires_grad
        assert own == rank
        assert total.tolist() == [1.5 * world]
        assert none.tolist() == [3]


def test_reduce_refuses_what_it_does_not_know(workers):
    with pytest.raises(ConfigurationError, match="reduction='average'"):
        reduce(torch.ones(1), "average")

    def run():
        with pytest.raises(TypeError, match="Complex numbers have no max"):
            reduce(torch.ones(1, dtype=torch.complex64), "max")
        return reduce(torch.ones(1), "sum").item()

    assert workers(2).run(run) == [2.0, 2.0], "ranks are still in step afterwards"


# -- broadcast -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("big", [1, 500])
@pytest.mark.parametrize("source", [0, 1, 2])
def test_broadcast_every_dtype(workers, source, big):
    def run():
        mine = {"t": [values(dist.get_rank(), big, d) for d in DTYPES], "own": dist.get_rank()}
        got = broadcast(mine, source)
        assert got is mine, "tensors are overwritten in place"
        assert got["own"] == dist.get_rank()
        for name, tensor in zip(DTYPES, got["t"], strict=True):
            assert same(tensor, values(source, big, name)), name

    workers(3).run(run)


def test_broadcast_into_tensors_of_any_kind(workers):
    def run():
        r = dist.get_rank()
        leaf = torch.nn.Parameter(torch.full((2, 2), float(r)))
        base = torch.full((2, 3), float(r))
        with torch.inference_mode():
            inference = torch.full((2,), float(r))
        got = broadcast(
            [
                leaf,
                base.t(),
                torch.tensor([float(r)]).expand(4),
                inference,
                torch.empty(0),
                torch.full((1_200_000,), float(r)),
            ],
            1,
        )
        assert got[0] is leaf
        assert base.eq(1).all(), "a view is written through"
        return [t.detach().unique().tolist() for t in got]

    for got in workers(2).run(run):
        assert got == [[1], [1], [1], [1], [], [1]]


@pytest.mark.parametrize("source", [-1, 2])
def test_broadcast_from_a_rank_that_does_not_exist(workers, source):
    def run():
        with pytest.raises(ConfigurationError, match=f"from_process={source} is no rank"):
            broadcast(torch.ones(1), source)

    workers(2).run(run)


# -- shapes ----------------------------------------------------------------------------------------------------------------


def test_pad_along_any_dimension_first_or_last(workers):
    def run():
        r = dist.get_rank()
        x = torch.full((2, r + 1), 1.0)
        return (
            pad_across_processes(x, dim=1),
            pad_across_processes(x, dim=-1, pad_index=9, pad_first=True),
            pad_across_processes({"x": x, "short": torch.ones(1), "id": "a"}, dim=1),
            pad_across_processes(torch.ones(r + 1, 3 - r), dim=0),
        )

    zero, one = workers(2).run(run)
    assert zero[0].tolist() == [[1, 0], [1, 0]]
    assert zero[1].tolist() == [[9, 1], [9, 1]]
    assert zero[2]["short"].tolist() == [1]
    assert zero[2]["id"] == "a"
    assert zero[3].tolist() == [[1, 1, 1], [0, 0, 0]], "other dimensions may differ"
    assert one[0].tolist() == one[1].tolist() == [[1, 1], [1, 1]]


def test_padding_lets_gradients_through(workers):
    def run():
        x = torch.ones(dist.get_rank() + 1, requires_grad=True)
        (pad_across_processes(x) * 3).sum().backward()
        return x.grad

    assert [g.tolist() for g in workers(2).run(run)] == [[3], [3, 3]]


@pytest.mark.parametrize("shape", [(), (0, 2), (2, 3), (300, 5)])
def test_copy_of_a_tensor_that_one_rank_has(workers, shape):
    def run():
        mine = torch.full(shape, 7, dtype=torch.int16) if dist.get_rank() == 1 else None
        return gather_tensor_shape(mine), copy_tensor_to_devices(mine)

    for got, tensor in workers(3).run(run):
        assert got == shape
        assert same(tensor, torch.full(shape, 7, dtype=torch.int16))


def test_copy_without_an_owner_or_with_two(workers):
    def run():
        with pytest.raises(DistributedOperationError, match="no rank has a tensor"):
            copy_tensor_to_devices(None)
        with pytest.raises(DistributedOperationError, match="ranks 0, 1 have a tensor"):
            gather_tensor_shape(torch.ones(1))

    workers(2).run(run)
    with pytest.raises(DistributedOperationError, match="no rank has a tensor"):
        copy_tensor_to_devices(None)


# -- a world of one --------------------------------------------------------------------------------------------------------


def test_one_process_changes_nothing():
    data = {
        "x": torch.ones(2, requires_grad=True),
        "id": "a",
        "packed": pack_padded_sequence(torch.ones(1, 1), torch.tensor([1])),
    }
    assert gather(data) is data
    assert broadcast(data) is data
    assert pad_across_processes(data) is data
    assert gather("text") == "text"
    assert copy_tensor_to_devices(data["x"]) is data["x"]
    with pytest.raises(ConfigurationError, match="from_process=1 is no rank"):
        broadcast(data, 1)
