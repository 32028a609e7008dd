import importlib.util
import logging
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from drivetrain.errors import ConfigurationError, TrackerError
from drivetrain.tracking import TrackerHub, TrackingOptions, read_spool
from drivetrain.tracking.sync import find_spools
from drivetrain_comet.plugin import SPEC


def load(name):
    spec = importlib.util.spec_from_file_location(name, pathlib.Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


comet_reader, QUIET = load("comet_reader"), load("test_tracker_conformance_comet").QUIET


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setenv("COMET_DISABLE_AUTO_LOGGING", "1")
    monkeypatch.delenv("COMET_API_KEY", raising=False)


def make_hub(directory):
    return TrackerHub.from_plan([SPEC], logging_dir=directory, options=TrackingOptions(interval=0.0))


def test_the_entry_module_imports_neither_torch_nor_the_sdk():
    code = "import sys, drivetrain_comet.plugin; print({'torch', 'comet_ml'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_accelerate_s_name_and_long_notes_and_the_end_of_a_failed_run(tmp_path):
    hub = make_hub(tmp_path)
    hub.start("p", None, {"comet_ml": {"mode": "offline", "notes": "n" * 2500, "run_name": "first", **QUIET}})
    hub.log({"x": 1.0}, 1, {"comet_ml": {"epoch": 7}})
    assert hub.get("comet_ml", unwrap=True).get_key() == hub.run_ids()["comet"]
    hub._status = "failed"
    hub.finish()
    stored, others = comet_reader.read(tmp_path)
    assert others["notes"] == "n" * 2500 and others["Name"] == "first" and others["status"] == "failed"
    assert stored.scalars["x"] == [(1, 1.0)]
    [read] = comet_reader.sources(tmp_path)
    metrics = [m["payload"]["metric"] for m in comet_reader.messages(read) if m["type"] == "metric_msg"]
    assert [m["epoch"] for m in metrics] == [7]


def test_mistakes_are_errors_that_say_what_to_do(tmp_path):
    for wrong, error, message in (
        ({"workspac": "x"}, ConfigurationError, "Did you mean 'workspace'"),
        ({"project_name": "x"}, ConfigurationError, "can't set 'project_name'"),
        ({"mode": "online"}, TrackerError, "COMET_API_KEY.*Offline"),
    ):
        with pytest.raises(error, match=message):
            make_hub(tmp_path).start("p", None, {"comet": {"mode": "offline", **QUIET, **wrong}})


def test_nothing_is_left_in_the_temporary_folder(tmp_path, monkeypatch):
    import tempfile

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    hub = make_hub(tmp_path / "logs")
    hub.start("p", None, {"comet": {"mode": "offline", **QUIET}})
    hub.log_images({"x": np.zeros((2, 2))}, 1)
    hub.finish()
    assert not list((tmp_path / "tmp").iterdir())
    assert [p.suffix for p in (tmp_path / "logs").iterdir()] == [".zip"]


def test_online_without_a_network_keeps_values_within_its_bound(tmp_path, monkeypatch, caplog):
    """A server that refuses connections, so that nothing leaves this machine."""
    monkeypatch.setenv("COMET_API_KEY", "a" * 25)
    monkeypatch.setenv("COMET_URL_OVERRIDE", "http://127.0.0.1:9/clientlib/")
    bounds = TrackingOptions(interval=0.0, start_timeout=1.0, finish_timeout=1.0, retry_after=60.0)
    hub = TrackerHub.from_plan([SPEC], logging_dir=tmp_path, options=bounds)
    with caplog.at_level(logging.WARNING, "drivetrain.tracking"):
        hub.start("p", None, {"comet": {"mode": "online", **QUIET}})
        hub.log({"x": 1.0}, step=1)
        assert not hub.finish()
    [spool] = find_spools(tmp_path)
    assert [r.payload for r in read_spool(spool)[1]] == [{"x": 1.0}]
    assert len([r for r in caplog.records if r.name == "drivetrain.tracking" and "until it has" in r.getMessage()]) <= 1
    assert "aaaaaaaa" not in "".join(r.getMessage() for r in caplog.records if r.name == "drivetrain.tracking")
