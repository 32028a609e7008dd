import importlib.util
import math
import pathlib
import shutil
import subprocess
import sys

import pytest

from drivetrain.errors import ConfigurationError
from drivetrain.tracking import TrackerHub, TrackingOptions
from drivetrain_mlflow.plugin import SPEC

_spec = importlib.util.spec_from_file_location("mlflow_reader", pathlib.Path(__file__).with_name("mlflow_reader.py"))
mlflow_reader = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mlflow_reader)


@pytest.fixture
def make_hub(tmp_path, empty_database, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    shutil.copy(empty_database, tmp_path)

    def make(**options):
        bounds = TrackingOptions(**{"interval": 0.0, "finish_timeout": 60.0, **options})
        return TrackerHub.from_plan([SPEC], logging_dir=tmp_path, options=bounds)

    return make


def client_and_run(directory):
    client, [run] = mlflow_reader.runs(f"sqlite:///{directory}/mlflow.db")
    return client, run


def test_the_entry_module_imports_neither_torch_nor_the_sdk():
    code = "import sys, drivetrain_mlflow.plugin; print({'torch', 'mlflow'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_what_a_run_is_called_and_how_it_ended(make_hub, tmp_path):
    hub = make_hub()
    hub.start("p", None, {"mlflow": {"run_name": "first", "tags": {"a": "1"}, "notes": "why", "experiment_name": "e"}})
    hub._status = "failed"
    hub.finish()
    client, run = client_and_run(tmp_path)
    assert (run.info.run_name, run.info.status) == ("first", "FAILED")
    assert run.data.tags["a"] == "1" and run.data.tags["mlflow.note.content"] == "why"
    assert client.get_experiment(run.info.experiment_id).name == "e"


def test_an_infinity_is_a_metric_with_a_text_beside(make_hub, tmp_path):
    hub = make_hub()
    hub.start("p")
    hub.log({"loss": math.inf}, step=3)
    hub.finish()
    client, run = client_and_run(tmp_path)
    [point] = client.get_metric_history(run.info.run_id, "loss")
    assert point.step == 3 and point.value > 1e308 and run.data.tags["drivetrain.text/3/loss"] == "inf"


def test_the_same_value_at_the_same_step_and_time_is_kept_twice(make_hub, tmp_path):
    hub = make_hub()
    hub.start("p")
    for _ in range(5):
        hub.log({"x": 1.0}, step=1)
    hub.finish()
    client, run = client_and_run(tmp_path)
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "x")] == [(1, 1.0)] * 5


def test_a_parameter_that_changes_is_kept_beside(make_hub, tmp_path):
    hub = make_hub()
    hub.start("p", {"lr": 0.1})
    hub.log_config({"lr": 0.1, "late": 1})
    hub.log_config({"lr": 0.2})
    run_ids = hub.run_ids()
    hub.finish()
    again = make_hub()
    again.start("p", {"lr": 0.3}, run_ids=run_ids)
    again.finish()
    _, run = client_and_run(tmp_path)
    assert run.data.params == {"lr": "0.1", "late": "1"} and run.data.tags["changed.lr"] == "0.3"


def test_the_user_s_own_active_run_is_left_alone(make_hub, tmp_path):
    import mlflow

    hub = make_hub()
    hub.start("p")
    assert mlflow.active_run() is None
    assert hub.get("mlflow").client.get_run(hub.run_ids()["mlflow"]).info.status == "RUNNING"
    hub.finish()


def test_unknown_options_are_refused_with_the_nearest(make_hub):
    with pytest.raises(ConfigurationError, match="Did you mean 'run_name'"):
        make_hub().start("p", None, {"mlflow": {"run_nam": "x"}})


def test_files_of_the_same_name_are_all_kept(make_hub, tmp_path):
    hub = make_hub()
    hub.start("p")
    for content in (b"one", b"two"):
        (tmp_path / "file.bin").write_bytes(content)
        hub.log_artifact(tmp_path / "file.bin", "folder/file.bin")
        assert hub.flush(60.0)
    hub.finish()
    stored = mlflow_reader.read(f"sqlite:///{tmp_path}/mlflow.db")
    assert stored.artifacts == {"folder/file.bin": b"one", "folder/file-1.bin": b"two"}
