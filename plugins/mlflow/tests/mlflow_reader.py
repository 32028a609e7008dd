"""Reads a run of MLflow back through its own client."""

import json
import pathlib
import re
import tempfile

import numpy as np
from mlflow import MlflowClient
from PIL import Image

from drivetrain.testing.tracker import StoredRun
from drivetrain.tracking.parts import join_text
from drivetrain_mlflow.names import TEXT, make_coder

_IMAGE = re.compile(r"(.+)\+step\+(-?\d+)\+timestamp\+\d+\+[\w-]+\.png")


def runs(uri):
    client = MlflowClient(tracking_uri=uri)
    experiments = [e.experiment_id for e in client.search_experiments()]
    return client, client.search_runs(experiments)


def read(uri):
    """The one run of a database or server."""
    client, [run] = runs(uri)
    stored, coder, run_id = StoredRun(), make_coder(), run.info.run_id
    coder.aliases.update(
        {k.removeprefix("drivetrain.name/"): v for k, v in run.data.tags.items() if k.startswith("drivetrain.name/")}
    )
    for key in run.data.metrics:
        history = sorted(client.get_metric_history(run_id, key), key=lambda m: m.timestamp)
        stored.scalars[coder.original(key)] = [(m.step, m.value) for m in history]
    for tag, text in join_text({k: v for k, v in run.data.tags.items() if k.startswith(f"{TEXT}/")}).items():
        _, step, name = tag.split("/", 2)
        series = stored.scalars.setdefault(coder.original(name), [])
        series[:] = [point for point in series if point[0] != int(step)] + [(int(step), text)]
    stored.config.update({coder.original(k): v for k, v in join_text(run.data.params).items()})
    stored.summary.update(
        {k.removeprefix("summary/"): v[-1][1] for k, v in stored.scalars.items() if k.startswith("summary/")}
    )
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for path in sorted(_files(client, run_id)):
            _add_file(stored, path, pathlib.Path(client.download_artifacts(run_id, path, str(root))))
    return stored


def _files(client, run_id, path=None):
    for entry in client.list_artifacts(run_id, path):
        if entry.is_dir:
            yield from _files(client, run_id, entry.path)
        else:
            yield entry.path


def _add_file(stored, path, local):
    content = local.read_bytes()
    kind, _, rest = path.partition("/")
    name, _, file = rest.rpartition("/")
    step = file.rpartition(".")[0]
    if kind == "images":
        match = _IMAGE.fullmatch(rest)
        if match:
            key = make_coder().original(match[1].replace("~", "/"))
            stored.images.setdefault(key, []).append((int(match[2]), np.asarray(Image.open(local))))
    elif kind == "figures":
        if Image.open(local).size == (100, 100):
            stored.figures.setdefault(name, []).append(int(step))
    elif kind == "tables":
        table = json.loads(content)
        stored.tables[name] = table["columns"], table["data"]
    elif kind == "texts":
        stored.texts.setdefault(name, []).append((int(step), content.decode()))
    else:
        stored.artifacts[path] = content
