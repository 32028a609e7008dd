"""What a run wrote down: one file of JSON lines per rank, each line an event. Plain data, and whole up to the line where a run died."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.errors import DrivetrainError

__all__ = ["Event", "RankRecord", "RecordWriter", "read_record"]

#: One event: "event" is its kind, "step" the optimizer steps made before it.
Event = Mapping[str, Any]

_PREFIX = "rank-"


class RecordWriter:
    """Appends the events of one rank to its file.

    Args:
        directory: Where; made if it isn't there.
        rank: Whose events they are.

    Example:
        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> RecordWriter(directory, 0).write("start", world=1)
        >>> read_record(directory)[0].events
        ({'event': 'start', 'world': 1},)
    """

    def __init__(self, directory: str | Path, rank: int) -> None:
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"{_PREFIX}{rank}.jsonl").open("a", encoding="utf-8")

    def write(self, event: str, **facts: Any) -> None:
        """Append one event; it is in the file when this returns."""
        self._file.write(json.dumps({"event": event, **facts}) + "\n")
        self._file.flush()


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The events of one rank, in order.

    Args:
        rank: Whose.
        events: What it wrote.
    """

    rank: int
    events: tuple[Event, ...]

    def of(self, kind: str, step: int | None = None) -> Iterator[Event]:
        """Events of a kind; with ``step``, of that step alone.

        Example:
            >>> record = RankRecord(0, ({"event": "loss", "step": 0}, {"event": "loss", "step": 1}))
            >>> [event["step"] for event in record.of("loss", 1)]
            [1]
        """
        return (e for e in self.events if e["event"] == kind and (step is None or e["step"] == step))

    def first(self, kind: str) -> Event:
        """The first event of a kind; an empty one if there is none.

        Example:
            >>> RankRecord(0, ()).first("start")
            {}
        """
        return next(self.of(kind), {})


def read_record(directory: str | Path) -> tuple[RankRecord, ...]:
    """Read what the ranks of a run wrote, by rank.

    A last line that was cut off in the middle is left out.

    Raises:
        DrivetrainError: If there is no record, or a line in the middle of one can't be read.
    """
    files = sorted(Path(directory).glob(f"{_PREFIX}*.jsonl"), key=lambda f: int(f.stem.removeprefix(_PREFIX)))
    records = tuple(RankRecord(int(f.stem.removeprefix(_PREFIX)), tuple(_events(f))) for f in files)
    if not any(record.events for record in records):
        raise DrivetrainError(f"There is no record of a run in {directory}.")
    return records


def _events(file: Path) -> Iterator[Event]:
    lines = file.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            if number == len(lines):
                return
            raise DrivetrainError(f"{file}:{number} isn't a line of a record: {error}.") from error
