"""Finds where two runs part: the first step, and in it the first thing in the order in which one follows from the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.parity.forwards import forward_differences
from drivetrain.parity.merging import Run, Whole, distance, merge_parts, relative
from drivetrain.parity.record import Event
from drivetrain.parity.results import Difference, Tolerance

__all__ = ["Comparison", "compare_training", "mean_loss"]

#: Gradients smaller than this part of all are held against that part: what cancels to almost nothing is rounding.
_SMALL = 1e-2
#: Gradients below this part of all are rounding.
_ROUNDING = 1e-5
#: What gradients may differ by besides rounding: where a function has a kink (ReLU, the largest of a pool), rounding decides on which side a value is.
_KINKS = 1e-2
#: Weights that rounding may have moved by this part of them are arbitrary: their distance says nothing.
_ARBITRARY = 0.1
#: Largest difference of what all ranks should hold alike, bit for bit.
_ALIKE = 1e-5


@dataclass(slots=True)
class Comparison:
    """What comparing two runs found about training.

    Args:
        difference: Where they part; None if they don't.
        steps: Steps that were compared and agree.
        largest: Largest relative difference that was seen and tolerated, by kind ("loss", "gradient", ...).
    """

    difference: Difference | None = None
    steps: int = 0
    largest: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Step:
    """One step under comparison, with what the steps before it have left."""

    single: Run
    several: Run
    tolerance: Tolerance
    seen: dict[str, float]
    number: int = 0
    #: By model and parameter: how far weights may have gone apart so far because an optimizer made steps of rounding.
    drift: dict[tuple[int, str], float] = field(default_factory=dict)
    #: One process's, after the last step.
    weights: dict[tuple[int, str], Whole] = field(default_factory=dict)
    #: Differences of gradients that were tolerated, added up: what follows from them is no fault either.
    carried: float = 0.0

    def note(self, kind: str, off: float) -> None:
        self.seen[kind] = max(self.seen.get(kind, 0.0), off)

    def limit(self, tolerance: Tolerance | None = None) -> float:
        """How far numbers may be apart now."""
        return (tolerance or self.tolerance).at(self.number) + self.carried


def compare_training(single: Run, several: Run) -> Comparison:
    """Compare all that training does, step by step.

    Args:
        single: One process's run over the whole batches.
        several: The run of several.
    """
    tolerance = Tolerance.of(single.dtype, several.dtype)
    result = Comparison()
    steps = min(single.steps, several.steps)
    step = _Step(single, several, tolerance, result.largest)
    for number in range(max(steps, 1 + _last_begun(single, several))):
        step.number = number
        checks: list[Callable[[_Step], Iterator[Difference]]] = [_initial, _forwards, _losses, _window]
        if number < steps:
            checks += [_gradients, _rates, _after]
        result.difference = next((found for check in checks for found in check(step)), None)
        if result.difference is not None:
            break
        result.steps = min(number + 1, steps)
    if result.difference is None and single.ended and several.ended and single.steps != several.steps:
        result.difference = Difference(
            "steps", steps, "", f"one process makes {single.steps} steps, {len(several.records)} make {several.steps}"
        )
    return result


def _last_begun(single: Run, several: Run) -> int:
    """The last step in which every rank of both runs went forward."""
    runs = (*single.records, *several.records)
    return min(max((int(e["step"]) for e in r.of("forward")), default=-1) for r in runs)


# -- weights -------------------------------------------------------------------------------------------------------------


def _initial(step: _Step) -> Iterator[Difference]:
    if step.number == 0:
        yield from _states(step, "initial", "initial weights", _ALIKE)


def _after(step: _Step) -> Iterator[Difference]:
    moved = [ours for ours, _ in _tensor_pairs(step, "after")]
    for index, (ours, theirs) in enumerate(_tensor_pairs(step, "used")):
        for name in set(ours) & set(theirs):
            before, after = step.weights.get((index, name)), moved[index].get(name)
            elements = sum(ours[name].decades.values())
            if before is None or after is None or not elements:
                continue
            size = distance(before.sums, after.sums) / math.sqrt(elements)  # of an element's step
            part = max(step.tolerance.base, ours[name].away(theirs[name]))
            off = max(whole[name].normalized_rounding(part) for whole in (ours, theirs))
            step.drift[index, name] = step.drift.get((index, name), 0.0) + 2 * size * off
    yield from _states(step, "after", "weights", step.limit())


def _states(step: _Step, event: str, kind: str, tolerance: float) -> Iterator[Difference]:
    for index, (ours, theirs) in enumerate(_tensor_pairs(step, event)):
        for name in ours:
            a, b = ours[name], theirs.get(name)
            step.weights[index, name] = a
            if b is None:
                continue
            what = kind if _is_parameter(step, index, name) else "buffer"
            if what != "buffer" and b.spread > _ALIKE:
                yield _unlike(f"{kind} differ between ranks", step, index, name, b)
            off = a.away(b)
            drift = relative(step.drift.get((index, name), 0.0), max(a.norm, b.norm, 1e-30))
            if off > tolerance + drift:
                yield Difference(
                    what, step.number, name, _norms(a, b, step, index), a.norm, b.norm, off, tolerance + drift
                )
            if drift < _ARBITRARY:
                step.note(what, off)


def _is_parameter(step: _Step, index: int, name: str) -> bool:
    models = list(step.several.first.of("model"))
    return index < len(models) and name in models[index]["parameters"]


def _tensor_pairs(step: _Step, event: str) -> Iterator[tuple[dict[str, Whole], dict[str, Whole]]]:
    """For each model: whole tensors by name, of one process and of several."""
    singles = step.single.together(event, step.number)
    manys = step.several.together(event, step.number, all_ranks=True)
    for ours, theirs in zip(singles, manys, strict=False):
        yield _merged(ours), _merged(theirs)


def _merged(events: Sequence[Event]) -> dict[str, Whole]:
    names = dict.fromkeys(n for e in events for n in e["tensors"])
    found = {name: merge_parts([e["tensors"].get(name) for e in events]) for name in names}
    return {name: whole for name, whole in found.items() if whole is not None}


def _unlike(kind: str, step: _Step, index: int, name: str, whole: Whole) -> Difference:
    norms = ", ".join(f"rank {r}: {'none' if n is None else f'{n:.6g}'}" for r, n in enumerate(whole.norms))
    text = f"norms are {norms}{step.several.which(index)}"
    return Difference(kind, step.number, name, text, relative=whole.spread, tolerance=_ALIKE)


def _norms(a: Whole, b: Whole, step: _Step, index: int) -> str:
    run = step.several
    return f"the norm is {a.norm:.6g} on one process and {b.norm:.6g} on {len(run.records)}{run.which(index)}"


# -- forward and losses --------------------------------------------------------------------------------------------------


def _forwards(step: _Step) -> Iterator[Difference]:
    tolerance = step.limit()
    complete = step.number < min(step.single.steps, step.several.steps)
    for found in forward_differences(step.single, step.several, step.number, tolerance, complete=complete):
        if isinstance(found, Difference):
            yield found
        else:
            step.note("module outputs", found)


def _losses(step: _Step) -> Iterator[Difference]:
    pairs = zip(step.single.together("loss", step.number), step.several.together("loss", step.number), strict=False)
    for (ours,), theirs in pairs:
        mine, all_of_them = ours["loss"], mean_loss(theirs)
        if mine is None or all_of_them is None:
            continue
        limit = max(step.limit(), step.limit(Tolerance.of(ours["dtype"])))
        off = _loss_distance(mine, all_of_them)
        if off > limit:
            ranks = ", ".join(f"{e['loss']:.6g}" for e in theirs)
            text = f"it is {mine:.6g} on one process, and {all_of_them:.6g} on {len(step.several.records)} (by rank: {ranks})"
            yield Difference("loss", step.number, "", text, mine, all_of_them, off, limit)
        step.note("loss", off)


def mean_loss(events: Sequence[Event]) -> float | None:
    """The loss over all ranks' items of one micro-batch; None if a rank's isn't a number."""
    if any(e["loss"] is None for e in events):
        return None
    for key in ("weight", "counted"):
        if all(e[key] is not None for e in events) and any(e[key] for e in events):
            total = math.fsum(e[key] for e in events)
            return math.fsum(e["loss"] * e[key] for e in events if e[key]) / total
    return math.fsum(e["loss"] for e in events) / len(events)


