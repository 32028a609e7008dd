"""Index arithmetic of epochs: coverage, lengths and weights for any length, world size and setting."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.data.plan import Layout, ListPlan, UniformPlan, cut_round, make_plan, remaining_order
from drivetrain.data.shardings import Contiguous, FunctionSharding, GlobalShuffle, Interleaved, even_parts
from drivetrain.errors import ConfigurationError
from drivetrain.interfaces.data_sharding import DataSharding
from drivetrain.specs import DataShardingSpec

SHARDINGS = {"interleaved": Interleaved(), "contiguous": Contiguous(), "random": GlobalShuffle()}


class Reversed(DataSharding):
    """A plugin's strategy: batches dealt from the back."""

    def __init__(self):
        super().__init__(DataShardingSpec(name="reversed"))

    def shard(self, batches, rank, world_size):
        return iter(list(batches)[::-1][rank::world_size])


@st.composite
def uniform_cases(draw):
    world = draw(st.integers(1, 4))
    split = draw(st.booleans())
    batch = draw(st.integers(world if split else 1, 9))
    layout = Layout(
        unit="samples",
        world=world,
        round_rows=batch if split else batch * world,
        even=draw(st.sampled_from(["split", "repeat", "none"])),
        drop_last=draw(st.booleans()),
        split=split,
        strategy=draw(st.sampled_from(sorted(SHARDINGS))),
    )
    return draw(st.integers(0, 60)), layout


def all_rows(plan, *, only_new):
    rows = []
    for rank, steps in enumerate(plan.steps):
        for step in range(steps):
            indices = plan.indices(step, rank)
            assert len(indices) == plan.round_at(step).received[rank]
            rows += indices[: plan.round_at(step).new[rank]] if only_new else indices
    return rows


@given(uniform_cases())
@settings(max_examples=300, deadline=None)
def test_uniform_plans_cover_each_sample_once_with_equal_lengths(case):
    length, layout = case
    order = list(range(100, 100 + length))
    plan = make_plan(order, layout, SHARDINGS[layout.strategy])
    new = all_rows(plan, only_new=True)
    if layout.drop_last:
        kept = length // layout.round_rows * layout.round_rows
        assert len(new) == kept and len(set(new)) == kept and set(new) <= set(order)
        assert set(plan.steps) == {length // layout.round_rows}
    else:
        assert sorted(new) == order
    if layout.even != "none":
        assert len(set(plan.steps)) == 1
    for step in range(max(plan.steps)):
        cut = plan.round_at(step)
        full = layout.shares
        if layout.even == "repeat":
            assert cut.received == full == cut.rows
        elif layout.even == "split":
            assert max(cut.rows) - min(cut.rows) <= 1 and min(cut.received) >= 1
            assert cut.new == cut.rows
        assert sum(cut.new) == (layout.round_rows if step < length // layout.round_rows else length % layout.round_rows)


@given(uniform_cases(), st.integers(1, 7))
@settings(max_examples=100, deadline=None)
def test_windows_count_the_rows_of_all_ranks(case, size):
    length, layout = case
    plan = make_plan(range(length), layout, SHARDINGS[layout.strategy])
    for rank in range(layout.world):
        for step in range(plan.steps[rank]):
            window = plan.window(step, size)
            assert window.size == min(size, *(end - step for end in plan.steps if end > step))
            steps = range(step, step + window.size)
            assert window.global_rows == sum(sum(plan.round_at(s).rows) for s in steps)
            info = plan.info(step, rank)
            assert (info.index, info.is_last) == (step, step == plan.steps[rank] - 1)
            assert info.rows == info.rank_rows[rank]


def test_uneven_last_batches_by_hand():
    # 10 samples, 3 ranks with batches of 2: one full round of 6, then 4 rows: 2 + 1 + 1.
    layout = Layout(unit="samples", world=3, round_rows=6, even="split")
    plan = make_plan(range(10), layout, Interleaved())
    assert [[plan.indices(s, r) for r in range(3)] for s in range(2)] == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8], [9]]]
    assert plan.info(1, 1).rank_rows == (2, 1, 1) and plan.info(1, 1).rows == 1 and plan.info(1, 1).is_last
    assert plan.window(0, 2).global_rows == 10 and plan.window(1, 2).size == 1
    # 7 samples: the last round has 1 row; ranks 1 and 2 get it again, without weight.
    plan = make_plan(range(7), layout, Interleaved())
    assert [plan.indices(1, r) for r in range(3)] == [[6], [6], [6]]
    assert plan.info(1, 2).rank_rows == (1, 0, 0) and plan.info(1, 2).rows == 0
    assert plan.round_at(1).received == (1, 1, 1)
    # Accelerate's wrap-around.
    plan = make_plan(range(7), replace(layout, even="repeat"), Interleaved())
    assert [plan.indices(1, r) for r in range(3)] == [[6, 0], [1, 2], [3, 4]]
    assert plan.round_at(1).new == (1, 0, 0) and plan.round_at(1).rows == (2, 2, 2)
    # Contiguous: runs of 4 (2 + 2), 3 (2 + 1) and 3.
    plan = make_plan(range(10), replace(layout, strategy="contiguous"), Contiguous())
    assert [[plan.indices(s, r) for s in range(2)] for r in range(3)] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6]],
        [[7, 8], [9]],
    ]
    # Not evened: what is left is dealt in batches.
    plan = make_plan(range(9), replace(layout, even="none"), Interleaved())
    assert plan.steps == (2, 2, 1) and [plan.indices(1, r) for r in range(2)] == [[6, 7], [8]]


