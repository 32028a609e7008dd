"""The embedded tracker: a directory of JSON lines and files, read back by `drivetrain.tracking.read_run`, which documents the layout."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.config import Options
from drivetrain.errors import TrackerError
from drivetrain.interfaces.tracker import Row, Tracker, TrackerContext
from drivetrain.specs import TrackerSpec
from drivetrain.tracking.encoding import decode, encode, path_inside, repair, safe_name, tag, unique_path
from drivetrain.tracking.media import describe_histogram, figure_bytes
from drivetrain.tracking.png import encode_png

__all__ = ["JSONL_SPEC", "JsonlOptions", "JsonlTracker"]

#: The descriptor under which the tracker is registered.
JSONL_SPEC = TrackerSpec(
    name="jsonl",
    summary="JSON lines and files in the logging directory; needs nothing",
    target="drivetrain._builtin.jsonl:JsonlTracker",
    options="drivetrain._builtin.jsonl:JsonlOptions",
    needs_directory=True,
    kinds=frozenset({"config", "images", "figure", "table", "histogram", "text", "artifact", "summary"}),
)

_BINS = 64


@dataclass
class JsonlOptions(Options):
    """Options of the JSONL tracker.

    Args:
        run_name: Name of the run's directory, which is also its id; a number is added if there is such a run already. Default: made of
            the time.

    Example:
        >>> JsonlOptions().run_name is None
        True
    """

    run_name: str | None = None


class JsonlTracker(Tracker):
    """Writes ``<logging directory>/<project>/<run id>/``.

    A row is in the operating system's hands as soon as it was taken (a killed process loses none), and on disk after `flush`.
    """

    rows_per_call = 1000

    def __init__(self, spec: TrackerSpec, context: TrackerContext) -> None:
        super().__init__(spec, context)
        settings = context.settings if context.settings is not None else JsonlOptions()
        options = JsonlOptions.from_mapping({**settings.to_dict(), **context.options})
        options.validate()
        assert context.directory is not None  # the hub has checked it
        project = context.directory / safe_name(context.project_name)
        if context.run_id is not None:
            self._directory = project / safe_name(context.run_id)
        else:
            name = options.run_name or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
            self._directory = unique_path(project / safe_name(name))
        self._about: dict[str, Any] = {}
        self._rows: _LineFile | None = None
        self._media: _LineFile | None = None

    @property
    def run(self) -> Path:
        """The run's directory."""
        return self._directory

    @property
    def run_id(self) -> str:
        """The name of the run's directory."""
        return self._directory.name

    def start(self) -> None:
        """Make the directory, or go on in it."""
        about = self._directory / "run.json"
        resumed = about.is_file()
        self._directory.mkdir(parents=True, exist_ok=True)
        if resumed:
            self._about = decode(about.read_bytes())
        else:
            self._about = {"project": self.context.project_name, "run_id": self.run_id, "started": time.time()}
        self._rows = _LineFile(self._directory / "metrics.jsonl")
        self._media = _LineFile(self._directory / "media.jsonl")
        if resumed:
            marker = {"resumed_after": self.context.resume_step, "time": time.time()}
            self._rows.append([marker])
            self._media.append([marker])
        self._write_about("running")

    def log_config(self, values: Mapping[str, Any]) -> bool:
        """Merge into ``config.json``."""
        self._merge("config.json", values)
        return True

    def log_summary(self, values: Mapping[str, Any]) -> bool:
        """Merge into ``summary.json``."""
        self._merge("summary.json", values)
        return True

    def log_scalars(self, values: Mapping[str, float | int | str | bool], step: int | None) -> bool:
        """Append one line to ``metrics.jsonl``."""
        self.log_rows([Row(values, step, self.time)])
        return True

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Append lines to ``metrics.jsonl``, all or none."""
        assert self._rows is not None
        self._rows.append([{"step": r.step, "time": r.time, "values": r.values} for r in rows])

    def log_text(self, name: str, text: str, step: int | None) -> bool:
        """Append the text to ``media.jsonl``."""
        return self._log_media("text", name, step, data=text)

    def log_images(self, name: str, images: Sequence[Any], step: int | None) -> bool:
        """Write PNG files."""
        files = [self._write("images", name, step, ".png", encode_png(image)) for image in images]
        return self._log_media("images", name, step, files=files)

    def log_figure(self, name: str, figure: Any, step: int | None) -> bool:
        """Write a PNG file (matplotlib) or an HTML file (plotly)."""
        content, suffix = figure_bytes(figure)
        return self._log_media("figure", name, step, files=[self._write("figures", name, step, suffix, content)])

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int | None) -> bool:
        """Write a JSON file of ``{"columns": [...], "rows": [[...], ...]}``."""
        content = encode({"columns": list(columns), "rows": [list(row) for row in rows]})
        return self._log_media("table", name, step, files=[self._write("tables", name, step, ".json", content)])

    def log_histogram(self, name: str, values: Any, step: int | None) -> bool:
        """Append counts in 64 bins of equal width, their edges, and the statistics of all values."""
        import numpy as np

        counts, edges = np.histogram(values[np.isfinite(values)].astype(np.float64), bins=_BINS)
        data = {"counts": counts.tolist(), "edges": edges.tolist(), **describe_histogram(values)}
        return self._log_media("histogram", name, step, data=data)

    def log_artifact(self, path: Path, name: str | None, step: int | None) -> bool:
        """Copy a file to ``artifacts/``; further ones of the same name get a number."""
        target = path_inside(self._directory / "artifacts", name or path.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        file = target.relative_to(self._directory).as_posix()
        return self._log_media("artifact", name or path.name, step, files=[file])

    def flush(self) -> None:
        """Wait until the disk has everything."""
        for file in (self._rows, self._media):
            if file is not None:
                file.sync()

    def finish(self) -> None:
        """Note how the run ended, and close the files."""
        if self._rows is None or self._media is None:
            return
        self._write_about(self.status)
        self._rows.close()
        self._media.close()
        self._rows = self._media = None

    def _log_media(
        self, kind: str, name: str, step: int | None, *, files: Sequence[str] = (), data: Any = None
    ) -> bool:
        assert self._media is not None
        line: dict[str, Any] = {"kind": kind, "name": name, "step": step, "time": self.time}
        if files:
            line["files"] = list(files)
        if data is not None:
            line["data"] = data
        self._media.append([line])
        return True

    def _write(self, folder: str, name: str, step: int | None, suffix: str, content: bytes) -> str:
        directory = self._directory / folder
        directory.mkdir(exist_ok=True)
        path = unique_path(directory / f"{safe_name(name)}-{'none' if step is None else step}{suffix}")
        path.write_bytes(content)
        return path.relative_to(self._directory).as_posix()

    def _write_about(self, status: str) -> None:
        self._about["status"] = status
        if status != "running":
            self._about["ended"] = time.time()
        _write_object(self._directory / "run.json", self._about)

    def _merge(self, file: str, values: Mapping[str, Any]) -> None:
        path = self._directory / file
        old = decode(path.read_bytes()) if path.is_file() else {}
        _write_object(path, {**old, **values})


class _LineFile:
    """A file of lines to which batches are appended whole."""

    def __init__(self, path: Path) -> None:
        if path.is_file():
            repair(path)
        self._path = path
        self._file = path.open("ab", buffering=0)

    def append(self, lines: Sequence[Mapping[str, Any]]) -> None:
        size = self._file.tell()
        data = memoryview(b"".join(encode(dict(line)) + b"\n" for line in lines))
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise TrackerError(f"can't write to {self._path}: {error}") from error

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _write_object(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file as a whole, readable for people."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="ascii") as file:
        json.dump(tag(dict(values)), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
