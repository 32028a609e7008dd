"""Writes to Weights & Biases."""

from __future__ import annotations

import math
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.errors import TrackerError
from drivetrain.interfaces import Tracker, TrackerContext
from drivetrain.specs import TrackerSpec
from drivetrain.tracking.encoding import path_inside, safe_name
from drivetrain.tracking.keywords import check_keywords, split_options
from drivetrain.tracking.media import figure_image
from drivetrain.tracking.names import NameCoder
from drivetrain.tracking.parts import numbers_and_texts
from drivetrain_wandb.options import WandbOptions

__all__ = ["STEP", "WandbTracker", "make_coder"]

#: The value that carries the user's step. wandb's own step only counts rows: it drops a row whose step is lower than the last one's, and merges
#: rows of the same step.
STEP = "drivetrain/step"

_BINS = 64
_FLUSH_INTERVAL = 0.1


def make_coder() -> NameCoder:
    """How names are made legal: any but control characters, backslashes and what is no plain path; files are named by them."""
    return NameCoder(
        r" -\[\]-~\xa0-\ud7ff\ue000-\U0010ffff",
        longest=200,  # of files named by them, with a step and a checksum
        paths=True,
        reserved=(STEP, "_step", "_timestamp", "_runtime", "_wandb"),
    )


class WandbTracker(Tracker):
    """One run of wandb; in the mode "shared" every rank has a part in it."""

    log_options = frozenset({"commit"})

    def __init__(self, spec: TrackerSpec, context: TrackerContext) -> None:
        super().__init__(spec, context)
        self._options, self._keywords = split_options(WandbOptions, context)
        self._id = str(context.run_id or self._keywords.pop("id", None) or secrets.token_hex(4))
        self._names = make_coder()
        self._saved_aliases = 0
        self._run: Any = None
        self._wandb: Any = None

    @classmethod
    def runs_here(cls, context: TrackerContext) -> bool:
        """On other ranks than the main one only in the mode "shared"."""
        return split_options(WandbOptions, context)[0].mode == "shared"

    @property
    def run(self) -> Any:
        """The ``wandb.Run``."""
        return self._run

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._id

    def start(self) -> None:
        """Open the run, or go on with the one of that id.

        Raises:
            ConfigurationError: For a keyword that ``wandb.init`` doesn't have.
            TrackerError: If wandb is to be online and has no key.
        """
        import wandb
        from wandb.errors import UsageError

        check_keywords("wandb", self._keywords, wandb.init, own=WandbOptions, taken=("project", "mode"))
        options, context = self._options, self.context
        keywords: dict[str, Any] = {
            "name": options.run_name,
            "group": options.group,
            "tags": list(options.tags) or None,
            "notes": options.description,
            "entity": options.entity,
            "resume": "allow",
            "dir": None if context.directory is None else str(context.directory),
            **self._keywords,
        }
        if keywords["dir"] is not None:
            Path(keywords["dir"]).mkdir(parents=True, exist_ok=True)
        keywords["settings"] = self._settings(wandb, keywords.get("settings"))
        try:
            run = wandb.init(project=_project(context.project_name), id=self._id, mode=options.mode, **keywords)
        except UsageError as error:
            raise TrackerError(f"Weights & Biases refuses to start: {error}. Offline: mode='offline'.") from error
        run.define_metric(STEP, hidden=True)
        run.define_metric("*", step_metric=STEP, step_sync=True)
        self._wandb, self._run = wandb, run

    def log_config(self, values: Mapping[str, Any]) -> bool:
        """Store hyperparameters under their flat names."""
        self._run.config.update(self._plain(values), allow_val_change=True)
        self._save_aliases()
        return True

    def log_summary(self, values: Mapping[str, Any]) -> bool:
        """Store final values."""
        self._run.summary.update(self._plain(values))
        self._save_aliases()
        return True

    def log_scalars(self, values: Mapping[str, float | int | str | bool], step: int | None) -> bool:
        """Store a row as one row of the run's history."""
        numbers, texts = numbers_and_texts(values, largest=2.0**63)
        self._log({**numbers, **texts}, step, **self.call_options)
        return True

    def log_text(self, name: str, text: str, step: int | None) -> bool:
        """Store a text."""
        self._log({name: text}, step)
        return True

    def log_images(self, name: str, images: Sequence[Any], step: int | None) -> bool:
        """Store images under one name."""
        self._log({name: [self._wandb.Image(image, file_type="png") for image in images]}, step)
        return True

    def log_figure(self, name: str, figure: Any, step: int | None) -> bool:
        """Store a matplotlib figure as an image, a plotly figure as itself."""
        image = figure_image(figure)
        if image is not None:
            return self.log_images(name, [image], step)
        if not hasattr(figure, "to_plotly_json"):
            return False
        self._log({name: self._wandb.Plotly(figure)}, step)
        return True

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int | None) -> bool:
        """Store a table."""
        table = self._wandb.Table(
            columns=list(columns), data=[list(row) for row in rows], allow_mixed_types=True, optional=True
        )
        self._log({name: table}, step)
        return True

    def log_histogram(self, name: str, values: Any, step: int | None) -> bool:
        """Store the distribution of the finite values; others are counted under ``name/nonfinite``."""
        import numpy as np

        finite = values[np.isfinite(values)]
        if not finite.size:
            return False
        counted = np.histogram(finite.astype(np.float64), bins=_BINS)
        row: dict[str, Any] = {name: self._wandb.Histogram(np_histogram=counted)}
        if finite.size < values.size:
            row[f"{name}/nonfinite"] = int(values.size - finite.size)
        self._log(row, step)
        return True

    def log_artifact(self, path: Path, name: str | None, step: int | None) -> bool:
        """Copy a file into the run's folder, and store it as an artifact of type "file"."""
        name = name or path.name
        target = path_inside(Path(self._run.dir).parent / "artifacts", name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        artifact = self._wandb.Artifact(
            safe_name(name).replace("%", "-")[:120], type="file", metadata={"name": name, "step": step}
        )
        # The copy is the run's own: the SDK needs no further one in its cache in the home directory.
        artifact.add_file(
            str(target), name=target.relative_to(target.parents[name.count("/")]).name, policy="immutable"
        )
        self._run.log_artifact(artifact)
        return True

    def flush(self) -> None:
        """Wait until wandb's own process has everything that was logged, and has written it to its file."""
        if self._run is not None:
            _ = self._run.step  # asks that process, which answers when it has taken what came before
            time.sleep(1.5 * _FLUSH_INTERVAL)

    def finish(self) -> None:
        """Close the run."""
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if self.status in ("finished", "running") else 1)

    def _log(self, values: Mapping[str, Any], step: int | None, **options: Any) -> None:
        row = {self._names.legal(name): value for name, value in values.items()}
        if step is not None:
            row[STEP] = step
        self._run.log(row, **options)
        self._save_aliases()

    def _plain(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Settings as wandb keeps them: NaN and infinities, which become null there, as texts."""
        return {
            self._names.legal(k): str(v) if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()
        }

    def _save_aliases(self) -> None:
        """Store what cut names stand for."""
        aliases = self._names.aliases
        if len(aliases) > self._saved_aliases:
            self._saved_aliases = len(aliases)
            self._run.config.update({"drivetrain/names": dict(aliases)}, allow_val_change=True)

    def _settings(self, wandb: Any, given: Any) -> Any:
        """The user's settings, with a bounded start, and what the mode "shared" needs on each rank."""
        settings = given if isinstance(given, wandb.Settings) else wandb.Settings(**dict(given or {}))
        settings = settings.model_copy()
        if "init_timeout" not in settings.model_fields_set:
            settings.init_timeout = self._options.init_timeout
        flush = "x_transaction_log_flush_interval"  # 15 s by default: so much would be missing after a crash
        if flush in type(settings).model_fields and flush not in settings.model_fields_set:
            setattr(settings, flush, _FLUSH_INTERVAL)
        if self._options.mode == "shared":
            process = self.context.process
            settings.x_primary = process.rank == 0
            settings.x_label = settings.x_label or f"rank-{process.rank}"
            settings.x_update_finish_state = process.rank == 0
        return settings


def _project(name: str) -> str:
    """A legal project name: some characters are refused, and more than 128."""
    return NameCoder(r" !\"$&-.0-9;<=>@A-\[\]-~\xa0-\U0010ffff", longest=128).legal(name)