def test_fewer_samples_than_ranks_and_none_at_all():
    layout = Layout(unit="samples", world=4, round_rows=8, even="split")
    plan = make_plan([7, 9], layout, Interleaved())
    assert [plan.indices(0, r) for r in range(4)] == [[7], [9], [9], [9]] and plan.round_at(0).rows == (1, 1, 0, 0)
    assert make_plan([], layout, Interleaved()).steps == (0, 0, 0, 0)
    assert make_plan([7, 9], replace(layout, even="repeat"), Interleaved()).indices(0, 3) == [7, 9]
    assert make_plan([7, 9], replace(layout, even="none"), Interleaved()).steps == (1, 0, 0, 0)


@given(uniform_cases(), st.data())
@settings(max_examples=200, deadline=None)
def test_two_resizes_leave_exactly_the_unseen_samples(case, data):
    length, layout = case
    layout = replace(layout, drop_last=False)
    sharding = SHARDINGS[layout.strategy]
    order = np.arange(length, dtype=np.int64)
    seen: Counter[int] = Counter()
    segments = []
    for _ in range(3):
        left = remaining_order(order, segments, sharding)
        plan = make_plan(left, layout, sharding)
        last = len(segments) == 2
        taken = max(plan.steps) if last else data.draw(st.integers(0, max(plan.steps)))
        for rank in range(layout.world):
            for step in range(min(taken, plan.steps[rank])):
                seen.update(plan.indices(step, rank)[: plan.round_at(step).new[rank]])
        segments.append({**layout.to_dict(), "taken": taken})
        world = data.draw(st.integers(1, 4))
        layout = replace(layout, world=world, round_rows=world * data.draw(st.integers(1, 5)))
    assert seen == Counter(range(length))


@st.composite
def batch_cases(draw):
    sizes = draw(st.lists(st.integers(1, 5), max_size=12))
    rows = iter(range(sum(sizes)))
    batches = [[next(rows) for _ in range(n)] for n in sizes]
    layout = Layout(
        unit="batches",
        world=draw(st.integers(1, 4)),
        round_rows=0,
        even=draw(st.sampled_from(["split", "repeat", "none"])),
        split=draw(st.booleans()),
        strategy=draw(st.sampled_from(["interleaved", "contiguous", "random", "reversed"])),
    )
    return batches, layout


