"""Records of trainings and what is told from them, in one process."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from drivetrain.data import DataLoaderConfiguration, prepare_data_loader
from drivetrain.data.stack import LoaderStack
from drivetrain.errors import DrivetrainError, UnsupportedError
from drivetrain.interfaces import Shards
from drivetrain.parity.merging import Rows, merge_parts, merge_rows
from drivetrain.parity.modules import quieten
from drivetrain.parity.record import RecordWriter, read_record
from drivetrain.parity.results import Tolerance
from drivetrain.parity.sketch import named_tensors, sketch, sketch_rows

# -- sketches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(7,), (300, 40), (3, 5, 7)])
@pytest.mark.parametrize("scale", [1e-6, 1e-2, 1.0])
def test_the_distance_of_two_tensors_is_told_from_their_sketches(size, scale):
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(size, generator=generator, dtype=torch.float64)
    b = a + scale * torch.randn(size, generator=generator, dtype=torch.float64)
    told = merge_parts([sketch(a)]).away(merge_parts([sketch(b)]))
    true = ((a - b).norm() / max(a.norm(), b.norm())).item()
    assert true / 2 < told < true * 2


def test_one_element_is_seen_in_a_large_tensor():
    a = torch.ones(3_000_000)
    b = a.clone()
    b[2_500_000] = 100.0
    told = merge_parts([sketch(a)]).away(merge_parts([sketch(b)]))
    assert told == pytest.approx(99.0 / b.double().norm().item())


def test_parts_add_up_to_the_whole():
    whole = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    flat = whole.reshape(-1)
    parts = [
        sketch(Shards.of_range(flat[start:stop], start=start, shape=(6, 5)), decades=True)
        for start, stop in ((0, 7), (7, 8), (8, 30), (30, 30))
    ]
    merged, plain = merge_parts(parts), merge_parts([sketch(whole, decades=True)])
    assert merged.sums == pytest.approx(plain.sums)
    assert merged.square == pytest.approx(whole.square().sum().item())
    assert merged.decades == plain.decades and merged.elements == 30


def test_what_several_ranks_hold_of_one_part_must_agree():
    ones = torch.ones(4)
    assert merge_parts([sketch(ones), sketch(ones)]).spread == 0.0
    assert merge_parts([sketch(ones), sketch(2 * ones)]).spread == pytest.approx(0.5)
    missing = merge_parts([sketch(ones), None])
    assert missing.norms == (2.0, None)
    assert merge_parts([None, None]) is None


def test_values_that_are_not_finite():
    nan = sketch(torch.tensor([1.0, math.nan]))
    assert merge_parts([nan]).away(merge_parts([nan])) == 0.0
    assert merge_parts([nan]).away(merge_parts([sketch(torch.ones(2))])) == math.inf


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        ((4, 3), [3]),
        ((5, 4, 2), [5, 2]),
        ((8, 3), [2, 3]),
        ((4,), []),
        ((4, 4), [4]),
        ((4, 4, 2), None),
        ((3, 2), None),
    ],
)
def test_rows_of_a_batch_are_found_in_any_place(size, shape):
    found = sketch_rows(torch.ones(size), 4)
    assert (None if found is None else found["shape"]) == shape


def test_rows_of_ranks_one_after_the_other_are_those_of_the_batch():
    batch = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    whole = merge_rows([{"counted": 6}], [sketch_rows(batch, 6)])
    events = [{"counted": 3}, {"counted": 3}]
    repeated = torch.cat([batch[3:], batch[:1]])  # a row that has no weight
    ranks = merge_rows(events, [sketch_rows(batch[:3], 3), sketch_rows(repeated, 4)])
    assert whole.distance(ranks) == pytest.approx(0.0, abs=1e-12)
    assert whole.distance(ranks.in_order([1, 0, 2, 3, 4, 5])) > 0.1
    assert whole.distance(Rows(whole.squares[:5], whole.sums[:5])) == math.inf
    assert merge_rows(events, [sketch_rows(batch[:3], 3), sketch_rows(torch.ones(3, 9), 3)]) is None  # padded otherwise


def test_rounding_of_a_gradient_that_cancels_is_allowed_for_and_no_more():
    gradient = torch.cat([torch.ones(100), torch.full((100,), 1e-9), torch.zeros(800)])
    whole = merge_parts([sketch(gradient, decades=True)])
    assert whole.normalized_rounding(1e-4) == pytest.approx(2.0 * 10.0, rel=1e-3)  # either sign for 100 elements
    whole = merge_parts([sketch(torch.ones(100), decades=True)])
    assert whole.normalized_rounding(1e-4) == pytest.approx(1e-4 * 10)


def test_tensors_of_what_models_take_and_give():
    data = {"a": torch.ones(1), "b": [torch.ones(1), {"c": (torch.ones(1), "text")}], "d": None}
    assert [name for name, _ in named_tensors(data)] == ["a", "b.0", "b.1.c.0"]


def test_tolerance_follows_the_narrowest_dtype():
    assert Tolerance.of("float32", "bfloat16").base == Tolerance.of("bfloat16").base > Tolerance.of("float16").base
    assert Tolerance.of("float8_e4m3fn").base > Tolerance.of("bfloat16").base
    assert Tolerance.of("int64").base == Tolerance.of().base == Tolerance.of("float32").base


# -- records -------------------------------------------------------------------------------------------------------------


def test_a_record_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path):
    writer = RecordWriter(tmp_path, 0)
    writer.write("start", world=1)
    writer.write("loss", step=0, loss=math.nan)
    file = tmp_path / "rank-0.jsonl"
    file.write_text(file.read_text() + '{"event": "st')
    (record,) = read_record(tmp_path)
    assert [e["event"] for e in record.events] == ["start", "loss"]
    assert math.isnan(record.first("loss")["loss"])
    file.write_text("broken\n" + file.read_text())
    with pytest.raises(DrivetrainError, match="rank-0.jsonl:1 isn't a line"):
        read_record(tmp_path)
    with pytest.raises(DrivetrainError, match="no record"):
        read_record(tmp_path / "nowhere")


def test_dropout_of_every_kind_is_switched_off():
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2)
    lstm = torch.nn.LSTM(2, 2, 2, dropout=0.3)
    model = torch.nn.ModuleDict({"layer": layer, "lstm": lstm, "linear": torch.nn.Linear(1, 1)})
    assert quieten(model) == ["layer.dropout", "layer.dropout1", "layer.dropout2", "layer.self_attn", "lstm"]
    assert layer.self_attn.dropout == lstm.dropout == layer.dropout.p == 0.0
    assert quieten(model) == []


# -- one process that reads what several do ------------------------------------------------------------------------------


def batches_of(make, config, world):
    """What each of some ranks reads in an epoch, and the layout."""
    loaders = [prepare_data_loader(make(), num_processes=world, process_index=r, config=config) for r in range(world)]
    layout = loaders[0]._drivetrain.context.current_layout().to_dict()
    steps = [[(loader.samples_of(loader.batch)[: loader.batch.rows]) for _ in loader] for loader in loaders]
    longest = max(map(len, steps))
    return [[row for mine in steps if step < len(mine) for row in mine[step]] for step in range(longest)], layout


def plain():
    return DataLoader(range(23), batch_size=3)


def shuffled():
    return DataLoader(range(23), batch_size=3, shuffle=True)


def dropping():
    return DataLoader(range(23), batch_size=3, drop_last=True)


def own_batches():
    return DataLoader(range(23), batch_sampler=BatchSampler(SequentialSampler(range(23)), 4, drop_last=False))


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (plain, {}),
        (shuffled, {}),
        (dropping, {}),
        (plain, {"strategy": "contiguous"}),
        (plain, {"strategy": "random"}),
        (plain, {"even_batches": "repeat"}),
        (plain, {"even_batches": False}),
        (plain, {"split_batches": True}),
        (own_batches, {}),
        (own_batches, {"strategy": "contiguous"}),
        (own_batches, {"split_batches": True}),
    ],
)
@pytest.mark.parametrize("world", [2, 3])
def test_one_process_gets_the_rows_of_all(make, settings, world):
    config = DataLoaderConfiguration(data_seed=5, **settings)
    wanted, layout = batches_of(make, config, world)
    stack = LoaderStack()
    stack.joined = [layout]
    loader = prepare_data_loader(make(), config=config, stack=stack)
    found = [loader.samples_of(loader.batch)[: loader.batch.rows] for _ in loader]
    assert [sorted(step) for step in found] == [sorted(step) for step in wanted]
    assert len(loader) == len(wanted)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(23))


@pytest.mark.parametrize("split", [False, True])
def test_one_process_gets_a_streams_rows_of_all(split):
    config = DataLoaderConfiguration(data_seed=5, dispatch_batches=False, split_batches=split)

    def loader(**where):
        return prepare_data_loader(DataLoader(Stream(), batch_size=4), config=config, **where)

    ranks = [loader(num_processes=2, process_index=r) for r in (0, 1)]
    wanted = [a.tolist() + b.tolist()[: ranks[1].batch.rows] for a, b in zip(*ranks, strict=True)]
    stack = LoaderStack()
    stack.joined = [ranks[0]._drivetrain.context.current_layout().to_dict()]
    assert [batch.tolist() for batch in loader(stack=stack)] == wanted


def test_batches_that_the_data_set_makes_are_refused():
    stack = LoaderStack()
    stack.joined = [{}]
    with pytest.raises(UnsupportedError, match="batch_size=None"):
        prepare_data_loader(DataLoader(range(4), batch_size=None), stack=stack)
