"""What the ranks of this machine have done together, gathered from the files that they leave and by asking those that run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drivetrain import _marks
from drivetrain._places import short
from drivetrain.launch._failures import RankFailure

__all__ = ["Entry", "Evidence", "collect", "prepare", "with_end"]

_POLL = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One collective of one rank.

    Args:
        group: Name of its process group; "" for what ranks noted themselves, in the order in which they all do it.
        number: Its number in the group, equal on all ranks for what they do together.
        operation: As the communication library calls it, "all_reduce".
        time: When it began, nanoseconds since the epoch.
        name: What the user's line calls, "backward".
        places: Lines of the user's code, innermost first: file, line, function.
        size: The tensors that went in, "[4] float"; "" where ranks' sizes may differ.
        waiting: Whether it hadn't ended when the rank was asked.
        step: Optimizer steps before it; None if that isn't known.
        description: Of the group, "default_pg".
        micro_batch: Place in the accumulation window, if it is known.
    """

    group: str
    number: int
    operation: str
    time: int
    name: str
    places: tuple[tuple[str, int, str], ...]
    size: str = ""
    waiting: bool = False
    step: int | None = None
    description: str = ""
    micro_batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known of one rank.

    Args:
        rank: Global rank.
        recorded: Collectives by the flight recorder, oldest first; empty if the rank couldn't be asked or its torch has none.
        noted: What it noted itself, oldest first.
        groups: The ranks of each process group that it is in, by its name.
        step: Optimizer steps so far; None for a script without an Accelerator.
        where: Its innermost line, "train.py:88 (main)", if it runs.
        ended: How it ended, "raised ValueError: no data"; "" if it runs.
        failed: It failed by itself.
        consequence: It failed because of another rank: a collective failed or timed out.
        aborted: Native code ended it, which communication libraries do.
    """

    rank: int
    recorded: tuple[Entry, ...] = ()
    noted: tuple[Entry, ...] = ()
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    step: int | None = None
    where: str = ""
    ended: str = ""
    failed: bool = False
    consequence: bool = False
    aborted: bool = False

    @property
    def last(self) -> Entry | None:
        """Its latest collective."""
        found = self.recorded or self.noted
        return max(found, key=lambda entry: entry.time) if found else None

    @property
    def stands(self) -> tuple[tuple[str, int, str], ...]:
        """The lines of the user's code where it is: of the collective in which it waits, or else the innermost one."""
        last = self.last
        if last is not None and last.waiting:
            return last.places
        place = re.fullmatch(r"(.*):(\d+) \((.*)\)", self.where)
        return ((place[1], int(place[2]), place[3]),) if place is not None else ()


def prepare(error_file: Path) -> None:
    """Lay out, before a rank starts, what it needs to leave evidence."""
    _marks.create(_marks.marks_file(error_file))
    if hasattr(os, "mkfifo"):
        os.mkfifo(_beside(error_file, "ask"))


def collect(error_files: Mapping[int, Path], running: Iterable[int], *, seconds: float) -> dict[int, Evidence]:
    """What is known of each rank. Those that run are asked, and go on as if nothing had been.

    Args:
        error_files: By rank.
        running: Ranks that run.
        seconds: How long to wait for their answers.
    """
    _ask([error_files[rank] for rank in running], seconds=seconds)
    return {rank: _read(rank, file) for rank, file in error_files.items()}


def with_end(evidence: Evidence, failure: RankFailure | None, *, where: str) -> Evidence:
    """The evidence of a rank with how it ended.

    Args:
        evidence: What it left.
        failure: How it failed; None if it runs, or has ended well.
        where: Its innermost line while it runs, "" if it has ended.
    """
    if failure is None or failure.stopped:
        return replace(evidence, where=where)
    if _CONSEQUENCE.search(failure.message):
        return replace(evidence, ended=_raised(failure), consequence=True)
    ended = _raised(failure) if failure.message else failure.describe()
    aborted = failure.returncode == -signal.SIGABRT
    return replace(evidence, ended=ended, failed=True, aborted=aborted)