@given(batch_cases(), st.data())
@settings(max_examples=300, deadline=None)
def test_batches_of_any_size_are_covered_once_also_after_a_resize(case, data):
    batches, layout = case
    sharding = {**SHARDINGS, "reversed": Reversed()}[layout.strategy]
    if layout.split and layout.strategy in ("contiguous", "reversed"):
        with pytest.raises(ConfigurationError, match="split_batches"):
            make_plan(batches, layout, sharding)
        return
    plan = make_plan(batches, layout, sharding)
    rows = sorted(row for batch in batches for row in batch)
    assert sorted(all_rows(plan, only_new=True)) == rows
    if layout.even != "none":
        assert len(set(plan.steps)) == 1
    taken = data.draw(st.integers(0, max(plan.steps)))
    seen = []
    for rank in range(layout.world):
        for step in range(min(taken, plan.steps[rank])):
            seen += plan.indices(step, rank)[: plan.round_at(step).new[rank]]
    left = [row for batch in plan.remaining(taken) for row in batch]
    assert sorted(seen + left) == rows


def test_whole_batches_stay_whole_where_they_can():
    batches = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]]
    layout = Layout(unit="batches", world=2, round_rows=0, even="split")
    plan = make_plan(batches, layout, Interleaved())
    assert isinstance(plan, ListPlan)
    assert [plan.indices(s, 0) for s in range(3)] == [[0, 1, 2], [4, 5], [10]]
    assert [plan.indices(s, 1) for s in range(3)] == [[3], [6, 7, 8, 9], [0]]
    assert plan.round_at(2).rows == (1, 0) and plan.round_at(1).rows == (2, 4)
    assert make_plan(batches, replace(layout, drop_last=True), Interleaved()).steps == (2, 2)
    divided = make_plan(batches, replace(layout, split=True), Interleaved())
    assert [divided.indices(s, 1) for s in range(5)] == [[2], [0], [5], [8, 9], [0]]


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 4), st.sampled_from(["split", "repeat", "none"]))
@settings(max_examples=100, deadline=None)
def test_a_function_decides_and_lengths_are_levelled(length, world, size, even):
    def by_parity(indices, rank, world_size):
        return [i for i in indices if i % 7 % world_size == rank]

    layout = Layout(unit="samples", world=world, round_rows=size * world, even=even, strategy="custom")
    plan = make_plan(range(length), layout, FunctionSharding(by_parity))
    assert sorted(all_rows(plan, only_new=True)) == list(range(length))
    for rank in range(world):
        for step in range(plan.steps[rank]):
            new = plan.round_at(step).new[rank]
            assert all(i % 7 % world == rank for i in plan.indices(step, rank)[:new])
    if even != "none":
        assert len(set(plan.steps)) == 1


def test_items_are_dealt_one_by_one():
    layout = Layout(unit="items", world=2, round_rows=2, even="split")
    plan = make_plan(["a", "b", "c"], layout, Interleaved())
    assert isinstance(plan, UniformPlan)
    assert [plan.indices(s, r) for s in range(2) for r in range(2)] == ["a", "b", "c", "c"]
    assert plan.round_at(1).new == (1, 0)


def test_a_resize_needs_the_strategy_of_the_first_part():
    segment = {**Layout(unit="samples", world=2, round_rows=4, even="split", strategy="mine").to_dict(), "taken": 1}
    with pytest.raises(ConfigurationError, match="'mine'"):
        remaining_order(range(9), [segment], Interleaved())


@given(st.integers(0, 100), st.integers(1, 9))
def test_even_parts(total, parts):
    sizes = even_parts(total, parts)
    assert sum(sizes) == total and max(sizes) - min(sizes) <= 1 and list(sizes) == sorted(sizes, reverse=True)


def test_arithmetic_is_constant_time_in_the_position():
    layout = Layout(unit="samples", world=2, round_rows=64, even="split")
    plan = make_plan(range(10**15), layout, Interleaved())
    step = plan.steps[0] - 1
    assert plan.indices(step, 1)[-1] == 10**15 - 1
    assert plan.window(step - 3, 8).size == 4
    assert cut_round(3, layout).rows == (2, 1)
    assert len(plan.remaining(step)) == 10**15 - step * 64