def _loss_distance(a: float, b: float) -> float:
    if not (math.isfinite(a) and math.isfinite(b)):
        return 0.0 if math.isfinite(a) == math.isfinite(b) else math.inf
    return abs(a - b) / max(abs(a), abs(b), 1e-2)


def _window(step: _Step) -> Iterator[Difference]:
    if step.number >= min(step.single.steps, step.several.steps):
        return
    ours = sum(1 for _ in step.single.first.of("loss", step.number))
    theirs = [sum(1 for _ in r.of("loss", step.number)) for r in step.several.records]
    if any(n != ours for n in theirs):
        text = f"one process calls backward() {ours} times, the ranks {', '.join(map(str, theirs))} times"
        yield Difference("window", step.number, "", text)


# -- gradients and the step ------------------------------------------------------------------------------------------------


def _gradients(step: _Step) -> Iterator[Difference]:
    clips = any(True for _ in step.single.first.of("gradients", step.number))
    used = "used gradient" if clips else "gradient"
    for event, kind in (("gradients", "gradient"), ("clipped", "clipped gradient"), ("used", used)):
        if clips and event != "gradients" and _clips_later(step):
            continue
        for index, (ours, theirs) in enumerate(_tensor_pairs(step, event)):
            if not theirs or not ours:
                continue  # the backend keeps gradients where they can't be looked at
            yield from _gradients_of(step, kind, index, ours, theirs)


