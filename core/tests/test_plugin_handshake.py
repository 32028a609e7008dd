"""Ranks that differ learn it, all of them, with the same words."""

import enum
import functools
from dataclasses import dataclass, field

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from drivetrain._plugins.handshake import _rank_list, flatten, verify_ranks


def _outcome(by_rank, everything=None, members=None):
    """What a rank sees: the message of the error, or the warnings."""
    import warnings

    from drivetrain.errors import RankMismatchError

    rank = dist.get_rank()
    group = dist.new_group(members) if members else None
    if members and rank not in members:
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            verify_ranks(by_rank[rank], everything=(everything or [{}] * 8)[rank], group=group)
        except RankMismatchError as error:
            return str(error)
    return [str(warning.message) for warning in caught]


PLAN = {"backend": {"name": "ddp", "version": "0.1.0", "options": {"bucket_cap_mb": 25, "static_graph": False}}}


def changed(**options):
    return {"backend": {**PLAN["backend"], "options": {**PLAN["backend"]["options"], **options}}}


def test_equal_ranks_pass_in_silence(workers):
    assert workers(3).run(_outcome, [PLAN] * 3, [{"x": "1"}] * 3) == [[], [], []]


def test_a_difference_is_an_error_on_every_rank_naming_ranks_and_values(workers):
    messages = workers(3).run(_outcome, [PLAN, changed(bucket_cap_mb=50), PLAN])
    assert len(set(messages)) == 1
    assert "  backend.options.bucket_cap_mb: 25 on ranks 0, 2; 50 on rank 1\n" in messages[0]
    assert "static_graph" not in messages[0]
    assert "Install the same versions on every machine" in messages[0]


def test_a_plugin_that_one_rank_lacks(workers):
    one = {**PLAN, "tracker": {"name": "toy", "version": "2.0"}}
    messages = workers(3).run(_outcome, [one, one, PLAN])
    assert "  tracker.version: '2.0' on ranks 0-1; (absent) on rank 2\n" in messages[0]
    assert len(set(messages)) == 1


def test_other_plugins_are_one_warning_on_rank_0(workers):
    installed = [{"toy (toy-plugin)": "1.0, ok"}, {"toy (toy-plugin)": "2.0, ok"}, {}]
    first, second, third = workers(3).run(_outcome, [PLAN] * 3, installed)
    assert second == third == []
    assert first == [
        "Ranks differ in plugins that this run doesn't use:\n"
        "  toy (toy-plugin): '1.0, ok' on rank 0; '2.0, ok' on rank 1; (absent) on rank 2"
    ]


def test_values_that_may_be_secret_are_not_shown(workers):
    messages = workers(2).run(_outcome, [{"api_key": "s3cr3t"}, {"api_key": "0th3r"}])
    assert "s3cr3t" not in messages[0]
    assert "0th3r" not in messages[0]
    assert "api_key: differs between rank 0; rank 1" in messages[0]


def test_a_group_compares_itself_alone_and_names_global_ranks(workers):
    messages = workers(3).run(_outcome, [changed(bucket_cap_mb=1), PLAN, changed(bucket_cap_mb=2)], None, [1, 2])
    assert messages[0] is None
    assert messages[1] == messages[2]
    assert "25 on rank 1; 2 on rank 2" in messages[1]


def test_without_a_process_group_there_is_nobody_to_differ_from():
    verify_ranks(PLAN, everything={"x": "y"})


class Color(enum.Enum):
    RED = 1


@dataclass
class Options:
    size: int = 3
    names: set = field(default_factory=lambda: {"b", "a"})


class Bad:
    def __repr__(self):
        raise ValueError


def test_values_print_alike_in_every_process():
    assert flatten({"a": Options(), "c": Color.RED, "f": flatten, "p": object(), "l": [1, Options(names=set())]}) == {
        "a.names": "{'a', 'b'}",
        "a.size": "3",
        "c": "Color.RED",
        "f": "drivetrain._plugins.handshake.flatten",
        "l": "[1, {names: {}, size: 3}]",
        "p": "<object object>",
    }
    assert flatten({"x": Bad()}) == {"x": "Bad object whose repr raises ValueError"}
    assert flatten({"x": functools.partial(flatten)})["x"].startswith("functools.partial(<function flatten")
    assert "0x" not in flatten({"x": functools.partial(flatten)})["x"]


keys = st.text("abcXYé", min_size=1, max_size=4)
trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text("ab'"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@given(tree=st.dictionaries(keys, trees, max_size=4))
def test_the_order_of_a_mapping_does_not_matter(tree):
    assert flatten(tree) == flatten(dict(reversed(list(tree.items()))))


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([0, 1, 2, 3], "ranks 0-3"), ([5, 0, 1], "ranks 0-1, 5"), ([0, 2], "ranks 0, 2")],
)
def test_lists_of_ranks(ranks, text):
    assert _rank_list(ranks) == text


@given(st.sets(st.integers(0, 40), min_size=1))
def test_lists_of_ranks_are_exact(ranks):
    text = _rank_list(sorted(ranks)).partition(" ")[2]
    spans = [part.split("-") for part in text.split(", ")]
    assert {rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)} == ranks
