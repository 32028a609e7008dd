"""Properties of maps over arbitrary structures."""

import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.parallel.structure import (
    concatenate,
    get_data_structure,
    get_shape,
    initialize_tensors,
    iterate_tensors,
    listify,
    map_tensors,
    pad_input_tensors,
    send_to_device,
    slice_tensors,
)

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass(frozen=True)
class Record:
    first: object
    second: object


def tensors(rows):
    return st.builds(
        lambda n, m, dtype: torch.arange(n * m).view(n, m).to(dtype),
        st.just(rows) if rows is not None else st.integers(0, 3),
        st.integers(0, 3),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
    )


def structures(rows=None):
    others = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.booleans())
    keys = st.one_of(st.text(max_size=2), st.integers(0, 9))

    def containers(inner):
        return st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.lists(inner, max_size=3).map(deque),
            st.builds(Pair, inner, inner),
            st.builds(Record, inner, inner),
            *(st.dictionaries(keys, inner, max_size=3).map(kind) for kind in (dict, OrderedDict, UserDict)),
            st.dictionaries(keys, inner, max_size=3).map(lambda d: defaultdict(list, d)),
        )

    return st.recursive(st.one_of(tensors(rows), others), containers, max_leaves=8)


def same(a, b):
    """Equal in types, structure and values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, Record):
        return same(a.first, b.first) and same(a.second, b.second)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(structures())
@settings(deadline=None)
def test_identity(data):
    assert map_tensors(lambda t: t, data) is data


@given(structures())
@settings(deadline=None)
def test_cloning_makes_an_equal_structure_of_other_tensors(data):
    clone = map_tensors(torch.clone, data)
    assert same(clone, data)
    assert all(a is not b for a, b in zip(iterate_tensors(clone), iterate_tensors(data), strict=True))


@given(structures())
@settings(deadline=None)
def test_maps_compose(data):
    once = map_tensors(lambda t: t.reshape(-1).to(torch.complex64), data)
    twice = map_tensors(lambda t: t.to(torch.complex64), map_tensors(lambda t: t.reshape(-1), data))
    assert same(once, twice)


@given(structures())
@settings(deadline=None)
def test_description_and_back(data):
    description = get_data_structure(data)
    assert same(get_shape(initialize_tensors(description)), get_shape(data))
    assert same(listify(send_to_device(data, "cpu")), listify(data))
    moved = send_to_device(data, "meta")
    assert all(t.is_meta for t in iterate_tensors(moved))
    assert same(get_shape(moved), get_shape(data))


@given(structures(rows=5), st.integers(0, 5))
@settings(deadline=None)
def test_slices_concatenate_to_the_whole(data, cut):
    head, tail = slice_tensors(data, slice(0, cut)), slice_tensors(data, slice(cut, None))
    if not any(isinstance(value, list) and value and not list(iterate_tensors(value)) for value in all_values(data)):
        assert same(concatenate([head, tail]), data)


def all_values(data):
    yield data
    if isinstance(data, Mapping):
        children = data.values()
    elif isinstance(data, Record):
        children = (data.first, data.second)
    elif isinstance(data, (list, tuple, deque)):
        children = data
    else:
        return
    for child in children:
        yield from all_values(child)


@given(structures(rows=5), st.integers(1, 7))
@settings(deadline=None)
def test_padding_reaches_the_next_multiple_and_keeps_the_values(data, processes):
    padded = pad_input_tensors(data, 5, processes)
    for before, after in zip(iterate_tensors(data), iterate_tensors(padded), strict=True):
        assert after.shape[0] % processes == 0
        assert after.shape[0] - 5 < processes
        assert torch.equal(after[:5], before)
        assert not after[5:].any()
