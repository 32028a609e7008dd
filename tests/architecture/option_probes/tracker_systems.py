"""Options of the trackers whose systems have an SDK of their own; all runs are offline."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import sqlite3
import tempfile
import time
import zipfile
from pathlib import Path
from unittest import mock

from tests.quiet_trackers import QUIET_COMET, QUIET_WANDB

from drivetrain import Accelerator
from drivetrain.errors import DrivetrainError
from drivetrain.tracking import TrackingOptions
from drivetrain_comet.options import CometOptions
from drivetrain_mlflow.options import MlflowOptions
from drivetrain_neptune.options import NeptuneOptions
from drivetrain_wandb.options import WandbOptions

from . import effect
from .scene import files, quiet

QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "COMET_DISABLE_AUTO_LOGGING": "1",
    "WANDB_SILENT": "true",
    "WANDB_MODE": "offline",
}
INIT_KWARGS = {
    "comet": {"display_summary_level": 0, **QUIET_COMET},
    "wandb": {"settings": QUIET_WANDB},
}


@functools.cache
def empty_database():
    """A database of MLflow with all its tables: making them takes seconds, copying it none."""
    from mlflow import MlflowClient

    path = Path(tempfile.mkdtemp(), "mlflow.db")
    atexit.register(shutil.rmtree, path.parent, ignore_errors=True)
    with mock.patch.dict(os.environ, QUIET):
        MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path


@contextlib.contextmanager
def run_of(folder, name, options, project="probe"):
    """The system's own run, while an Accelerator logs to it with these options."""
    bounds = TrackingOptions(finish_timeout=60.0, start_timeout=60.0)
    if name == "mlflow":
        shutil.copy(empty_database(), folder / "mlflow.db")
    with quiet(), mock.patch.dict(os.environ, QUIET):
        accelerator = Accelerator(cpu=True, log_with=name, project_dir=folder, kwargs_handlers=[options, bounds])
        try:
            accelerator.init_trackers(project, init_kwargs=INIT_KWARGS)
            accelerator.log({"loss": 1.0}, step=1)
            yield accelerator.get_tracker(name, unwrap=True)
        finally:
            accelerator.end_training()


# -- Weights & Biases ------------------------------------------------------------------------------------------------------------


@effect("WandbOptions.mode", ("offline", True), ("disabled", False))
def wandb_mode(value, folder):
    """Whether a run is on disk."""
    with run_of(folder, "wandb", WandbOptions(mode=value)):
        pass
    return any(f.endswith(".wandb") for f in files(folder))


def wandb_attribute(name, field, first, second):
    @effect(f"WandbOptions.{name}", first, second)
    def observe(value, folder):
        with run_of(folder, "wandb", WandbOptions(mode="offline", **{name: value})) as run:
            return getattr(run, field)

    return observe


wandb_attribute("run_name", "name", ("a", "a"), ("b", "b"))
wandb_attribute("group", "group", ("a", "a"), ("b", "b"))
wandb_attribute("tags", "tags", (("a",), ("a",)), (("b", "c"), ("b", "c")))
wandb_attribute("description", "notes", ("a", "a"), ("b", "b"))
wandb_attribute("entity", "entity", ("a", "a"), ("b", "b"))


@effect("WandbOptions.init_timeout", (7.0, 7.0), (9.0, 9.0))
def wandb_init_timeout(value, folder):
    with run_of(folder, "wandb", WandbOptions(mode="offline", init_timeout=value)) as run:
        return run.settings.init_timeout


# -- MLflow ----------------------------------------------------------------------------------------------------------------------


def experiment_of(folder, run):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db").get_experiment(run.info.experiment_id)


@effect("MlflowOptions.tracking_uri", ("a", (1, 0)), ("b", (0, 1)))
def mlflow_tracking_uri(value, folder):
    """Runs in two databases."""
    from mlflow import MlflowClient

    clients = []
    for name in ("a", "b"):
        shutil.copy(empty_database(), folder / f"{name}.db")
        clients.append(MlflowClient(tracking_uri=f"sqlite:///{folder}/{name}.db"))
    with run_of(folder, "mlflow", MlflowOptions(tracking_uri=f"sqlite:///{folder}/{value}.db")):
        experiments = [[e.experiment_id for e in client.search_experiments()] for client in clients]
        return tuple(len(c.search_runs(ids)) for c, ids in zip(clients, experiments, strict=True))


@effect("MlflowOptions.experiment_name", (None, "probe"), ("other", "other"))
def mlflow_experiment_name(value, folder):
    with run_of(folder, "mlflow", MlflowOptions(experiment_name=value)) as run:
        return experiment_of(folder, run).name


@effect("MlflowOptions.run_name", ("a", "a"), ("b", "b"))
def mlflow_run_name(value, folder):
    with run_of(folder, "mlflow", MlflowOptions(run_name=value)) as run:
        return run.info.run_name


