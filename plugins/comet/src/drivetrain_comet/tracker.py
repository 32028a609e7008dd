"""Writes to Comet."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.errors import TrackerError
from drivetrain.interfaces import Tracker, TrackerContext
from drivetrain.specs import TrackerSpec
from drivetrain.tracking.encoding import encode, safe_name
from drivetrain.tracking.keywords import check_keywords, split_options
from drivetrain.tracking.media import figure_bytes, figure_image, table_csv
from drivetrain.tracking.names import NameCoder
from drivetrain.tracking.parts import numbers_and_texts, split_text
from drivetrain.tracking.png import encode_png
from drivetrain_comet.offline import make_offline, wait_until_written
from drivetrain_comet.options import CometOptions

__all__ = ["CometTracker", "make_coder"]

#: Comet cuts longer names and values.
_NAME_LENGTH, _VALUE_LENGTH = 100, 1000
#: Seconds that a flush may take.
_PATIENCE = 60


def make_coder() -> NameCoder:
    """How names are made legal: printable characters, at most 100."""
    return NameCoder(r" -~\xa0-\ud7ff\ue000-\U0010ffff", longest=_NAME_LENGTH - len(".part1000"))


class CometTracker(Tracker):
    """One experiment of Comet."""

    log_options = frozenset({"epoch"})

    def __init__(self, spec: TrackerSpec, context: TrackerContext) -> None:
        super().__init__(spec, context)
        self._options, self._keywords = split_options(CometOptions, context)
        given = self._keywords.pop("experiment_key", None)
        self._key = str(context.run_id or given or secrets.token_hex(16))
        self._resumes = context.run_id is not None
        self._names = make_coder()
        self._saved_aliases = 0
        self._experiment: Any = None
        self._last_step = -1 if context.resume_step is None else context.resume_step
        self._scratch: str | None = None

    @property
    def run(self) -> Any:
        """The ``comet_ml`` experiment."""
        return self._experiment

    @property
    def run_id(self) -> str:
        """The experiment's key."""
        return self._key

    def start(self) -> None:
        """Open the experiment, or go on with the one of that key.

        Raises:
            ConfigurationError: For a keyword that Comet's class doesn't have.
            TrackerError: If it is to be online and Comet has no key of the user's.
        """
        import comet_ml

        check_keywords(
            "comet", self._keywords, comet_ml.OfflineExperiment, own=CometOptions, taken=("project_name", "disabled")
        )
        options = self._options
        keywords = {"project_name": self.context.project_name, "workspace": options.workspace, **self._keywords}
        experiment = (
            self._offline(comet_ml, keywords) if options.mode == "offline" else self._online(comet_ml, keywords)
        )
        if not experiment.alive:
            raise ConnectionError("Comet's server doesn't answer")
        if options.run_name is not None:
            experiment.set_name(options.run_name)
        experiment.add_tags(list(options.tags))
        for name, text in (("group", options.group), ("notes", options.description)):
            if text is not None:
                for part, value in split_text(name, text, _VALUE_LENGTH).items():
                    experiment.log_other(part, value)
        self._experiment = experiment

    def log_config(self, values: Mapping[str, Any]) -> bool:
        """Store hyperparameters, texts of more than 1,000 characters in parts."""
        for name, value in values.items():
            texts = split_text(self._names.legal(name), str(value), _VALUE_LENGTH)
            if len(texts) == 1 and type(value) in (int, float, bool):
                texts = {self._names.legal(name): value}
            for part, text in texts.items():
                self._experiment.log_parameter(part, text)
        self._check()
        return True

    def log_summary(self, values: Mapping[str, Any]) -> bool:
        """Store final values beside the experiment, under ``summary/``."""
        for name, value in values.items():
            for part, text in split_text(self._names.legal(f"summary/{name}"), str(value), _VALUE_LENGTH).items():
                self._experiment.log_other(part, text)
        self._check()
        return True

    def log_scalars(self, values: Mapping[str, float | int | str | bool], step: int | None) -> bool:
        """Store a row: numbers as metrics, texts as texts of that step."""
        step = self._step(step)
        numbers, texts = numbers_and_texts(values)
        for name, value in numbers.items():
            self._experiment.log_metric(self._names.legal(name), value, step=step, **self.call_options)
        for name, text in texts.items():
            self._experiment.log_text(text, step=step, metadata={"name": name})
        self._check()
        return True

    def log_text(self, name: str, text: str, step: int | None) -> bool:
        """Store a text."""
        self._experiment.log_text(text, step=self._step(step), metadata={"name": name})
        self._check()
        return True

    def log_images(self, name: str, images: Sequence[Any], step: int | None) -> bool:
        """Store images: one under its name, several as ``name/0``, ``name/1``, ..."""
        step = self._step(step)
        for index, image in enumerate(images):
            label = self._names.legal(name if len(images) == 1 else f"{name}/{index}")
            path = self._write(label, ".png", encode_png(image))
            # As a file: Comet refuses arrays that are all zero.
            self._experiment.log_image(path, name=label, step=step, metadata={"name": name})
        self._check()
        return True

    def log_figure(self, name: str, figure: Any, step: int | None) -> bool:
        """Store a matplotlib figure as an image, a plotly figure as an HTML file."""
        image = figure_image(figure)
        if image is not None:
            return self.log_images(name, [image], step)
        content, suffix = figure_bytes(figure)
        return self._asset(self._write(name, suffix, content), name + suffix, step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int | None) -> bool:
        """Store a table as a CSV file."""
        content = table_csv(columns, rows).encode("utf-8", "surrogatepass")
        return self._asset(self._write(name, ".csv", content), f"{name}.csv", step)

    def log_histogram(self, name: str, values: Any, step: int | None) -> bool:
        """Store the distribution of the finite values; others are counted under ``name/nonfinite``."""
        import numpy as np

        finite = values[np.isfinite(values)]
        if not finite.size:
            return False
        step = self._step(step)
        self._experiment.log_histogram_3d(finite, name=self._names.legal(name), step=step)
        if finite.size < values.size:
            self._experiment.log_metric(
                self._names.legal(f"{name}/nonfinite"), int(values.size - finite.size), step=step
            )
        self._check()
        return True

    def log_artifact(self, path: Path, name: str | None, step: int | None) -> bool:
        """Store a file as an asset of the experiment."""
        return self._asset(str(path), name or path.name, step)

    def flush(self) -> None:
        """Wait until the server, or offline the disk, has everything that was logged."""
        if self._experiment is None:
            return
        taken = self._experiment.flush(timeout=_PATIENCE)
        if self._options.mode == "offline":  # there Comet's own flush returns before its thread has written anything
            taken = wait_until_written(self._experiment, _PATIENCE)
        if not taken:
            raise ConnectionError(f"Comet didn't take everything within {_PATIENCE} s")

    def finish(self) -> None:
        """Close the experiment."""
        if self._experiment is not None:
            experiment, self._experiment = self._experiment, None
            if self.status in ("failed", "killed"):
                experiment.log_other("status", self.status)
            experiment.end()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _online(self, comet_ml: Any, keywords: Mapping[str, Any]) -> Any:
        if not (keywords.get("api_key") or comet_ml.config.get_config()["comet.api_key"]):
            raise TrackerError(
                "Comet has no API key: set COMET_API_KEY or run `comet login`. Offline: init_kwargs={'comet': {'mode': 'offline'}}."
            )
        if self._resumes:
            return comet_ml.ExistingExperiment(
                previous_experiment=self._key, **{k: v for k, v in keywords.items() if k != "project_name"}
            )
        return comet_ml.Experiment(experiment_key=self._key, **keywords)

    def _offline(self, comet_ml: Any, keywords: Mapping[str, Any]) -> Any:
        directory = self._options.offline_directory
        if directory is None and self.context.directory is not None:
            directory = str(self.context.directory)
        if self._resumes:
            base = comet_ml.ExistingOfflineExperiment
            return make_offline(base, directory, previous_experiment=self._key, **keywords)
        return make_offline(comet_ml.OfflineExperiment, directory, experiment_key=self._key, **keywords)

    def _asset(self, path: str, name: str, step: int | None) -> bool:
        file_name = name if len(name) <= _NAME_LENGTH else safe_name(name)
        self._experiment.log_asset(
            path, file_name=file_name, step=self._step(step), copy_to_tmp=True, metadata={"name": name}
        )
        self._check()
        return True

    def _write(self, name: str, suffix: str, content: bytes) -> str:
        if self._scratch is None:
            self._scratch = tempfile.mkdtemp(prefix="drivetrain-")
        path = Path(tempfile.mkdtemp(dir=self._scratch), safe_name(name) + suffix)
        path.write_bytes(content)
        return str(path)

    def _step(self, step: int | None) -> int:
        self._last_step = self._last_step + 1 if step is None else step
        return self._last_step

    def _check(self) -> None:
        """Comet only logs what goes wrong: an experiment that isn't alive any more takes everything and stores nothing."""
        if not self._experiment.alive:
            raise ConnectionError("Comet has given the experiment up; see its messages")
        aliases = self._names.aliases
        if len(aliases) > self._saved_aliases:
            texts = split_text("drivetrain.names", encode(dict(aliases)).decode(), _VALUE_LENGTH)
            for part, text in texts.items():
                self._experiment.log_other(part, text)
            self._saved_aliases = len(aliases)