#: What torch, its communication libraries and Drivetrain say where a collective failed because another rank didn't come.
_CONSEQUENCE = re.compile(
    r"^(DistributedOperation|Agreed|Dist\w*)Error|gloo/|NCCL|Timed out waiting|Connection (closed|reset)|Broken pipe"
)


def _raised(failure: RankFailure) -> str:
    message = failure.message.partition("\n")[0]
    message = message if len(message) <= 120 else f"{message[:117]}..."
    return f"raised {message}" + (f" at {short(failure.where)}" if failure.where else "")


def _beside(error_file: Path, suffix: str) -> Path:
    return error_file.with_name(f"{error_file.name}.{suffix}")


def _ask(error_files: Iterable[Path], *, seconds: float) -> None:
    """Have ranks write down their collectives, and wait until they have."""
    waiting: dict[Path, int | None] = {}
    for error_file in error_files:
        answer = _beside(error_file, "flight")
        before = _identity(answer)
        with contextlib.suppress(OSError):  # it isn't a Python script, is just starting, or has ended
            pipe = os.open(_beside(error_file, "ask"), os.O_WRONLY | os.O_NONBLOCK)
            try:
                os.write(pipe, b"\n")
            finally:
                os.close(pipe)
            waiting[answer] = before
    deadline = time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        time.sleep(_POLL)
        waiting = {file: before for file, before in waiting.items() if _identity(file) == before}


def _identity(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return None


def _read(rank: int, error_file: Path) -> Evidence:
    try:
        log = _marks.read(_marks.marks_file(error_file).read_bytes())
    except OSError:
        log = _marks.MarkLog(())
    try:
        flight = json.loads(_beside(error_file, "flight").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        flight = {"groups": {}, "entries": [], "step": None}
    if flight["step"] is not None:  # later than the last note
        log = _marks.MarkLog(log.marks, *flight["step"])
    noted = tuple(_noted(mark) for mark in log.marks)
    return Evidence(
        rank=rank,
        recorded=tuple(_recorded(entry, log) for entry in flight["entries"] if not entry["p2p"]),
        noted=noted,
        groups={name: tuple(ranks) for name, ranks in flight["groups"].items()},
        step=log.step if log.marks else None,
    )


def _noted(mark: _marks.Mark) -> Entry:
    places = ((mark.file, mark.line, mark.function),) if mark.file else ()
    return Entry(
        group="",
        number=mark.number,
        operation=mark.what,
        time=mark.time,
        name=mark.what,
        places=places,
        step=mark.step,
        micro_batch=mark.micro_batch,
    )


def _recorded(entry: Mapping[str, Any], log: _marks.MarkLog) -> Entry:
    """An entry of the flight recorder, with the step, and the place from the rank's own notes where the recorder has none.

    Native threads that run a backward on an accelerator have no Python frames.
    """
    place = log.before(entry["time"])
    places = tuple((file, line, function) for file, line, function in entry["places"])
    name = entry["name"]
    if not places and place is not None:
        places, name = ((place.file, place.line, place.function),), place.what
    return Entry(
        group=entry["group"],
        number=entry["number"],
        operation=entry["operation"],
        time=entry["time"],
        name=name or entry["operation"],
        places=places,
        size=_size(entry),
        waiting=entry["waiting"],
        step=log.step_at(entry["time"]),
        description=entry["description"],
    )


#: Operations to which each rank brings as much as the others.
_EQUAL = (
    "all_reduce",
    "allreduce",
    "broadcast",
    "all_gather",
    "allgather",
    "_all_gather_base",
    "_allgather_base",
    "reduce",
    "reduce_scatter",
)


def _size(entry: Mapping[str, Any]) -> str:
    if entry["operation"] not in _EQUAL:
        return ""
    kinds = [*entry["dtypes"], *[""] * len(entry["sizes"])]
    return ", ".join(f"{size} {kind.lower()}".strip() for size, kind in zip(entry["sizes"], kinds, strict=False))
