import importlib.util
import pathlib
import shutil

import pytest

from drivetrain.testing.tracker import TrackerConformance
from drivetrain_mlflow.plugin import SPEC

_spec = importlib.util.spec_from_file_location("mlflow_reader", pathlib.Path(__file__).with_name("mlflow_reader.py"))
mlflow_reader = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mlflow_reader)


class TestMlflow(TrackerConformance):
    spec = SPEC

    @pytest.fixture(autouse=True)
    def _prepare(self, empty_database, monkeypatch):
        monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        self.database = empty_database

    def make_hub(self, directory, *, rank=0):
        if rank == 0 and not (directory / "mlflow.db").exists():
            directory.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.database, directory)
        return super().make_hub(directory, rank=rank)

    def read_back(self, directory):
        return mlflow_reader.read(f"sqlite:///{directory}/mlflow.db")
