import math
import re
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from drivetrain._builtin.jsonl import JSONL_SPEC
from drivetrain.errors import ConfigurationError, DistributedOperationError, TrackerError
from drivetrain.specs import ProcessInfo
from drivetrain.tracking import TrackerHub, TrackingOptions, read_run
from drivetrain.tracking.reducer import reduce_rows

QUICK = {"interval": 0.005}


def make_hub(directory, **options):
    process = ProcessInfo(rank=dist.get_rank(), world_size=dist.get_world_size())
    return TrackerHub.from_plan(
        [JSONL_SPEC], process=process, logging_dir=directory, options=TrackingOptions(**{**QUICK, **options})
    )


def series(directory):
    run = read_run(directory)
    return {name: run.series(name) for name in run.names}


def _reductions(directory):
    rank = dist.get_rank()
    hub = make_hub(directory)
    hub.start("p")
    tensor = torch.tensor(float(rank))
    for step in range(20):
        hub.log({"mean": tensor, "deep": {"x": step}}, step=step, reduce="mean")
        tensor += 1  # the next call's
        dist.barrier()  # training's own collectives go on meanwhile
        hub.log({"own": rank}, step=step)
    hub.log({"n": rank + 1, "x": rank + 0.5}, step=20, reduce="sum")
    hub.log({"n": rank + 1}, step=21, reduce="max")
    hub.log({"n": rank + 1}, step=22, reduce="min")
    hub.log({"weighted": [2.0, 8.0][rank]}, step=23, reduce="mean", weight=torch.tensor([3, 1][rank]))
    hub.log({"a": 1.0 + rank, "b": [1.0, math.nan][rank]}, step=24, reduce="mean", weight={"a": 1, "b": 1 - rank})
    hub.log({}, step=25, reduce="mean")
    hub.end()


def test_values_of_all_processes_are_reduced_in_order_while_training_goes_on(ranks, tmp_path):
    ranks.run(_reductions, str(tmp_path))
    found = series(tmp_path)
    assert found["mean"] == [(s, s + 0.5) for s in range(20)]
    assert found["deep/x"] == [(s, float(s)) for s in range(20)]
    assert found["own"] == [(s, 0) for s in range(20)]
    assert found["n"] == [(20, 3), (21, 2), (22, 1)] and [type(v) for _, v in found["n"]] == [int] * 3
    assert found["x"] == [(20, 2.0)]
    assert found["weighted"] == [(23, (2.0 * 3 + 8.0) / 4)]
    assert found["a"] == [(24, 1.5)] and found["b"] == [(24, 1.0)]
    assert [r.step for r in read_run(tmp_path).rows if not r.values] == [25]


def _only_main(directory, how):
    """The usual mistake, in a training that meets in steps, or only at the end."""
    rank = dist.get_rank()
    hub = make_hub(directory)
    hub.start("p")
    if rank == 0:
        hub.log({"loss": 1.0}, step=0, reduce="mean")
    message = None
    for _ in range(1000 if how == "steps" else 0):
        dist.barrier()
        time.sleep(0.005)
        try:
            if message is None:
                hub.met()
        except DistributedOperationError as error:
            message = str(error)  # a script would end here; this one goes on, for the other rank's sake
    assert message or rank or how == "end"
    try:
        hub.end()
    except DistributedOperationError as error:
        return str(error)
    return None


@pytest.mark.parametrize("how", ["end", "steps"])
def test_a_process_that_does_not_take_part_is_an_error_that_names_the_call(ranks, tmp_path, how):
    message, other = ranks.run(_only_main, str(tmp_path), how)
    assert re.search(
        r"log\(reduce='mean'\) of 'loss' at \S+:\d+ was called on rank 0, but rank 1 (went past|ended)", message
    )
    assert "is_main_process" in message and other is None


def _late(directory):
    """A process that only comes late is waited for; calls that disagree are an error on both."""
    rank = dist.get_rank()
    hub = make_hub(directory)
    hub.start("p")
    if rank == 1:
        time.sleep(5.0)
    before = time.perf_counter()
    hub.log({"late": rank}, step=0, reduce="sum")
    took = time.perf_counter() - before
    assert hub._reducer.wait(20.0) and hub._reducer.error is None
    hub.log({"x" if rank else "y": 1.0}, step=1, reduce="mean")
    try:
        hub.end()
    except DistributedOperationError as error:
        return took, str(error)
    return took, None


def test_a_late_process_is_waited_for_by_nobody_and_different_calls_are_an_error_on_all(ranks, tmp_path):
    for took, error in ranks.run(_late, str(tmp_path)):
        assert took < 1.0  # of five: the training thread doesn't wait
        assert "rank 0: log(reduce='mean') of 'y' at" in error and "rank 1: log(reduce='mean') of 'x' at" in error
    assert series(tmp_path)["late"] == [(0, 1)]


def test_alone_a_reduction_is_the_value_itself(tmp_path):
    hub = TrackerHub.from_plan([JSONL_SPEC], logging_dir=tmp_path, options=TrackingOptions(**QUICK))
    hub.start("p")
    hub.log({"loss": torch.tensor(2.0), "n": 3}, step=1, reduce="sum")
    hub.log({"loss": 4.0}, step=2, reduce="mean", weight=5)
    hub.end()
    assert series(tmp_path) == {"loss": [(1, 2.0), (2, 4.0)], "n": [(1, 3)]}


def test_mistakes_are_errors_at_once(tmp_path):
    hub = TrackerHub.from_plan([JSONL_SPEC], logging_dir=tmp_path)
    for error, message, arguments in (
        (ConfigurationError, "reduce='median' is none of 'mean'", {"reduce": "median"}),
        (ConfigurationError, "weight= weighs a mean", {"reduce": "max", "weight": 1}),
        (ConfigurationError, "say reduce='mean'", {"weight": 1}),
        (TrackerError, "differ in 'b'", {"reduce": "mean", "weight": {"a": 1, "b": 2}}),
    ):
        with pytest.raises(error, match=message):
            hub.log({"a": 1.0}, **arguments)
    with pytest.raises(TrackerError, match="'phase' is the text 'warm'"):
        hub.log({"phase": "warm"}, reduce="mean")
    with pytest.raises(TrackerError, match="takes a mapping"):
        hub.log([1.0], reduce="mean")


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 100)), min_size=1, max_size=6))
def test_a_weighted_mean_is_that_of_all_items(parts):
    items = [value for value, count in parts for _ in range(count)]
    [mean] = reduce_rows("mean", [[v] for v, _ in parts], [[float(n)] for _, n in parts])
    assert (
        math.isnan(mean) if not items else math.isclose(mean, math.fsum(items) / len(items), rel_tol=1e-9, abs_tol=1e-9)
    )
