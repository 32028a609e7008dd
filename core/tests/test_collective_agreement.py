"""What ranks do about each other: disagreement and failure end in the same error everywhere, and collectives are few."""

import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pack_padded_sequence

from drivetrain.errors import DistributedOperationError
from drivetrain.parallel import (
    all_gather_object,
    barrier,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from drivetrain.testing.workers import RemoteError


def message_of(function, *args, **kwargs):
    with pytest.raises(DistributedOperationError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def still_in_step():
    return reduce(torch.tensor([1]), "sum").item() == dist.get_world_size()


# -- disagreement ----------------------------------------------------------------------------------------------------------

X = torch.ones(2, 3)
CALLS = {
    "gather-columns": (
        lambda r: gather(torch.ones(2, 3 + r)),
        ["float32[*,3]", "float32[*,4]", "pad_across_processes"],
    ),
    "gather-dtype": (lambda r: gather(X.double() if r else X), ["float32[*,3]", "float64[*,3]"]),
    "gather-dimensions": (lambda r: gather(torch.ones(2) if r else torch.tensor(1.0)), ["float32[]", "float32[*]"]),
    "gather-keys": (lambda r: gather({f"k{r}": X}), ["['k0']", "['k1']"]),
    "gather-missing": (lambda r: gather({"a": None if r else X, "b": X}), ["['a']:float32", "(['b']"]),
    "gather-nothing": (lambda r: gather([X] * r), ["gather()", "[0]:float32"]),
    "reduce-rows": (lambda r: reduce(torch.ones(2 + r)), ["float32[2]", "float32[3]"]),
    "reduce-large": (lambda r: reduce(torch.ones(200_000 + r)), ["float32[200000]", "float32[200001]"]),
    "reduce-reduction": (lambda r: reduce(X, "sum" if r else "mean"), ["reduce(mean", "reduce(sum"]),
    "reduce-scale": (lambda r: reduce(X, scale=1.0 + r), ["1.0", "2.0"]),
    "broadcast-shape": (lambda r: broadcast(torch.ones(2 + r)), ["float32[2]", "float32[3]"]),
    "broadcast-source": (lambda r: broadcast(X, r), ["from 0", "from 1"]),
    "pad-dim": (lambda r: pad_across_processes(X, dim=r), ["dim=0", "dim=1"]),
    "operations": (
        lambda r: reduce(X) if r else gather(X),
        ["gather(", "reduce(", "look for a branch that only some ranks take"],
    ),
    "barrier": (lambda r: barrier() if r else gather_object([1]), ["gather_object()", "wait_for_everyone()"]),
    "objects": (lambda r: broadcast_object_list([1] * (r + 1)), ["1 items", "2 items"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_disagreement_is_the_same_error_on_every_rank(ranks, name):
    call, parts = CALLS[name]

    def run():
        return message_of(call, dist.get_rank()), still_in_step()

    messages, in_step = zip(*ranks.run(run), strict=True)
    assert all(in_step)
    for message in messages:
        for part in ["Ranks disagree in", "rank 0:", "rank 1:", *parts]:
            assert part in message
    assert messages[0].split("\n")[1:] == messages[1].split("\n")[1:]


def test_the_message_says_where_in_the_users_code(ranks, tmp_path):
    script = tmp_path / "user_code.py"
    script.write_text("def train(function, *args):\n    return function(*args)\n")

    def run():
        space = {"__name__": "user_code"}
        exec(compile(script.read_text(), str(script), "exec"), space)
        return message_of(space["train"], gather, torch.ones(1, 1 + dist.get_rank()))

    for message in ranks.run(run):
        assert message.count(f"{script}:2") == 2


def test_different_numbers_of_rows_are_an_error_in_debug_mode(ranks):
    def run():
        r = dist.get_rank()
        data = {"x": torch.ones(2 + r, 3), "y": torch.tensor(1)}
        fine = gather(data["x"])
        asked_by_one = message_of(gather, data, debug=r == 0)
        os.environ["DRIVETRAIN_DEBUG"] = "1"
        try:
            by_variable = message_of(gather, data)
            even = gather(torch.ones(2), debug=True)
        finally:
            del os.environ["DRIVETRAIN_DEBUG"]
        return fine.shape, even.shape, asked_by_one == by_variable, by_variable

    for fine, even, equal, message in ranks.run(run):
        assert (fine, even, equal) == ((5, 3), (4,), True)
        assert "rank 0: ['x'][2, 3]" in message
        assert "rank 1: ['x'][3, 3]" in message
        assert "pad_across_processes" in message


# -- a rank that can't go on -----------------------------------------------------------------------------------------------

CANT = {
    "set": (lambda: gather({torch.ones(1)}), "is in a set"),
    "packed": (lambda: gather([pack_padded_sequence(torch.ones(1, 1), torch.tensor([1]))]), "pad_packed_sequence"),
    "sparse": (lambda: reduce(torch.eye(2).to_sparse()), "sparse_coo tensor"),
    "meta": (lambda: broadcast(torch.ones(1, device="meta")), "meta tensor"),
    "text": (lambda: gather("text"), "A str isn't a tensor.*gather_object"),
    "complex": (lambda: reduce(torch.ones(1, dtype=torch.complex64), "max"), "no max"),
    "pickle": (lambda: gather_object([lambda: 1]), "pickle"),
    "lock": (lambda: broadcast_object_list([threading.Lock()], 1), "pickle"),
    "tuple": (lambda: broadcast_object_list((1,), 1), "needs a list"),
}


@pytest.mark.parametrize("name", CANT)
def test_what_one_rank_cannot_send_is_an_error_on_all(ranks, name):
    call, text = CANT[name]
    others = {
        "gather": lambda: gather(X),
        "reduce": lambda: reduce(X),
        "broadcast": lambda: broadcast(X),
        "gather_object": lambda: gather_object([1]),
        "broadcast_object_list": lambda: broadcast_object_list([1], 1),
    }

    def run(other):
        if dist.get_rank() == 1:
            with pytest.raises(Exception, match=text) as caught:
                call()
            return type(caught.value).__name__, still_in_step()
        with pytest.raises(DistributedOperationError, match=rf"(?s)failed on\n  rank 1: .*{text}"):
            others[other]()
        return None, still_in_step()

    operation = {"sparse": "reduce", "complex": "reduce", "meta": "broadcast", "pickle": "gather_object"}.get(
        name, "broadcast_object_list" if name in ("lock", "tuple") else "gather"
    )
    (_, first), (kind, second) = ranks.run(run, operation)
    assert kind != "DistributedOperationError", "the rank itself raises the cause"
    assert first
    assert second


@pytest.mark.parametrize("dead", [1, 2])
def test_a_dead_rank_is_named(workers, dead):
    def run():
        if dist.get_rank() == dead:
            os._exit(3)
        start = time.monotonic()
        try:
            gather(torch.ones(1000))
        except DistributedOperationError as error:
            took = time.monotonic() - start
            raise AssertionError(f"after {took:.0f} s: {error}") from None

    with pytest.raises(RemoteError) as caught:
        workers(3).run(run)
    for rank in {0, 1, 2} - {dead}:
        assert f"gather failed on rank {rank}: rank {dead} died, raised or stayed away" in caught.value.failures[rank]
    assert "exit code 3" in caught.value.failures[dead]


def test_a_dead_host_of_the_store_is_named(ranks):
    def run():
        if dist.get_rank() == 0:
            os._exit(3)
        barrier()

    with pytest.raises(RemoteError) as caught:
        ranks.run(run)
    assert "rank 0 or the launcher) is gone" in caught.value.failures[1]


def test_a_rank_that_stays_away_is_named_when_the_time_is_over(ranks):
    def run():
        from datetime import timedelta

        group = dist.new_group(timeout=timedelta(seconds=1))
        if dist.get_rank() == 1:
            time.sleep(5)
            return None
        return message_of(gather, torch.ones(1), group=group)

    message, _ = ranks.run(run)
    assert "rank 1 died, raised or stayed away" in message
    assert "InitProcessGroupKwargs(timeout=...)" in message
    ranks.kill()  # the group's state is undefined after a timeout


def test_a_job_without_its_group_is_an_error(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for call in (lambda: gather(X), lambda: gather_object([1]), barrier):
        assert "no process group" in message_of(call)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert gather(X) is X


# -- how many --------------------------------------------------------------------------------------------------------------


def count(function):
    """Collectives that ``function`` starts, by the name that torch's profiler gives them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as result:
        function()
    return {e.key[6:]: e.count for e in result.key_averages() if e.key.startswith("c10d::")}


GATHER, REDUCE, BROADCAST = "_allgather_base_", "allreduce_", "broadcast_"
SMALL, LARGE = [torch.ones(3), torch.ones(2, dtype=torch.int64)] * 5, [torch.ones(400), torch.ones(400).long()] * 5
HUGE = [torch.ones(1_200_000)] * 3
COUNTS = {
    "small": (lambda: (gather(SMALL), reduce(SMALL), broadcast(SMALL), reduce(SMALL, "max")), {GATHER: 4}),
    "objects": (
        lambda: (gather_object([1]), broadcast_object_list([1]), all_gather_object("a"), barrier()),
        {GATHER: 4},
    ),
    "gather": (lambda: gather(LARGE), {GATHER: 2}),
    "gather-many": (lambda: gather(LARGE * 3), {GATHER: 3}),
    "gather-huge": (lambda: gather(HUGE), {GATHER: 4}),
    "reduce": (lambda: reduce(LARGE, "sum"), {GATHER: 1, REDUCE: 2}),
    "reduce-huge": (lambda: reduce(HUGE, "sum"), {GATHER: 1, REDUCE: 1}),
    "max": (lambda: reduce(LARGE, "max"), {GATHER: 2}),
    "broadcast": (lambda: broadcast(LARGE), {GATHER: 1, BROADCAST: 1}),
    "pad": (lambda: pad_across_processes(HUGE), {GATHER: 1}),
    "large-objects": (
        lambda: (gather_object(["a" * 1000]), broadcast_object_list(["a" * 1000])),
        {GATHER: 3, BROADCAST: 1},
    ),
}


def test_collectives_are_as_few_as_the_documentation_says(ranks):
    def run():
        return {name: count(function) for name, (function, _) in COUNTS.items()}

    for counted in ranks.run(run):
        assert counted == {name: expected for name, (_, expected) in COUNTS.items()}