@effect("MlflowOptions.tags", ({"a": "1"}, "1"), ({"a": "2"}, "2"))
def mlflow_tags(value, folder):
    with run_of(folder, "mlflow", MlflowOptions(tags=value)) as run:
        return run.data.tags["a"]


@effect("MlflowOptions.description", ("a", "a"), ("b", "b"))
def mlflow_description(value, folder):
    with run_of(folder, "mlflow", MlflowOptions(description=value)) as run:
        return run.data.tags["mlflow.note.content"]


@effect("MlflowOptions.group", ("a", "a"), ("b", "b"))
def mlflow_group(value, folder):
    with run_of(folder, "mlflow", MlflowOptions(group=value)) as run:
        return run.data.tags["mlflow.parentRunId"]


@effect("MlflowOptions.artifact_location", ("a", "a"), ("b", "b"))
def mlflow_artifact_location(value, folder):
    with run_of(folder, "mlflow", MlflowOptions(artifact_location=(folder / value).as_uri())) as run:
        return experiment_of(folder, run).artifact_location.rpartition("/")[2]


@effect("MlflowOptions.connect_timeout", (0.2, True), (3.0, False))
def mlflow_connect_timeout(value, folder):
    """Whether an address that never answers is given up soon."""
    from drivetrain_mlflow.connection import check_server

    def wait(address, timeout):
        time.sleep(timeout)
        raise TimeoutError

    began = time.monotonic()
    with mock.patch("socket.create_connection", wait), contextlib.suppress(ConnectionError):
        check_server("http://127.0.0.1:9", value)
    return time.monotonic() - began < 1.5


# -- Comet -----------------------------------------------------------------------------------------------------------------------


def comet_messages(folder, **options):
    """Other values and tags of the archive."""
    with run_of(folder, "comet", CometOptions(**{"mode": "offline", **options})):
        pass
    (archive,) = folder.rglob("*.zip")
    with zipfile.ZipFile(archive) as opened:
        about = json.loads(opened.read("experiment.json"))
        lines = [json.loads(line) for line in opened.read("messages.json").decode().splitlines()]
    others = {m["payload"]["key"]: m["payload"]["value"] for m in lines if m["type"] == "log_other"}
    return others, about


@effect("CometOptions.mode", ("offline", True), ("online", "TrackerError"))
def comet_mode(value, folder):
    """Offline there is an archive; online without a key is refused."""
    with mock.patch.dict(os.environ):
        os.environ.pop("COMET_API_KEY", None)
        try:
            comet_messages(folder, mode=value)
        except DrivetrainError as error:
            return type(error).__name__
    return any(f.endswith(".zip") for f in files(folder))


@effect("CometOptions.workspace", ("a", "a"), ("b", "b"))
def comet_workspace(value, folder):
    return comet_messages(folder, workspace=value)[1]["workspace"]


@effect("CometOptions.tags", (("a",), ["a"]), (("b",), ["b"]))
def comet_tags(value, folder):
    return comet_messages(folder, tags=value)[1]["tags"]


@effect("CometOptions.run_name", ("a", "a"), ("b", "b"))
def comet_run_name(value, folder):
    return comet_messages(folder, run_name=value)[0]["Name"]


@effect("CometOptions.group", ("a", "a"), ("b", "b"))
def comet_group(value, folder):
    return comet_messages(folder, group=value)[0]["group"]


@effect("CometOptions.description", ("a", "a"), ("b", "b"))
def comet_description(value, folder):
    return comet_messages(folder, description=value)[0]["notes"]


@effect("CometOptions.offline_directory", ("a", "a"), ("b", "b"))
def comet_offline_directory(value, folder):
    comet_messages(folder, offline_directory=str(folder / value))
    (archive,) = folder.rglob("*.zip")
    return archive.parent.name


# -- Neptune ---------------------------------------------------------------------------------------------------------------------


def neptune_operations(folder, **options):
    """The project, and everything in the operations as text."""
    with run_of(folder, "neptune", NeptuneOptions(**options)):
        pass
    (database,) = folder.rglob("*.sqlite3")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        (project,) = connection.execute("select project from metadata").fetchone()
        rows = connection.execute("select operation from run_operations").fetchall()
    return project, b"".join(row[0] for row in rows)


@effect("NeptuneOptions.mode", ("offline", True), ("async", "ConfigurationError"))
def neptune_mode(value, folder):
    neptune_operations(folder, mode=value)
    return True


@effect("NeptuneOptions.workspace", ("a", "a/probe"), ("b", "b/probe"))
def neptune_workspace(value, folder):
    return neptune_operations(folder, workspace=value)[0]


def neptune_text(name, make):
    @effect(f"NeptuneOptions.{name}", ("wordone", (True, False)), ("wordtwo", (False, True)))
    def observe(value, folder):
        content = neptune_operations(folder, **{name: make(value)})[1]
        return b"wordone" in content, b"wordtwo" in content

    return observe


neptune_text("run_name", str)
neptune_text("tags", lambda value: (value,))
neptune_text("group", str)
neptune_text("description", str)
