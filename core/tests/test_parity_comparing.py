"""Where two runs part, and why, from records that were written by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from drivetrain.parity.record import RecordWriter
from drivetrain.parity.report import compare_records
from drivetrain.parity.sketch import sketch, sketch_rows

WEIGHT = torch.arange(1.0, 13.0).reshape(3, 4)


def write(folder, rank, world, *, steps=3, ends=True, change=None, logs=None):
    """The record of one rank of a run that trains ``w``; ``change(kind, step, value)`` gives another value for a fact."""
    of = change or (lambda kind, step, value: value)
    writer = RecordWriter(folder, rank)
    writer.write("start", world=world, data_rank=rank, data_world=world, backend="toy", dtype="float32")
    writer.write("model", step=0, model=0, parameters={"w": [3, 4]}, quieted=[])
    rows = 4 // world
    batch = torch.arange(8.0).reshape(4, 2)[rank * rows : (rank + 1) * rows]
    for step in range(steps):
        if step == 0:
            writer.write("initial", step=0, model=0, tensors={"w": sketch(of("initial", 0, WEIGHT))})
        module = {"name": "layer", "type": "Linear", "draws": False}
        writer.write(
            "forward", step=step, model=0, rows=rows, counted=rows, samples=list(range(rank * rows, (rank + 1) * rows)),
            bypassed=False, frozen=[], evaluating=[], inputs={"0": sketch_rows(of("inputs", step, batch), rows)},
            modules=[{**module, "outputs": {"": sketch_rows(of("output", step, 2 * batch), rows)}}],
        )  # fmt: skip
        loss = of("loss", step, float(batch.mean()))
        writer.write("loss", step=step, loss=loss, weight=of("weight", step, None), dtype="float32", counted=rows)
        if change is not None and of("stops", step, False):
            return
        gradient = of("gradient", step, WEIGHT / 10)
        if of("clips", step, False):
            writer.write("gradients", step=step, model=0, tensors={"w": sketch(gradient)})
            gradient = of("clipped", step, gradient / 2)
            writer.write("clipped", step=step, model=0, tensors={"w": sketch(gradient)})
        writer.write("used", step=step, model=0, tensors={"w": sketch(gradient, decades=True)})
        groups = [{"lr": of("lr", step, 0.1)}]
        writer.write("step", step=step, optimizer=0, groups=groups, skipped=of("skipped", step, False))
        writer.write("after", step=step, model=0, tensors={"w": sketch(of("weights", step, WEIGHT - 0.1 * step))})
        for facts in logs or ():
            writer.write(
                "log", step=step + 1, at="train.py:9", **{"reduce": None, "weight": None, **facts(rank, world)}
            )
    if ends:
        writer.write("end", step=steps)


@pytest.fixture
def compare(tmp_path):
    """``compare(change, ...)``: the report on one process, and two ranks of which ``change(rank)`` says what is different."""

    def run(change=None, *, single=None, steps=3, ends=True, logs=None, single_steps=3):
        write(tmp_path / "single", 0, 1, change=single, logs=logs, steps=single_steps)
        for rank in (0, 1):
            changed = None if change is None else change(rank)
            write(tmp_path / "several", rank, 2, change=changed, steps=steps, ends=ends, logs=logs)
        return compare_records(tmp_path / "single", tmp_path / "several")

    return run


def on(kind, value, *, step=None, rank=None):
    """A change of one kind of fact, in one step or all, on one rank or all."""

    def of_rank(here):
        def change(what, at, old):
            fits = what == kind and step in (None, at) and rank in (None, here)
            return (value(old) if callable(value) else value) if fits else old

        return change

    return of_rank


def test_runs_that_are_the_same(compare):
    report = compare()
    assert report.parity and report.training.steps == 3
    assert set(report.training.largest) == {"initial weights", "module outputs", "loss", "gradient", "weights"}
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["parity"] is True
    assert "Parity holds over 3 steps" in report.text()


@pytest.mark.parametrize(
    ("change", "kind", "step", "cause"),
    [
        (on("initial", 2 * WEIGHT), "initial weights", 0, "unseeded-weights"),
        (on("initial", 2 * WEIGHT, rank=1), "initial weights differ between ranks", 0, "weights-of-a-rank"),
        (on("inputs", lambda x: x + 1.5, step=2), "inputs", 2, "random-augmentation"),
        (on("output", lambda x: 1.01 * x, step=1), "module output", 1, "batch-coupled"),
        (on("output", lambda x: x * math.nan, step=1), "module output", 1, "batch-coupled"),
        (on("loss", lambda x: 4 * x, step=1), "loss", 1, "loss-over-the-batch"),
        (on("loss", lambda x: 2 * x, step=1), "loss", 1, "loss-times-world-size"),
        (on("loss", math.nan, step=1), "loss", 1, "not-finite"),
        (on("gradient", lambda g: 2 * g, step=0), "gradient", 0, "gradient-scale"),
        (on("gradient", lambda g: g.roll(1, 0), step=2), "gradient", 2, "gradient-changed"),
        (
            on("gradient", lambda g: 1.1 * g, step=1, rank=1),
            "gradients differ between ranks",
            1,
            "gradients-not-reduced",
        ),
        (on("lr", 0.2), "setting", 0, "rate-scaled"),
        (on("lr", 0.05, step=1), "setting", 1, "schedule-length"),
        (on("skipped", True, step=1, rank=1), "skipped step", 1, "overflow"),
        (on("weights", lambda w: 1.1 * w, step=1), "weights", 1, "weights-changed"),
        (on("weights", lambda w: 1.1 * w, step=1, rank=0), "weights differ between ranks", 1, "weights-changed"),
    ],
)
def test_a_difference_is_found_where_it_is(compare, change, kind, step, cause):
    report = compare(change)
    found = report.training.difference
    assert (found.kind, found.step, report.cause.key) == (kind, step, cause)
    assert report.training.steps == step and not report.parity
    assert f"part at step {step + 1}: {kind}" in report.text() and f"[{cause}]" in report.text()
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_sum_in_place_of_a_mean(compare):
    ranks = {0: 6.0, 1: 22.0}  # the sums of 0 to 3, and of 4 to 7
    report = compare(lambda rank: on("loss", ranks[rank])(rank), single=on("loss", 28.0)(0))
    assert report.cause.key == "sum-of-losses"


def test_means_of_different_numbers_of_items(compare):
    ranks = {0: 1.0, 1: 4.0}  # of one and of three tokens
    report = compare(lambda rank: on("loss", ranks[rank])(rank), single=on("loss", 3.25)(0))
    assert (report.training.difference.kind, report.cause.key) == ("loss", "mean-of-means")


def test_losses_are_weighted_with_their_items(compare):
    def of_rank(rank):
        facts = {"loss": (1.0, 4.0)[rank], "weight": (1.0, 3.0)[rank]}
        return lambda kind, step, value: facts.get(kind, value)

    report = compare(of_rank, single=lambda kind, step, value: {"loss": 3.25, "weight": 4.0}.get(kind, value))
    assert report.parity


def test_a_rank_of_kinks_is_tolerated_and_what_follows_from_it(compare):
    def of_rank(rank):
        factors = {"gradient": 1.005, "weights": 1.003, "output": 1.002}
        return lambda kind, step, value: (
            value * factors[kind] if kind in factors and step + (kind != "output") > 0 else value
        )

    assert compare(of_rank).parity


def test_the_same_without_a_cause_in_the_gradients_is_not(compare):
    report = compare(on("weights", lambda w: 1.003 * w))
    assert report.training.difference.kind == "weights"


def test_a_run_that_broke_is_compared_as_far_as_it_went(compare):
    def of_rank(rank):
        return lambda kind, step, value: True if kind == "stops" and step == 2 else value

    report = compare(of_rank)
    assert report.training.difference is None and report.training.steps == 2
    assert not report.several.ended


def test_a_difference_in_the_step_that_broke_is_found(compare):
    def of_rank(rank):
        def change(kind, step, value):
            if kind == "stops":
                return step == 2
            return 3 * value if kind == "output" and step == 2 and rank == 1 else value

        return change

    found = compare(of_rank).training.difference
    assert (found.kind, found.step) == ("module output", 2)


def test_other_numbers_of_steps(compare):
    report = compare(steps=2)
    assert (report.training.difference.kind, report.cause.key) == ("steps", "number-of-steps")


def test_a_backend_that_clips_in_its_step_is_compared_without(compare):
    clips = on("clips", True)
    both = lambda rank: lambda *a: on("clipped", lambda g: 2 * g)(rank)(*a) if a[0] == "clipped" else clips(rank)(*a)  # noqa: E731
    assert compare(both, single=clips(0)).parity


def test_clipping_by_other_norms(compare):
    clips = on("clips", True)
    both = lambda rank: lambda *a: on("clipped", lambda g: 1.5 * g)(rank)(*a) if a[0] == "clipped" else clips(rank)(*a)  # noqa: E731
    report = compare(both, single=clips(0))
    assert (report.training.difference.kind, report.cause.key) == ("clipped gradient", "clipped-by-a-rank")


# -- metrics -------------------------------------------------------------------------------------------------------------


def logged(name, single, ranks, **facts):
    """What is logged in each step."""
    return lambda rank, world: {"values": {name: single if world == 1 else ranks[rank]}, **facts}


@pytest.mark.parametrize(
    ("log", "metrics", "notes"),
    [
        (logged("accuracy", 0.7, (0.6, 0.8)), ["accuracy"], 0),  # rank 0's alone
        (logged("accuracy", 0.7, (0.6, 0.8), reduce="mean"), [], 0),
        (logged("accuracy", 0.75, (0.6, 0.8), reduce="mean", weight=None), ["note"], 1),
        (logged("tokens", 10, (4, 6), reduce="sum"), [], 0),
        (logged("longest", 6, (4, 6), reduce="max"), [], 0),
        (logged("samples_per_second", 7.0, (3.0, 11.0)), ["note"], 1),  # of the machine
        (logged("loss", 3.5, (1.5, 5.5)), ["note"], 1),  # rank 0's own loss: usual
        (logged("accuracy", 0.7, (0.7, 0.7)), [], 0),
    ],
)
def test_logged_numbers(compare, log, metrics, notes):
    report = compare(logs=[log])
    assert report.training.difference is None
    wanted = [m for m in metrics if m != "note"]
    assert [difference.name for difference, _ in report.metrics] == wanted
    assert all(cause.key == "metric-of-one-rank" for _, cause in report.metrics)
    assert len(report.notes) == notes
    assert report.parity is not bool(wanted)
