"""Reading what the JSONL tracker wrote.

A run's directory has

- ``run.json``: project, run id, status ("running", "finished", "failed", "killed"), times;
- ``metrics.jsonl``: one object per ``log`` call: ``{"step": 3, "time": 1.7e9, "values": {"loss": 0.5}}``;
- ``media.jsonl``: one object per image, figure, table, histogram, text and artifact, with its files;
- ``config.json`` and ``summary.json``: hyperparameters and final values, nested names joined with ``/``;
- ``images/``, ``figures/``, ``tables/``, ``artifacts/``: the files.

NaN and infinities are stored as ``"@float:nan"``, ``"@float:inf"``, ``"@float:-inf"`` (see `drivetrain.tracking.encoding`). A line
``{"resumed_after": 100, ...}`` says that the run went on from a checkpoint of step 100: rows before it with a higher step are void.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.errors import TrackerError
from drivetrain.interfaces.tracker import Row
from drivetrain.tracking.encoding import decode, read_lines

__all__ = ["Media", "Run", "read_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """Something logged that isn't a row.

    Args:
        kind: "images", "figure", "table", "histogram", "text" or "artifact".
        name: As given by the user.
        step: As given by the user.
        time: Seconds since the epoch.
        files: Where it is stored.
        data: The text; or ``{"columns", "rows"}`` of a table; or ``{"counts", "edges", "min", ...}`` of a histogram.
    """

    kind: str
    name: str
    step: int | None
    time: float
    files: tuple[Path, ...] = ()
    data: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as it was logged.

    Args:
        directory: Where it is.
        project: The project's name.
        run_id: With which it can be resumed.
        status: "running" (or killed without notice), "finished", "failed" or "killed".
        config: Hyperparameters.
        summary: Final values.
        rows: The rows in order.
        media: All else in order.
    """

    directory: Path
    project: str
    run_id: str
    status: str
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    media: list[Media] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names of the logged values, in the order in which they first came."""
        return list(dict.fromkeys(name for row in self.rows for name in row.values))

    def series(self, name: str) -> list[tuple[int | None, Any]]:
        """Steps and values of one name, in the order in which they were logged.

        Raises:
            TrackerError: If nothing was logged under that name.
        """
        points = [(row.step, row.values[name]) for row in self.rows if name in row.values]
        if not points:
            from drivetrain.config.options import nearest

            raise TrackerError(f"The run {self.run_id} has no values named {name!r}.{nearest(name, self.names)}")
        return points

    def find(self, kind: str, name: str | None = None) -> list[Media]:
        """What was logged of one kind, under one name if given."""
        return [m for m in self.media if m.kind == kind and name in (None, m.name)]


def read_run(path: str | Path) -> Run:
    """Read a run.

    Args:
        path: The run's directory, or one that holds exactly one run.

    Raises:
        TrackerError: If there is no run, or there are several.

    Example:
        >>> read_run("/nowhere")
        Traceback (most recent call last):
        ...
        drivetrain.errors.TrackerError: There is no run in /nowhere.
    """
    directory = _locate(Path(path))
    about = decode((directory / "run.json").read_bytes())
    rows = [Row(d["values"], d["step"], d["time"]) for d in _read(directory / "metrics.jsonl")]
    media = [_media(directory, d) for d in _read(directory / "media.jsonl")]
    return Run(
        directory=directory,
        project=about["project"],
        run_id=about["run_id"],
        status=about["status"],
        config=_read_object(directory / "config.json"),
        summary=_read_object(directory / "summary.json"),
        rows=rows,
        media=media,
    )


def _locate(path: Path) -> Path:
    if (path / "run.json").is_file():
        return path
    found = sorted(p.parent for p in path.rglob("run.json")) if path.is_dir() else []
    if len(found) == 1:
        return found[0]
    if not found:
        raise TrackerError(f"There is no run in {path}.")
    raise TrackerError(f"There are {len(found)} runs in {path}; choose one: {', '.join(map(str, found[:10]))}")


def _read_object(path: Path) -> dict[str, Any]:
    return dict(decode(path.read_bytes())) if path.is_file() else {}


def _read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file without those that a resumption made void."""
    lines: list[dict[str, Any]] = []
    for line, _ in read_lines(path) if path.is_file() else ():
        if "resumed_after" not in line:
            lines.append(line)
        elif line["resumed_after"] is not None:
            last = line["resumed_after"]
            lines = [old for old in lines if old["step"] is None or old["step"] <= last]
    return lines


def _media(directory: Path, data: dict[str, Any]) -> Media:
    files = tuple(directory / name for name in data.get("files", ()))
    content = data.get("data")
    if data["kind"] == "table" and files[0].is_file():
        content = decode(files[0].read_bytes())
    return Media(kind=data["kind"], name=data["name"], step=data["step"], time=data["time"], files=files, data=content)
