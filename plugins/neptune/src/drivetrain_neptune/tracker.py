"""Writes Neptune's offline files."""

from __future__ import annotations

import datetime
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigurationError, TrackerError
from drivetrain.interfaces import Tracker, TrackerContext
from drivetrain.specs import TrackerSpec
from drivetrain.tracking.encoding import encode, path_inside
from drivetrain.tracking.keywords import check_keywords, split_options
from drivetrain.tracking.media import figure_bytes, table_csv
from drivetrain.tracking.names import NameCoder
from drivetrain.tracking.parts import chunks, numbers_and_texts, split_text
from drivetrain.tracking.png import encode_png
from drivetrain_neptune.options import NeptuneOptions

__all__ = ["NeptuneTracker", "make_coder"]

_STEPS = 10**12
_TEXT_LENGTH = 250_000  # of a megabyte in UTF-8
_PER_CALL = 1000
_BINS = 64


def make_coder() -> NameCoder:
    """How names are made legal: paths of printable characters; Neptune cuts longer ones at 1,024 bytes."""
    return NameCoder(r" -~\xa0-\ud7ff\ue000-\U0010ffff", longest=240, paths=True)


class NeptuneTracker(Tracker):
    """One run of Neptune, stored as a database of operations in the logging directory. Nothing is ever sent."""

    def __init__(self, spec: TrackerSpec, context: TrackerContext) -> None:
        super().__init__(spec, context)
        self._options, self._keywords = split_options(NeptuneOptions, context)
        given = self._keywords.pop("run_id", None)
        self._id = str(context.run_id or given or secrets.token_hex(8))
        self._names = make_coder()
        self._saved_aliases = 0
        self._run: Any = None
        self._directory: Path | None = None
        self._last_step = -1 if context.resume_step is None else context.resume_step

    @property
    def run(self) -> Any:
        """The ``neptune_scale.Run``."""
        return self._run

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._id

    def start(self) -> None:
        """Open the run; one that is resumed has the same id, and a further file.

        Raises:
            ConfigurationError: If it is to be online, or for a keyword that ``neptune_scale.Run`` doesn't have.
        """
        options, context = self._options, self.context
        if options.mode not in ("offline", "disabled"):
            raise ConfigurationError(
                f"Neptune can't be used with mode={options.mode!r}: its hosted service ended in March 2026. Leave the mode out, and runs are "
                "stored in the logging directory, from which they can be read; or choose another tracker."
            )
        import neptune_scale

        check_keywords(
            "neptune", self._keywords, neptune_scale.Run, own=NeptuneOptions, taken=("project", "api_token", "kwargs")
        )
        assert context.directory is not None  # the hub has checked it
        self._directory = context.directory.absolute() / "neptune"
        keywords: dict[str, Any] = {
            "experiment_name": options.run_name,
            "enable_console_log_capture": False,
            "source_tracking_config": None,
            "log_directory": str(self._directory),
            **self._keywords,
        }
        self._run = neptune_scale.Run(
            run_id=self._id, project=_project(options.workspace, context.project_name), mode=options.mode, **keywords
        )
        if options.tags:
            self._run.add_tags(list(options.tags))
        if options.group is not None:
            self._run.add_tags([options.group], group_tags=True)
        if options.description is not None:
            self._run.log_configs({"sys/description": options.description})

    def log_config(self, values: Mapping[str, Any]) -> bool:
        """Store hyperparameters under ``config/``."""
        self._configs("config", values)
        return True

    def log_summary(self, values: Mapping[str, Any]) -> bool:
        """Store final values under ``summary/``."""
        self._configs("summary", values)
        return True

    def log_scalars(self, values: Mapping[str, float | int | str | bool], step: int | None) -> bool:
        """Store a row: numbers as metrics, texts as series of texts.

        Raises:
            TrackerError: For a step that Neptune can't hold.
        """
        step = self._step(step)
        numbers, texts = numbers_and_texts(values)
        for some in chunks([(self._names.legal(k), float(v)) for k, v in numbers.items()], _PER_CALL):
            self._run.log_metrics(dict(some), step=step, timestamp=self._timestamp)
        for name, text in texts.items():
            self._texts(name, text, step)
        self._save_aliases()
        return True

    def log_text(self, name: str, text: str, step: int | None) -> bool:
        """Store a text in a series of texts."""
        self._texts(name, text, self._step(step))
        self._save_aliases()
        return True

    def log_images(self, name: str, images: Sequence[Any], step: int | None) -> bool:
        """Store images in a series of files: one under its name, several as ``name/0``, ``name/1``, ..."""
        step = self._step(step)
        for index, image in enumerate(images):
            self._file(name if len(images) == 1 else f"{name}/{index}", encode_png(image), "image/png", step)
        return True

    def log_figure(self, name: str, figure: Any, step: int | None) -> bool:
        """Store a figure in a series of files."""
        content, suffix = figure_bytes(figure)
        self._file(name, content, "image/png" if suffix == ".png" else "text/html", self._step(step))
        return True

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int | None) -> bool:
        """Store a table as a CSV file in a series of files."""
        content = table_csv(columns, rows).encode("utf-8", "surrogatepass")
        self._file(name, content, "text/csv", self._step(step))
        return True

    def log_histogram(self, name: str, values: Any, step: int | None) -> bool:
        """Store the distribution of the finite values; others are counted under ``name/nonfinite``."""
        import numpy as np
        from neptune_scale.types import Histogram

        finite = values[np.isfinite(values)]
        if not finite.size:
            return False
        counts, edges = np.histogram(finite.astype(np.float64), bins=_BINS)
        step = self._step(step)
        histogram = Histogram(bin_edges=edges.tolist(), counts=counts.tolist())
        self._run.log_histograms({self._names.legal(name): histogram}, step=step, timestamp=self._timestamp)
        if finite.size < values.size:
            self.log_scalars({f"{name}/nonfinite": int(values.size - finite.size)}, step)
        self._save_aliases()
        return True

    def log_artifact(self, path: Path, name: str | None, step: int | None) -> bool:
        """Copy a file to ``artifacts/`` beside the run's database, which refers to it."""
        assert self._directory is not None
        name = name or path.name
        target = path_inside(self._directory / "artifacts" / self._id, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        self._run.assign_files({self._names.legal(f"artifacts/{name}"): str(target)})
        self._save_aliases()
        return True

    def finish(self) -> None:
        """Close the run."""
        if self._run is not None:
            run, self._run = self._run, None
            if self.status in ("failed", "killed"):
                run.log_configs({"sys/status": self.status})
            run.close()

    @property
    def _timestamp(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(self.time, datetime.timezone.utc)

    def _configs(self, folder: str, values: Mapping[str, Any]) -> None:
        plain: dict[str, Any] = {}
        for name, value in values.items():
            legal = self._names.legal(f"{folder}/{name}")
            if type(value) is bool or type(value) is float or (type(value) is int and abs(value) < 2**63):
                plain[legal] = value
            else:
                plain.update(split_text(legal, str(value), _TEXT_LENGTH))
        for some in chunks(list(plain.items()), _PER_CALL):
            self._run.log_configs(dict(some))
        self._save_aliases()

    def _texts(self, name: str, text: str, step: int) -> None:
        for part, some in split_text(self._names.legal(name), text, _TEXT_LENGTH).items():
            clean = some.encode("utf-8", "backslashreplace").decode()
            self._run.log_string_series({part: clean}, step=step, timestamp=self._timestamp)

    def _file(self, name: str, content: bytes, mime_type: str, step: int) -> None:
        from neptune_scale.types import File

        file = File(source=content, mime_type=mime_type)
        self._run.log_files({self._names.legal(name): file}, step=step, timestamp=self._timestamp)
        self._save_aliases()

    def _step(self, step: int | None) -> int:
        if step is not None and not 0 <= step < _STEPS:
            raise TrackerError(f"Neptune stores steps from 0 to {_STEPS - 1}, not {step}")
        self._last_step = self._last_step + 1 if step is None else step
        return self._last_step

    def _save_aliases(self) -> None:
        """Store what cut names stand for."""
        aliases = self._names.aliases
        if len(aliases) > self._saved_aliases:
            texts = split_text("drivetrain/names", encode(dict(aliases)).decode(), _TEXT_LENGTH)
            self._run.log_configs(texts)
            self._saved_aliases = len(aliases)


def _project(workspace: str, name: str) -> str:
    """A project's full name, which has exactly one slash."""
    coder = NameCoder(r" -.0-~\xa0-\ud7ff\ue000-\U0010ffff", longest=200)
    return f"{coder.legal(workspace)}/{coder.legal(name)}"
