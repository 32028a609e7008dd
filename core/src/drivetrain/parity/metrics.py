"""Compares what people look at: gathered predictions and logged numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from drivetrain.parity.merging import Run, merge_rows
from drivetrain.parity.record import Event
from drivetrain.parity.results import Difference, Tolerance

__all__ = ["metric_differences"]

#: Names of numbers that differ from run to run anyway.
_OF_THE_MACHINE = re.compile(
    r"time|second|duration|elapsed|speed|per_s|/s\b|throughput|memory|gpu|cpu|utili[sz]ation|eta$", re.I
)
#: Part of a number by which its sources may differ and still be told apart.
_CLOSE = 1e-3


def metric_differences(single: Run, several: Run, steps: int) -> Iterator[Difference]:
    """Gathered values and logged numbers that differ, after the first so many steps. Those of kind "note" are no parting.

    Args:
        single: One process's run.
        several: The other.
        steps: How many steps agree.
    """
    tolerance = Tolerance.of(single.dtype, several.dtype)
    for step in range(steps + 1):
        limit = tolerance.at(step) * 10
        yield from _gathered(single, several, step, limit)
        yield from _logged(single, several, step, limit)


def _gathered(single: Run, several: Run, step: int, limit: float) -> Iterator[Difference]:
    for ours, theirs in zip(single.first.of("gather", step), several.first.of("gather", step), strict=False):
        if ours["rows"] != theirs["rows"]:
            text = f"gather_for_metrics at {theirs['at']} gives {ours['rows']} rows on one process, and {theirs['rows']} on several"
            yield Difference("gathered rows", step, theirs["at"], text, ours["rows"], theirs["rows"])
            continue
        one, many = merge_rows([{}], [ours["values"]]), merge_rows([{}], [theirs["values"]])
        if one is not None and many is not None and (off := one.distance(many)) > max(limit, 0.05):
            text = f"the norm is {one.norm:.6g} on one process and {many.norm:.6g} on several"
            yield Difference("gathered values", step, theirs["at"], text, one.norm, many.norm, off, limit)


def _logged(single: Run, several: Run, step: int, limit: float) -> Iterator[Difference]:
    logs = [list(r.of("log", step)) for r in several.records]
    for place, ours in enumerate(single.first.of("log", step)):
        theirs = [own[place] for own in logs if place < len(own)]
        if not logs[0][place:]:
            return
        for name, mine in ours["values"].items():
            values = [e["values"].get(name) for e in theirs]
            if values[0] is None:
                continue
            reduced = _reduced([v for v in values if v is not None], theirs)
            if abs(mine - reduced) > limit * max(abs(mine), abs(reduced), 1e-6):
                yield _judged(single, several, step, name, mine, reduced, values, theirs[0])


def _reduced(values: Sequence[float], events: Sequence[Event]) -> float:
    """What is stored: rank 0's, or what ``reduce`` asks for."""
    how = events[0]["reduce"]
    if how is None:
        return values[0]
    if how == "mean":
        weights = [1.0 if e["weight"] is None else e["weight"] for e in events][: len(values)]
        total = math.fsum(weights)
        return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / total if total else values[0]
    if how == "sum":
        return math.fsum(values)
    return max(values) if how == "max" else min(values)


def _judged(
    single: Run, several: Run, step: int, name: str, mine: float, theirs: float, values: Sequence[float | None], event: Event
) -> Difference:  # fmt: skip
    text = f"{name!r}, logged at {event['at']}, is {mine:.6g} on one process and {theirs:.6g} on several"
    known = [v for v in values if v is not None]
    if len(known) > 1:
        text += f" (by rank: {', '.join(f'{v:.6g}' for v in known)})"
    if event["reduce"] is None and not _OF_THE_MACHINE.search(name):
        if _is_loss(several, step, theirs):
            return Difference(
                "note", step, name, f"{text}: it is rank 0's loss alone. log(..., reduce='mean') stores that of all"
            )
        averaged = len(known) > 1 and abs(math.fsum(known) / len(known) - mine) <= _CLOSE * max(abs(mine), 1e-6)
        if averaged or not _met(several, step):
            return Difference("metric of one rank", step, name, text, mine, theirs)
    return Difference("note", step, name, f"{text}. Whether that is meant can't be told from here")


def _is_loss(several: Run, step: int, value: float) -> bool:
    losses = [e["loss"] for s in (step - 1, step) for e in several.first.of("loss", s) if e["loss"] is not None]
    return any(abs(loss - value) <= 1e-5 * max(abs(value), 1e-6) for loss in losses)


def _met(several: Run, step: int) -> bool:
    """Whether rank 0 gathered or reduced anything since the last optimizer step."""
    return any(True for kind in ("gather", "met") for _ in several.first.of(kind, step))