def _clips_later(step: _Step) -> bool:
    """Whether the backend of several processes clips in its own step: gradients are then as they were before."""
    before, after = (
        [tuple(w.square for w in pair[1].values()) for pair in _tensor_pairs(step, event)]
        for event in ("gradients", "clipped")
    )
    mine = [
        [tuple(w.square for w in pair[0].values()) for pair in _tensor_pairs(step, event)]
        for event in ("gradients", "clipped")
    ]
    return before == after and mine[0] != mine[1]


def _gradients_of(
    step: _Step, kind: str, index: int, ours: Mapping[str, Whole], theirs: Mapping[str, Whole]
) -> Iterator[Difference]:
    size = len(step.several.records)
    tolerance = step.limit() * step.tolerance.gradients + _KINKS
    total = math.sqrt(math.fsum(a.square for a in ours.values()))
    apart: list[Difference] = []
    unlike: list[Difference] = []
    distances: list[float] = []
    for name in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None or any(n is None for n in b.norms):
            text = f"one process has {'none' if a is None else 'one'}, of {size} ranks {_having(b)} have one"
            if not (b is None and a is not None and a.norm == 0.0):
                yield Difference("missing gradient", step.number, name, text)
            continue
        if b.spread > _ALIKE and max(n or 0.0 for n in b.norms) > _ROUNDING * total:
            unlike.append(_unlike(f"{kind}s differ between ranks", step, index, name, b))
        off = a.away(b, floor=_SMALL * total)
        if off > tolerance:
            apart.append(Difference(kind, step.number, name, _norms(a, b, step, index), a.norm, b.norm, off, tolerance))
        step.note(kind, off)
        distances.append(distance(a.sums, b.sums))
    for found in (unlike, apart):
        if found:  # gradients come from the loss: the last one is the first to part
            yield found[-1].among(len(found), len(ours))
    if kind == "gradient":
        step.carried += relative(math.hypot(*distances), total)


def _having(whole: Whole | None) -> int:
    return 0 if whole is None else sum(n is not None for n in whole.norms)


def _rates(step: _Step) -> Iterator[Difference]:
    size = len(step.several.records)
    pairs = zip(
        step.single.together("step", step.number),
        step.several.together("step", step.number, all_ranks=True),
        strict=False,
    )
    for (ours,), theirs in pairs:
        for rank, other in enumerate(theirs):
            for i, (mine, group) in enumerate(zip(ours["groups"], other["groups"], strict=False)):
                for key in mine:
                    off = relative(abs(mine[key] - group.get(key, math.nan)), abs(mine[key]), abs(group.get(key, 0.0)))
                    if off > 1e-6:
                        text = f"{key} is {mine[key]:.6g} on one process and {group[key]:.6g} on {size} (rank {rank})"
                        yield Difference("setting", step.number, _group(key, i, ours), text, mine[key], group[key], off)
        if any(e["skipped"] != ours["skipped"] for e in theirs):
            skipped = [e["skipped"] for e in theirs]
            yield Difference("skipped step", step.number, "", f"one process: {ours['skipped']}, ranks: {skipped}")


def _group(key: str, index: int, event: Event) -> str:
    groups: Sequence[Any] = event["groups"]
    return key if len(groups) == 1 else f"{key} of group {index}"
