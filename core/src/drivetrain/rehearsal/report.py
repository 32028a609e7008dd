"""What a rehearsal found, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Failure", "Message", "Report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Equal messages of one line of the script.

    Args:
        kind: "all_reduce", "all_gather", ...
        group_size: Number of processes that take part.
        count: How many there were.
        nbytes: Bytes of all of them together, on this process.
        where: The script's line; empty for none.
    """

    kind: str
    group_size: int
    count: int
    nbytes: int
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rehearsal ended early.

    Args:
        type: The error's class.
        message: What it says.
        where: The script's line; empty for none.
        traceback: All of it.
    """

    type: str
    message: str
    where: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one rank of a job needs, sends, and stumbles over.

    Args:
        rank: Which rank was rehearsed.
        world_size: Of how many.
        backend: Name of the backend; empty if the script made no Accelerator.
        precision: Name of the precision.
        facts: What the backend says of itself (mesh, units, ...).
        steps: Optimizer steps that were made.
        seconds: How long the rehearsal took.
        memory: Bytes by category at the end of the last step.
        peak: Most bytes at once, from the first forward pass on.
        at_peak: Bytes by category then.
        setup_peak: Most bytes at once before: on an accelerator the whole model is in the host's memory then.
        setup: Messages before the first forward pass.
        per_step: Messages of the last whole step.
        sequence: All messages in order, as ``(kind, nbytes, group_size, step)``.
        reads: Lines that read values, and how often, where values were assumed.
        notes: What was left out.
        failure: Why it ended early, or None.

    Example:
        >>> report = Report(rank=0, world_size=2, steps=1, peak=10)
        >>> Report.from_dict(report.to_dict()) == report
        True
    """

    rank: int
    world_size: int
    backend: str = ""
    precision: str = ""
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    steps: int = 0
    seconds: float = 0.0
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)
    peak: int = 0
    at_peak: Mapping[str, int] = dataclasses.field(default_factory=dict)
    setup_peak: int = 0
    setup: Sequence[Message] = ()
    per_step: Sequence[Message] = ()
    sequence: Sequence[tuple[str, int, int, int]] = ()
    reads: Mapping[str, int] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()
    failure: Failure | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """What `to_dict` returned, also after a way through JSON."""
        values = dict(data)
        for name in ("setup", "per_step"):
            values[name] = tuple(Message(**message) for message in values.get(name, ()))
        values["sequence"] = tuple(tuple(entry) for entry in values.get("sequence", ()))
        values["notes"] = tuple(values.get("notes", ()))
        if values.get("failure") is not None:
            values["failure"] = Failure(**values["failure"])
        return cls(**values)
