"""Compares the forwards of one step: samples, inputs, what ran, and what came out of each module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from drivetrain.parity.merging import Rows, Run, merge_rows
from drivetrain.parity.record import Event
from drivetrain.parity.results import Difference

__all__ = ["forward_differences"]


def forward_differences(
    single: Run, several: Run, step: int, tolerance: float, *, complete: bool
) -> Iterator[Difference | float]:
    """Differences of a step's forwards in the order in which they follow from each other, and distances that are tolerated.

    Args:
        single: One process's run.
        several: The other.
        step: Which.
        tolerance: How far outputs may be apart.
        complete: Whether all ranks came to the step's end.
    """
    for (ours,), theirs in zip(single.together("forward", step), several.together("forward", step), strict=False):
        everyone = [ours, *theirs]
        yield from _samples(step, ours, theirs)
        yield from _inputs(step, ours, theirs, tolerance)
        yield from _flags(step, "frozen", "frozen parameters", everyone)
        yield from _flags(step, "evaluating", "modules in evaluation", everyone)
        yield from _calls(step, everyone)
        yield from _outputs(step, ours, theirs, tolerance, several.which(ours["model"]))
    counts = [sum(1 for _ in r.of("forward", step)) for r in (*single.records, *several.records)]
    if complete and len(set(counts)) > 1:
        text = f"the model is called {counts[0]} times by one process, {', '.join(map(str, counts[1:]))} times by the ranks"
        yield Difference("calls", step, "", text)


def _counted(event: Event) -> list[Any]:
    samples: list[Any] = event["samples"]
    return samples[: event["counted"]]


def _samples(step: int, ours: Event, theirs: Sequence[Event]) -> Iterator[Difference]:
    if all(e["samples"] is not None for e in (ours, *theirs)):
        one, many = Counter(_counted(ours)), Counter(s for e in theirs for s in _counted(e))
        if one != many:
            parts = [f"rank {r} {_few(_counted(e))}" for r, e in enumerate(theirs)]
            yield Difference("samples", step, "", f"one process has {_few(_counted(ours))}; {'; '.join(parts)}")
        return
    rows, by_rank = _rows(ours), [_rows(e) for e in theirs]
    if None not in (rows, *by_rank) and rows != sum(n for n in by_rank if n is not None):
        text = f"one process has {rows} rows, the ranks {' + '.join(map(str, by_rank))}"
        yield Difference("rows", step, "", text)


def _rows(event: Event) -> int | None:
    """Rows that count in a forward."""
    counted: int | None = event["counted"]
    return event["rows"] if counted is None else counted


def _few(samples: Sequence[Any]) -> str:
    text = ", ".join(str(s) for s in samples[:6])
    return f"[{text}{', ...' if len(samples) > 6 else ''}]"


def _inputs(step: int, ours: Event, theirs: Sequence[Event], tolerance: float) -> Iterator[Difference]:
    for name, sketch in ours["inputs"].items():
        pair = _pair(ours, theirs, sketch, [e["inputs"].get(name) for e in theirs])
        if pair is None:
            continue
        off = pair[0].distance(pair[1])
        if off > tolerance:  # they may be what another model gave
            text = f"the norm is {pair[0].norm:.6g} on one process and {pair[1].norm:.6g} over the ranks"
            yield Difference("inputs", step, name, text, pair[0].norm, pair[1].norm, off, tolerance)


def _pair(
    ours: Event, theirs: Sequence[Event], sketch: dict[str, Any] | None, sketches: Sequence[dict[str, Any] | None]
) -> tuple[Rows, Rows] | None:
    """Rows of one process and of all ranks, in the same order; None where they can't be compared."""
    if sketch is None or any(s is None or s["shape"] != sketch["shape"] for s in sketches):
        return None
    one, many = merge_rows([ours], [sketch]), merge_rows(theirs, sketches)
    if one is None or many is None:
        return None
    if all(e["samples"] is not None for e in (ours, *theirs)):
        first, second = _counted(ours), [s for e in theirs for s in _counted(e)]
        if len(first) == len(one.squares) and len(second) == len(many.squares):
            one = one.in_order(sorted(range(len(first)), key=lambda i: str(first[i])))
            many = many.in_order(sorted(range(len(second)), key=lambda i: str(second[i])))
    return one, many


def _flags(step: int, key: str, kind: str, everyone: Sequence[Event]) -> Iterator[Difference]:
    sets = [set(e[key]) for e in everyone]
    for name in sorted(set.union(*sets) - set.intersection(*sets)):
        where = _where([name in s for s in sets])
        yield Difference(kind, step, name, where)


def _where(found: Sequence[bool]) -> str:
    ranks = [str(r) for r, yes in enumerate(found[1:]) if yes]
    who = (["one process"] if found[0] else []) + ([f"rank {', '.join(ranks)}"] if ranks else [])
    return f"so it is on {' and '.join(who)} alone"


def _calls(step: int, everyone: Sequence[Event]) -> Iterator[Difference]:
    sequences = [[m["name"] for m in e["modules"]] for e in everyone]
    if all(s == sequences[0] for s in sequences):
        return
    counts = [Counter(s) for s in sequences]
    for name in dict.fromkeys(n for s in sequences for n in s):
        numbers = [c[name] for c in counts]
        if len(set(numbers)) > 1:
            text = f"it runs {numbers[0]} times on one process, {', '.join(map(str, numbers[1:]))} times on the ranks"
            yield Difference("calls", step, name, text, type=_type(everyone, name))
            return
    yield Difference("calls", step, "", "modules run in different orders")


def _type(everyone: Sequence[Event], name: str) -> str:
    return next((str(m["type"]) for e in everyone for m in e["modules"] if m["name"] == name), "")


def _outputs(
    step: int, ours: Event, theirs: Sequence[Event], tolerance: float, which: str
) -> Iterator[Difference | float]:
    for place, module in enumerate(ours["modules"]):
        others = [e["modules"][place] for e in theirs]
        for key, sketch in module["outputs"].items():
            pair = _pair(ours, theirs, sketch, [o["outputs"].get(key) for o in others])
            if pair is None:
                continue
            off = pair[0].distance(pair[1])
            if off > tolerance:
                text = f"the norm is {pair[0].norm:.6g} on one process and {pair[1].norm:.6g} over the ranks{which}"
                yield Difference(
                    "module output",
                    step,
                    module["name"],
                    text,
                    pair[0].norm,
                    pair[1].norm,
                    off,
                    tolerance,
                    module["type"],
                )
            yield off
