"""The verdict: parity, or where two runs part and why, for people and for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.parity.causes import likely_cause
from drivetrain.parity.comparing import Comparison, compare_training
from drivetrain.parity.merging import Run
from drivetrain.parity.metrics import metric_differences
from drivetrain.parity.record import read_record
from drivetrain.parity.results import Cause, Difference

__all__ = ["Report", "compare_records"]


@dataclass(frozen=True, slots=True)
class Report:
    """What comparing the records of two runs found.

    Args:
        single, several: The runs.
        training: What was found about training.
        cause: Why they part, if they do.
        metrics: Gathered values and logged numbers that differ, with causes.
        notes: What else is worth knowing.
    """

    single: Run
    several: Run
    training: Comparison
    cause: Cause | None = None
    metrics: tuple[tuple[Difference, Cause], ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def parity(self) -> bool:
        """Whether the runs agree, on at least one step."""
        return self.training.difference is None and not self.metrics and self.training.steps > 0

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        found = self.training.difference
        return {
            "parity": self.parity,
            "steps": self.training.steps,
            "processes": len(self.several.records),
            "backend": self.several.start.get("backend"),
            "dtype": self.several.dtype,
            "difference": None if found is None else _plain(found),
            "cause": None if self.cause is None else asdict(self.cause),
            "metrics": [{"difference": _plain(d), "cause": asdict(c)} for d, c in self.metrics],
            "largest": {k: _finite(v) for k, v in self.training.largest.items()},
            "notes": list(self.notes),
        }

    def text(self) -> str:
        """For people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        size, steps = len(self.several.records), self.training.steps
        where = f"{size} processes ({self.several.start.get('backend')}, {self.several.dtype})"
        found = self.training.difference
        if found is not None:
            yield from _about(found, self.cause, f"One process and {where} part")
            yield f"  {steps} step(s) before agree." if steps else "  It is the first step."
        elif steps:
            largest = ", ".join(f"{kind} {off:.0e}" for kind, off in self.training.largest.items())
            yield f"Parity holds over {steps} steps: one process and {where} train the same."
            yield f"  Largest relative differences: {largest}."
        else:
            yield "No optimizer step is on record: the script makes none with a prepared optimizer, or ended before."
        for difference, cause in self.metrics:
            yield from _about(difference, cause, "A metric differs")
        yield from (f"  note: {note}" for note in self.notes)


def _plain(found: Difference) -> dict[str, Any]:
    return {k: _finite(v) for k, v in asdict(found).items()}


def _finite(value: Any) -> Any:
    """JSON has no numbers for what isn't finite."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _about(found: Difference, cause: Cause | None, opening: str) -> Iterator[str]:
    what = found.kind
    if found.name:
        what += f" of {found.name}" + (f" ({found.type})" if found.type else "")
    if found.of > 1:
        what += f" ({found.count} of {found.of} tensors)"
    yield f"{opening} at step {found.step + 1}: {what}"
    off = "" if found.relative is None else f"; relative difference {found.relative:.1e}"
    allowed = "" if found.tolerance is None else f", tolerance {found.tolerance:.0e}"
    yield f"  {found.text}{off}{allowed}."
    if cause is not None:
        yield f"  Likely cause [{cause.key}]: {cause.text}"
        yield f"  What to do: {cause.remedy}"


def compare_records(single: str | Path, several: str | Path) -> Report:
    """Compare what two runs of a script recorded.

    Args:
        single: Directory of the record of one process.
        several: That of the run of several.

    Raises:
        DrivetrainError: If a record isn't there or can't be read.
    """
    one, many = Run(read_record(single)), Run(read_record(several))
    training = compare_training(one, many)
    cause = None if training.difference is None else likely_cause(training.difference, one, many)
    found = list(metric_differences(one, many, training.steps)) if training.difference is None else []
    metrics: dict[str, Difference] = {}
    for difference in found:
        if difference.kind != "note":
            metrics.setdefault(difference.name, difference)
    notes = [*_notes(one, many), *{d.name: d.text for d in reversed(found) if d.kind == "note"}.values()]
    return Report(
        one, many, training, cause, tuple((d, likely_cause(d, one, many)) for d in metrics.values()), tuple(notes)
    )


def _notes(one: Run, many: Run) -> Iterator[str]:
    quieted = [name for event in many.first.of("model") for name in event["quieted"]]
    if quieted:
        yield f"dropout was switched off to compare ({_list(quieted)}): its masks can't be the same on several processes."
    drawing = {m["name"] for r in many.records for e in r.of("forward") for m in e["modules"] if m["draws"]}
    if drawing:
        yield f"{_list(sorted(drawing))} draw random numbers in forward."
    for run, what in ((one, "one process"), (many, "")):
        for record in run.records:
            if not record.first("end"):
                last = record.events[-1]
                yield f"the record of {what or f'rank {record.rank}'} stops in step {last.get('step', 0) + 1}, after {last['event']!r}."
    forward = many.first.first("forward")
    if forward and forward["rows"] is None:
        yield "the batch's rows couldn't be told from the model's inputs: outputs of modules weren't compared."
    if not any(e["tensors"] for e in many.first.of("used")) and any(True for _ in many.first.of("step")):
        yield "the backend keeps gradients where they can't be looked at: weights after each step were compared."


def _list(names: list[str]) -> str:
    shown = ", ".join(n or "the model" for n in names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown
