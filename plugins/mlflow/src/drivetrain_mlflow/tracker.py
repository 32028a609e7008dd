"""Writes to MLflow."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.interfaces import Row, Tracker, TrackerContext
from drivetrain.specs import TrackerSpec
from drivetrain.tracking.keywords import check_keywords, split_options
from drivetrain.tracking.media import figure_bytes
from drivetrain.tracking.parts import chunks, numbers_and_texts, split_text
from drivetrain_mlflow.connection import check_server
from drivetrain_mlflow.names import TEXT, artifact_path, image_key, make_coder, project_legal
from drivetrain_mlflow.options import MlflowOptions

__all__ = ["MlflowTracker"]

_STATUS = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
#: Of one request.
_METRICS, _PARAMS = 1000, 100
_PARAM_LENGTH, _TAG_LENGTH = 6000, 5000
_STEPS = 2**63


class MlflowTracker(Tracker):
    """One run of MLflow, through a client of its own: MLflow's global state (the active run) is left alone.

    Requests are made one after the other on the hub's thread. One that fails raises, and is made again with the same times: MLflow takes each value of a
    metric once, so that a request whose answer was lost stores nothing twice.
    """

    rows_per_call = 100

    def __init__(self, spec: TrackerSpec, context: TrackerContext) -> None:
        super().__init__(spec, context)
        self._options, self._keywords = split_options(MlflowOptions, context)
        self._names = make_coder()
        self._saved_aliases = 0
        self._params: dict[str, str] = {}
        self._paths: dict[str, int] = {}
        self._client: Any = None
        self._run: Any = None
        self._uri = ""
        self._last_time = 0
        self._last_step = -1 if context.resume_step is None else context.resume_step

    @property
    def run(self) -> Any:
        """The ``mlflow.entities.Run``."""
        return self._run

    @property
    def client(self) -> Any:
        """The ``mlflow.MlflowClient``."""
        return self._client

    @property
    def run_id(self) -> str | None:
        """The run's id; None until the server has given one."""
        return self.context.run_id or (self._run.info.run_id if self._run is not None else None)

    def start(self) -> None:
        """Open the run, or go on with the one of that id.

        Raises:
            ConfigurationError: For a keyword that there isn't.
        """
        import mlflow

        check_keywords("mlflow", self._keywords, lambda: None, own=MlflowOptions)
        uri, location = self._places(mlflow)
        self._uri = uri
        self._check()
        client = mlflow.MlflowClient(tracking_uri=uri)
        if self.context.run_id is not None:
            self._run = client.get_run(self.context.run_id)
            self._params = dict(self._run.data.params)
            client.update_run(self.context.run_id, status="RUNNING")
        else:
            options = self._options
            tags = {str(k): str(v) for k, v in options.tags.items()}
            if options.description is not None:
                tags["mlflow.note.content"] = options.description
            if options.group is not None:
                tags["mlflow.parentRunId"] = options.group
            experiment = self._experiment(mlflow, client, location)
            self._run = client.create_run(experiment, tags=tags, run_name=options.run_name)
        self._client = client

    def log_config(self, values: Mapping[str, Any]) -> bool:
        """Store hyperparameters as texts, long ones in parts. MLflow never changes one: a new value is kept as the tag ``changed.<name>``."""
        from mlflow.entities import Param, RunTag

        parts: dict[str, str] = {}
        for name, value in values.items():
            parts.update(split_text(self._names.legal(name), str(value), _PARAM_LENGTH))
        new = {k: v for k, v in parts.items() if k not in self._params}
        changed = {f"changed.{k}": v[:_TAG_LENGTH] for k, v in parts.items() if self._params.get(k, v) != v}
        for some in chunks(list(new.items()), _PARAMS):
            self._batch(params=[Param(k, v) for k, v in some])
            self._params.update(some)
        for some in chunks(list(changed.items()), _PARAMS):
            self._batch(tags=[RunTag(k, v) for k, v in some])
        self._save_aliases()
        return True

    def log_summary(self, values: Mapping[str, Any]) -> bool:
        """Store final values under ``summary/``."""
        return self.log_scalars({f"summary/{k}": "None" if v is None else v for k, v in values.items()}, 0)

    def log_scalars(self, values: Mapping[str, float | int | str | bool], step: int | None) -> bool:
        """Store a row."""
        self.log_rows([Row(values, step, self.time)])
        return True

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Store rows: numbers as metrics, 1,000 per request; texts, infinities and steps beyond 64 bits as tags.

        A request that fails leaves those before it stored; they are sent again, and MLflow takes each value once.
        """
        from mlflow.entities import Metric, RunTag

        metrics: list[Any] = []
        tags: dict[str, str] = {}
        last, time = self._last_step, self._last_time
        for row in rows:
            step = last + 1 if row.step is None else row.step
            # MLflow orders by milliseconds, and takes the same value of the same step and time for the same.
            time = max(int(row.time * 1000), time + (step <= last))
            last = step
            numbers, texts = numbers_and_texts(row.values)
            in_range = -_STEPS <= step < _STEPS
            for name, value in numbers.items():
                if in_range:
                    metrics.append(Metric(self._names.legal(name), float(value), time, step))
                if not in_range or math.isinf(value):  # databases have no infinity: the text beside says what was meant
                    texts[name] = repr(value)
            for name, text in texts.items():
                tags.update(split_text(f"{TEXT}/{step}/{self._names.legal(name)}", text, _TAG_LENGTH))
        for some in chunks(metrics, _METRICS):
            self._batch(metrics=some)
        for pairs in chunks(list(tags.items()), _PARAMS):
            self._batch(tags=[RunTag(k, v) for k, v in pairs])
        self._last_step, self._last_time = last, time
        self._save_aliases()

    def log_text(self, name: str, text: str, step: int | None) -> bool:
        """Store a text as a file in ``texts/``."""
        self._file(f"texts/{artifact_path(name)}/{self._step(step)}.txt", text.encode("utf-8", "backslashreplace"))
        return True

    def log_images(self, name: str, images: Sequence[Any], step: int | None) -> bool:
        """Store images where MLflow shows them by step: one under its name, several as ``name/0``, ``name/1``, ..."""
        step = self._step(step)
        self._check()
        for index, image in enumerate(images):
            key = image_key(self._names, name if len(images) == 1 else f"{name}/{index}")
            time = int(self.time * 1000)
            self._client.log_image(self.run_id, image, key=key, step=step, timestamp=time, synchronous=True)
        return True

    def log_figure(self, name: str, figure: Any, step: int | None) -> bool:
        """Store a figure as a file in ``figures/``."""
        content, suffix = figure_bytes(figure)
        self._file(f"figures/{artifact_path(name)}/{self._step(step)}{suffix}", content)
        return True

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int | None) -> bool:
        """Store a table as a file in ``tables/``, in the form that ``mlflow.load_table`` reads."""
        import json

        content = json.dumps({"columns": list(columns), "data": [list(row) for row in rows]}).encode()
        self._file(f"tables/{artifact_path(name)}/{self._step(step)}.json", content)
        return True

    def log_artifact(self, path: Path, name: str | None, step: int | None) -> bool:
        """Store a file; further ones of the same name get a number."""
        target = artifact_path(name or path.name)
        count = self._paths[target] = self._paths.get(target, -1) + 1
        if count:
            stem, dot, suffix = target.rpartition(".")
            target = f"{stem}-{count}.{suffix}" if dot and "/" not in suffix else f"{target}-{count}"
        folder, _, file = target.rpartition("/")
        self._check()
        if path.name == file:
            self._client.log_artifact(self.run_id, str(path), folder or None)
            return True
        with tempfile.TemporaryDirectory(prefix="drivetrain-") as scratch:
            copy = Path(scratch, file)
            try:
                copy.symlink_to(path.absolute())
            except OSError:  # a system without links
                shutil.copyfile(path, copy)
            self._client.log_artifact(self.run_id, str(copy), folder or None)
        return True

    def finish(self) -> None:
        """Note how the run ended."""
        if self._client is not None:
            client, self._client = self._client, None
            check_server(self._uri, self._options.connect_timeout)
            client.set_terminated(self.run_id, _STATUS.get(self.status, "FINISHED"))

    def _places(self, mlflow: Any) -> tuple[str, str | None]:
        """The tracking URI, and where a new experiment's artifacts go."""
        uri, location, directory = self._options.tracking_uri, self._options.artifact_location, self.context.directory
        said = uri is not None or "MLFLOW_TRACKING_URI" in os.environ or mlflow.tracking.is_tracking_uri_set()
        if directory is not None and not said:
            directory = directory.absolute()
            directory.mkdir(parents=True, exist_ok=True)
            return f"sqlite:///{directory / 'mlflow.db'}", location or (directory / "mlflow-artifacts").as_uri()
        return uri or mlflow.get_tracking_uri(), location

    def _experiment(self, mlflow: Any, client: Any, location: str | None) -> str:
        name = project_legal(self._options.experiment_name or self.context.project_name)
        found = client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(client.create_experiment(name, artifact_location=location))
            except mlflow.MlflowException:  # another process has made it meanwhile
                found = client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _batch(self, **entities: Any) -> None:
        self._check()
        self._client.log_batch(self.run_id, synchronous=True, **entities)

    def _check(self) -> None:
        check_server(self._uri, self._options.connect_timeout)

    def _file(self, path: str, content: bytes) -> None:
        folder, _, file = path.rpartition("/")
        self._check()
        with tempfile.TemporaryDirectory(prefix="drivetrain-") as scratch:
            local = Path(scratch, file)
            local.write_bytes(content)
            self._client.log_artifact(self.run_id, str(local), folder)

    def _step(self, step: int | None) -> int:
        self._last_step = self._last_step + 1 if step is None else step
        return self._last_step

    def _save_aliases(self) -> None:
        """Store what cut names stand for, as tags."""
        from mlflow.entities import RunTag

        aliases = list(self._names.aliases.items())
        for some in chunks(aliases[self._saved_aliases :], _PARAMS):
            self._batch(tags=[RunTag(f"drivetrain.name/{k}", v[:_TAG_LENGTH]) for k, v in some])
        self._saved_aliases = len(aliases)
