"""Object collectives on live ranks."""

import pytest
import torch
import torch.distributed as dist

from drivetrain.errors import ConfigurationError
from drivetrain.parallel import all_gather_object, broadcast_object_list, gather_object


@pytest.mark.parametrize("world", [2, 3])
def test_lists_are_concatenated_in_the_order_of_ranks(workers, world):
    def run():
        r = dist.get_rank()
        return gather_object([f"{r}-{i}" for i in range(r)]), gather_object((r, {"rank": r}))

    names = [f"{r}-{i}" for r in range(world) for i in range(r)]
    pairs = [item for r in range(world) for item in (r, {"rank": r})]
    assert workers(world).run(run) == [(names, pairs)] * world


def test_another_object_is_one_item_of_its_rank(workers):
    def run():
        r = dist.get_rank()
        return gather_object({"rank": r}), gather_object("ab"), gather_object(None), all_gather_object([r])

    assert workers(2).run(run) == [([{"rank": 0}, {"rank": 1}], ["ab", "ab"], [None, None], [[0], [1]])] * 2
    assert gather_object({"rank": 0}) == [{"rank": 0}]
    assert gather_object((1, 2)) == [1, 2]
    items = [1, 2]
    assert gather_object(items) is items


@pytest.mark.parametrize("size", [0, 700, 760, 800, 100_000])
def test_sizes_around_that_of_a_frame(workers, size):
    def run():
        r = dist.get_rank()
        mine = ["x" * (size * r)]
        given = [r, "y" * size if r == 1 else None, torch.full((2,), r)]
        got = broadcast_object_list(given, from_process=1)
        assert got is given
        return [len(item) for item in gather_object(mine)], got[0], len(got[1]), got[2].tolist()

    assert workers(3).run(run) == [([0, size, 2 * size], 1, size, [1, 1])] * 3


def test_objects_within_a_group(workers):
    def run():
        r = dist.get_rank()
        group = dist.new_group([1, 2])
        if r == 0:
            return None
        got = gather_object([r], group=group), broadcast_object_list([r], 1, group=group)
        dist.destroy_process_group(group)
        return got

    assert workers(3).run(run) == [None, ([1, 2], [2]), ([1, 2], [2])]


def test_one_process():
    items = [1]
    assert broadcast_object_list(items) is items
    assert all_gather_object(3) == [3]
    with pytest.raises(ConfigurationError, match="from_process=2 is no rank"):
        broadcast_object_list(items, 2)
