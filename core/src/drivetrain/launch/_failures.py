"""Which rank failed first, why, and how that is told."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["RankFailure", "exit_code_of", "interrupt_report", "read_record", "report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """How one rank ended.

    Args:
        rank: Global rank.
        returncode: As of `subprocess.Popen`: negative for a signal.
        time: When it failed, seconds since the epoch: of its exception if that is on record, else of its end.
        stopped: The launcher ended it, because of another rank or a signal.
        message: One line, "ValueError: no such layer", or "".
        traceback: The traceback as Python prints it, or "".
        shown: The rank has printed what there is to see.
        where: Its innermost line at that time, "train.py:88 (main)", or "".
        log: File with its output, or None.

    Example:
        >>> RankFailure(rank=1, returncode=-9, time=0.0).describe()
        'was killed by signal 9 (SIGKILL)'
    """

    rank: int
    returncode: int
    time: float
    stopped: bool = False
    message: str = ""
    traceback: str = ""
    shown: bool = False
    where: str = ""
    log: Path | None = None

    def describe(self) -> str:
        """A clause that says how it ended."""
        if self.returncode < 0:
            return f"was killed by signal {-self.returncode} ({_signal_name(-self.returncode)})"
        return f"failed with exit code {self.returncode}"


def exit_code_of(returncode: int) -> int:
    """The code to pass on, as shells have it: 128 + n for signal n.

    Example:
        >>> exit_code_of(7), exit_code_of(-15)
        (7, 143)
    """
    return 128 - returncode if returncode < 0 else returncode


def read_record(path: Path, pid: int) -> Mapping[str, Any]:
    """The details that a rank left of its exception; empty if it left none.

    Files are those of ``drivetrain.launch._worker``, or of torch's ``record`` in a program of the user's.
    """
    try:
        message = json.loads(path.read_text(encoding="utf-8"))["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if isinstance(message, str):
        return {"message": message}
    details = dict(message.get("extraInfo") or {})
    if details.get("pid", pid) != pid:
        return {}
    return {"message": str(message.get("message", "")), **details}


def failure(
    *,
    rank: int,
    pid: int,
    returncode: int,
    ended: float,
    stopped: bool,
    error_file: Path,
    log: Path | None = None,
    where: str = "",
) -> RankFailure:
    """Put together how a rank ended from its exit code and its record."""
    record = read_record(error_file, pid)
    raised = bool(record.get("py_callstack"))
    if raised and stopped and returncode < 0:
        returncode = 1  # our signal came while it was ending by itself
    return RankFailure(
        rank=rank,
        returncode=returncode,
        time=min(ended, float(record.get("time", record.get("timestamp", ended)))),
        stopped=stopped and not raised,
        message=record.get("message", ""),
        traceback=record.get("py_callstack", ""),
        shown=bool(record.get("shown", False)),
        where=record.get("where", where),
        log=log,
    )


def first_of(failures: Sequence[RankFailure]) -> RankFailure:
    """The failure that the others follow from: the earliest of those that the launcher didn't cause.

    A rank that is killed can't note the moment, and others may have raised for its sake before its end is seen here.

    Example:
        >>> killed = RankFailure(rank=1, returncode=-9, time=5.02)
        >>> first_of([RankFailure(rank=0, returncode=1, time=5.0, message="Connection closed by peer"), killed]).rank
        1
    """
    return min(
        failures, key=lambda f: (f.stopped, f.time - (_SEEN_LATE if f.returncode in _FROM_OUTSIDE else 0.0), f.rank)
    )


#: Signals that nobody sends to himself: other ranks' failures follow from these ends.
_FROM_OUTSIDE = frozenset({-9, -7, -11})
_SEEN_LATE = 1.0


def report(failures: Sequence[RankFailure], *, world_size: int, seconds: float, parted: str = "") -> str:
    """What the user sees at the end: the first failure's traceback, then who failed and what became of the others.

    Args:
        failures: The ranks that failed or were stopped.
        world_size: Number of ranks of the job.
        seconds: How long they ran.
        parted: Where ranks parted, if that is known; it says where they stood, too.

    Example:
        >>> print(report([RankFailure(rank=1, returncode=7, time=5.0)], world_size=2, seconds=3.0))
        drivetrain: rank 1 of 2 failed with exit code 7 after 3.0 s, without a traceback.
    """
    first = first_of(failures)
    lines = []
    if first.traceback and not first.shown:
        lines += ["", first.traceback.rstrip("\n"), ""]
    elif not first.traceback and first.log is not None:
        lines += _tail(first.log)
    who = f"rank {first.rank} of {world_size}" if world_size > 1 else "the script"
    ending = "." if first.traceback or first.message or first.returncode < 0 else ", without a traceback."
    stopped = [f.rank for f in failures if f.stopped and f is not first]
    if stopped:
        ending += f" {_ranks(stopped).capitalize()} {'was' if len(stopped) == 1 else 'were'} stopped."
    lines.append(f"drivetrain: {who} {first.describe()} after {seconds:.1f} s{ending}")
    for other in sorted(failures, key=lambda f: f.time):
        if other is not first and not other.stopped:
            later = max(0.0, other.time - first.time)
            message = other.message.partition("\n")[0]
            lines.append(f"  rank {other.rank} {other.describe()} {later:.1f} s later. {message}".rstrip())
    if not parted:
        lines += _standing(f for f in failures if f.stopped and f is not first and f.where)
    hint = _HINTS.get(first.returncode)
    if hint:
        lines.append(f"  {hint}")
    if first.log is not None:
        lines.append(f"  Its output is in {first.log}")
    return "\n".join([*lines, parted] if parted else lines)


def _standing(stopped: Iterable[RankFailure]) -> list[str]:
    """Where the ranks were that have been stopped: there they waited for the one that failed."""
    places: dict[str, list[int]] = {}
    for f in stopped:
        places.setdefault(f.where, []).append(f.rank)
    return [f"  {_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'} at {where}" for where, ranks in places.items()]


def interrupt_report(signum: int, failures: Sequence[RankFailure]) -> str:
    """What the user sees after Ctrl-C or another signal to the launcher.

    Example:
        >>> ended = RankFailure(rank=0, returncode=-2, time=0.0, stopped=True, where="train.py:9 (main)")
        >>> print(interrupt_report(2, [ended]))
        drivetrain: stopped by SIGINT.
          rank 0 was at train.py:9 (main)
    """
    lines = [f"drivetrain: stopped by {_signal_name(signum)}."]
    for f in sorted(failures, key=lambda f: f.rank):
        if f.where:
            lines.append(f"  rank {f.rank} was at {f.where}")
        elif f.returncode == -signal.SIGKILL:
            lines.append(f"  rank {f.rank} didn't end by itself and was killed")
    return "\n".join(lines)


_HINTS = {
    -9: "Nobody asked for that: most often the machine ran out of memory (`dmesg` says so).",
    -11: "That is a crash of native code; the stack at that moment stands in the output above.",
    -7: "That is a bus error: often shared memory (/dev/shm) is too small.",
}


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(str(r) for r in sorted(ranks)[:8]) + (", ..." if len(ranks) > 8 else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _tail(log: Path, lines: int = 20, size: int = 8192) -> list[str]:
    """The last lines of a rank's output."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return ["", *text.splitlines()[-lines:], ""] if text else []
