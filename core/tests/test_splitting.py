"""Each rank's part of what is split between processes."""

from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.errors import ConfigurationError
from drivetrain.parallel import split_between_processes, split_bounds


def parts(inputs, world, **kwargs):
    return [split_between_processes(inputs, rank, world, **kwargs) for rank in range(world)]


@given(st.integers(0, 200), st.integers(1, 17))
def test_bounds_cover_everything_once_and_sizes_differ_by_one_at_most(length, world):
    bounds = [split_bounds(length, rank, world) for rank in range(world)]
    assert [i for start, end in bounds for i in range(start, end)] == list(range(length))
    sizes = [end - start for start, end in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_all_kinds_are_split_alike(length, world, apply_padding):
    items = list(range(length))
    expected = parts(items, world, apply_padding=apply_padding)
    assert parts(tuple(items), world, apply_padding=apply_padding) == [tuple(p) for p in expected]
    for got, want in zip(parts(torch.tensor(items), world, apply_padding=apply_padding), expected, strict=True):
        assert got.tolist() == want
    for got, want in zip(parts(np.array(items), world, apply_padding=apply_padding), expected, strict=True):
        assert list(got) == want
    assert [list(p) for p in parts(range(length), world, apply_padding=apply_padding)] == expected
    if apply_padding:
        assert {len(p) for p in expected} == {-(-length // world)}
    if length >= world and not apply_padding:
        assert [item for part in expected for item in part] == items


def test_uneven_and_padded():
    items = ["a", "b", "c", "d", "e"]
    assert parts(items, 3) == [["a", "b"], ["c", "d"], ["e"]]
    assert parts(items, 3, apply_padding=True) == [["a", "b"], ["c", "d"], ["e", "e"]]


def test_fewer_items_than_ranks():
    assert parts(["a", "b"], 4) == [["a"], ["b"], ["b"], ["b"]]
    assert parts(["a", "b"], 4, apply_padding=True) == [["a"], ["b"], ["b"], ["b"]]
    assert [p.tolist() for p in parts(torch.tensor([[1, 2]]), 3)] == [[[1, 2]]] * 3


@pytest.mark.parametrize("apply_padding", [False, True])
def test_nothing(apply_padding):
    assert parts([], 3, apply_padding=apply_padding) == [[], [], []]
    assert parts({}, 2, apply_padding=apply_padding) == [{}, {}]
    assert parts({"x": ()}, 2, apply_padding=apply_padding) == [{"x": ()}] * 2
    assert [p.shape for p in parts(torch.empty(0, 2), 2, apply_padding=apply_padding)] == [(0, 2)] * 2


def test_dicts_keep_their_type_and_are_not_changed():
    inputs = defaultdict(list, prompt=["a", "b", "c"], deep=OrderedDict(ids=torch.arange(3)))
    first, second = parts(inputs, 2)
    assert type(first) is defaultdict
    assert type(first["deep"]) is OrderedDict
    assert (first["prompt"], first["deep"]["ids"].tolist()) == (["a", "b"], [0, 1])
    assert (second["prompt"], second["deep"]["ids"].tolist()) == (["c"], [2])
    assert inputs["prompt"] == ["a", "b", "c"]
    padded = split_between_processes(inputs, 1, 2, apply_padding=True)
    assert (padded["prompt"], padded["deep"]["ids"].tolist()) == (["c", "c"], [2, 2])


def test_dict_values_of_different_lengths_are_refused():
    with pytest.raises(ConfigurationError, match=r"same length.*\['a'\]: 1, \['b'\]: 2"):
        split_between_processes({"a": [1], "b": [1, 2]}, 0, 2)


@pytest.mark.parametrize("inputs", ["text", 3, None, {"a": "text"}, iter([1, 2])])
def test_what_has_no_items_is_refused(inputs):
    with pytest.raises(TypeError, match="can't be split between processes"):
        split_between_processes(inputs, 0, 2)


class Table:
    """As tabular data sets are: a slice is a dict of columns, `select` makes another data set."""

    features = ("x",)

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"x": self.rows[index]}

    def select(self, indices):
        return Table([self.rows[i] for i in indices])


def test_data_sets():
    assert [p.rows for p in parts(Table([1, 2, 3]), 2, apply_padding=True)] == [[1, 2], [3, 3]]
    subset = split_between_processes(torch.utils.data.TensorDataset(torch.arange(5)), 1, 2)
    assert [int(x) for (x,) in subset] == [3, 4]


def test_one_process_gets_everything():
    inputs = {"a": [1], "b": [1, 2]}
    assert split_between_processes(inputs, 0, 1) is inputs
