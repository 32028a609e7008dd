"""Writes TensorBoard event files."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.interfaces import Tracker, TrackerContext
from drivetrain.specs import TrackerSpec
from drivetrain.tracking.encoding import encode, path_inside, safe_name, unique_path
from drivetrain.tracking.media import figure_image
from drivetrain_tensorboard.options import TensorBoardOptions

__all__ = ["TensorBoardTracker"]

_LARGEST = 3.4028234663852886e38  # of float32, in which TensorBoard stores scalars


class TensorBoardTracker(Tracker):
    """Writes ``<logging directory>/<project>/<run id>/events.out.tfevents...``.

    All numbers of a row go into one event, in float32. Texts, and numbers beyond float32, are stored as texts. A row without a step has the one
    after the last. Steps may go back. Hyperparameters are stored for the HParams tab (None as "None"), and as JSON in the text "config".
    """

    log_options = frozenset({"walltime"})

    def __init__(self, spec: TrackerSpec, context: TrackerContext) -> None:
        super().__init__(spec, context)
        settings = context.settings if context.settings is not None else TensorBoardOptions()
        self._options = TensorBoardOptions.from_mapping({**settings.to_dict(), **context.options})
        self._options.validate()
        self._directory = self._choose_directory()
        self._writer: Any = None
        self._summary: Any = None
        self._last_step = -1 if context.resume_step is None else context.resume_step
        self._has_config = False

    @property
    def run(self) -> Any:
        """The ``torch.utils.tensorboard.SummaryWriter``."""
        return self._writer

    @property
    def writer(self) -> Any:
        """The same as `run`."""
        return self._writer

    @property
    def run_id(self) -> str:
        """The name of the run's directory."""
        return self._directory.name

    def start(self) -> None:
        """Open an event file; on resuming, void what was logged after the checkpoint."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary = Summary
        purge = self._options.purge_step
        if purge is None and self.context.run_id is not None and self.context.resume_step is not None:
            purge = self.context.resume_step + 1
        self._writer = SummaryWriter(
            log_dir=str(self._directory),
            purge_step=purge,
            max_queue=self._options.max_queue,
            flush_secs=self._options.flush_secs,
            filename_suffix=self._options.filename_suffix,
        )

    def log_config(self, values: Mapping[str, Any]) -> bool:
        """Store hyperparameters. TensorBoard takes one set per run, so those of a second call are found in the text only."""
        if not self._has_config:
            self._has_config = True
            plain = {_legal(name): _hyperparameter(value) for name, value in values.items()}
            self._writer.add_hparams(plain, {}, run_name=".")  # ".": in this directory, not a new one
        self._writer.add_text("config", encode(dict(values)).decode(), 0, self._time)
        return True

    def log_scalars(self, values: Mapping[str, float | int | str | bool], step: int | None) -> bool:
        """Store a row's numbers as one event, its texts each as one."""
        step = self._step(step)
        make = self._summary.Value
        numbers = []
        for name, value in values.items():
            if _is_scalar(value):
                numbers.append(make(tag=_legal(name), simple_value=value))
            else:
                self._writer.add_text(_legal(name), _legal(str(value)), step, self._time)
        if numbers:
            self._writer.file_writer.add_summary(self._summary(value=numbers), step, self._time)
        return True

    def log_text(self, name: str, text: str, step: int | None) -> bool:
        """Store a text; TensorBoard shows it as Markdown."""
        self._writer.add_text(_legal(name), _legal(text), self._step(step), self._time)
        return True

    def log_images(self, name: str, images: Sequence[Any], step: int | None) -> bool:
        """Store images: one under its name, several as ``name/0``, ``name/1``, ..."""
        step = self._step(step)
        for index, image in enumerate(images):
            tag = _legal(name) if len(images) == 1 else f"{_legal(name)}/{index}"
            self._writer.add_image(tag, image, step, self._time, dataformats="HWC")
        return True

    def log_figure(self, name: str, figure: Any, step: int | None) -> bool:
        """Store a matplotlib figure as an image; other figures aren't known here."""
        image = figure_image(figure)
        return image is not None and self.log_images(name, [image], step)

    def log_histogram(self, name: str, values: Any, step: int | None) -> bool:
        """Store the distribution of the finite values; others are counted under ``name/nonfinite``."""
        import numpy as np

        finite = values[np.isfinite(values)]
        if not finite.size:
            return False
        step = self._step(step)
        self._writer.add_histogram(_legal(name), finite, step, walltime=self._time)
        if finite.size < values.size:
            self.log_scalars({f"{name}/nonfinite": int(values.size - finite.size)}, step)
        return True

    def log_artifact(self, path: Path, name: str | None, step: int | None) -> bool:
        """Copy a file to ``artifacts/`` beside the event files; further ones of the same name get a number."""
        target = path_inside(self._directory / "artifacts", name or path.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        return True

    def log_summary(self, values: Mapping[str, Any]) -> bool:
        """Store final values under ``summary/``."""
        return self.log_scalars({f"summary/{k}": "None" if v is None else v for k, v in values.items()}, None)

    def flush(self) -> None:
        """Write waiting events, and wait until the disk has them."""
        self._writer.flush()
        for file in self._directory.glob("events.out.tfevents.*"):
            with file.open("rb") as opened, contextlib.suppress(OSError):  # not every file system can
                os.fsync(opened.fileno())

    def finish(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()

    @property
    def _time(self) -> float:
        return float(self.call_options.get("walltime", self.time))

    def _step(self, step: int | None) -> int:
        self._last_step = self._last_step + 1 if step is None else step
        return self._last_step

    def _choose_directory(self) -> Path:
        options, context = self._options, self.context
        if options.log_dir is not None:
            return Path(options.log_dir)
        assert context.directory is not None  # the hub has checked it
        project = context.directory / safe_name(context.project_name)
        if context.run_id is not None:
            return project / safe_name(context.run_id)
        return unique_path(
            project / safe_name(options.run_name or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}")
        )


def _is_scalar(value: float | int | str | bool) -> bool:
    """Whether float32 can hold it: a number within its range, an infinity or NaN."""
    return not isinstance(value, str) and (
        abs(value) <= _LARGEST or (type(value) is float and not math.isfinite(value))
    )


def _hyperparameter(value: Any) -> Any:
    """What the HParams tab can hold: numbers are stored as float64."""
    if value is None:
        return "None"
    if type(value) is str:
        return _legal(value)
    if type(value) is int and abs(value) > 2**53:
        return str(value)
    return value


def _legal(text: str) -> str:
    """TensorBoard takes any text that is valid Unicode; lone surrogates (undecodable file names) are escaped."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")
