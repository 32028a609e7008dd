import importlib.util
import json
import pathlib

import numpy as np
import pytest
from PIL import Image

from drivetrain.testing.tracker import StoredRun, TrackerConformance
from drivetrain_wandb.plugin import SPEC
from drivetrain_wandb.tracker import STEP, make_coder

_spec = importlib.util.spec_from_file_location("wandb_reader", pathlib.Path(__file__).with_name("wandb_reader.py"))
wandb_reader = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(wandb_reader)

QUIET = {"console": "off", "x_disable_stats": True, "silent": True, "x_save_requirements": False}


def read_runs(directory):
    """All runs below a directory, in the order of their start, as one."""
    stored, coder = StoredRun(), make_coder()
    found = [(path, wandb_reader.read(path)) for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb"))]
    for _, run in found:
        coder.aliases.update(run["config"].get("drivetrain/names", {}))
    for path, run in found:
        for row in run["history"]:
            for key, value in row.items():
                if not key.startswith("_") or key.startswith("_x"):
                    _add(stored, path.parent / "files", coder.original(key), row.get(STEP), value)
        stored.config.update(
            {coder.original(k): v for k, v in run["config"].items() if k not in ("_wandb", "drivetrain/names")}
        )
        stored.summary.update({coder.original(k): v for k, v in run["summary"].items()})
        for artifact in (a for a in run["artifacts"] if a.type == "file"):
            for entry in artifact.manifest.contents:
                stored.artifacts[json.loads(artifact.metadata)["name"]] = pathlib.Path(entry.local_path).read_bytes()
    stored.scalars.pop(STEP, None)
    return stored


def _add(stored, files, name, step, value):
    kind = value.get("_type") if isinstance(value, dict) else None
    if kind == "images/separated":
        arrays = [np.asarray(Image.open(files / p)) for p in value["filenames"]]
        stored.images.setdefault(name, []).extend((step, a) for a in arrays)
        stored.figures.setdefault(name, []).extend(step for a in arrays if a.shape[:2] == (100, 100))
    elif kind == "table-file":
        table = json.loads((files / value["path"]).read_text())
        stored.tables[name] = table["columns"], table["data"]
    elif kind == "histogram":
        stored.histograms[name] = value["bins"][0], value["bins"][-1], sum(value["values"])
    else:
        stored.scalars.setdefault(name, []).append((step, value))
        if isinstance(value, str):
            stored.texts.setdefault(name, []).append((step, value))


class TestWandb(TrackerConformance):
    spec = SPEC
    init_kwargs = {"mode": "offline", "settings": QUIET}

    @pytest.fixture(autouse=True)
    def _no_name_warning(self, monkeypatch):
        monkeypatch.setenv("WANDB_SILENT", "true")

    def read_back(self, directory):
        return read_runs(directory)
