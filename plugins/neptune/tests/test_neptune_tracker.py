import importlib.util
import pathlib
import subprocess
import sys

import pytest

from drivetrain.errors import ConfigurationError
from drivetrain.tracking import TrackerHub, TrackingOptions
from drivetrain_neptune.plugin import SPEC

_spec = importlib.util.spec_from_file_location("neptune_reader", pathlib.Path(__file__).with_name("neptune_reader.py"))
neptune_reader = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(neptune_reader)


def make_hub(directory, **options):
    return TrackerHub.from_plan([SPEC], logging_dir=directory, options=TrackingOptions(interval=0.0, **options))


def test_the_entry_module_imports_neither_torch_nor_the_sdk():
    code = "import sys, drivetrain_neptune.plugin; print({'torch', 'neptune_scale'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("mode", ["async", "online", "sync"])
def test_online_is_refused_plainly_without_importing_or_asking_anyone(tmp_path, mode):
    with pytest.raises(ConfigurationError, match="hosted service ended"):
        make_hub(tmp_path).start("p", None, {"neptune": {"mode": mode}})
    assert not list(tmp_path.iterdir())


def test_it_needs_no_network_and_no_variable(tmp_path):
    """In a process that can't connect anywhere."""
    code = (
        "import socket\n"
        "def refuse(*a, **k): raise AssertionError('a connection was made')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "import sys\n"
        "from drivetrain.tracking import TrackerHub\n"
        "from drivetrain_neptune.plugin import SPEC\n"
        "hub = TrackerHub.from_plan([SPEC], logging_dir=sys.argv[1])\n"
        "hub.start('p', {'lr': 0.1}); hub.log({'x': 1.0}, step=1); print(hub.finish())\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert result.stdout.split() == ["True"], result.stderr
    assert neptune_reader.read(tmp_path).scalars["x"] == [(1, 1.0)]


def test_tags_group_and_keywords_of_the_sdk(tmp_path):
    hub = make_hub(tmp_path)
    hub.start("p/q", None, {"neptune": {"tags": ["a", "b"], "group": "g", "notes": "why", "run_id": "mine"}})
    assert hub.run_ids() == {"neptune": "mine"}
    hub.finish()
    [database] = neptune_reader.databases(tmp_path)
    updates, _ = neptune_reader.operations(database)
    content = b"".join(update.SerializeToString() for update in updates)
    assert all(word in content for word in (b"group_tags", b"sys/tags", b"why"))
    with pytest.raises(ConfigurationError, match="Did you mean 'experiment_name'"):
        hub.start("p", None, {"neptune": {"experiment_nam": "x"}})
    with pytest.raises(ConfigurationError, match="can't set 'api_token'"):
        hub.start("p", None, {"neptune": {"api_token": "x"}})


def test_a_step_that_neptune_cannot_hold_is_kept_apart_and_the_others_arrive(tmp_path, caplog):
    hub = make_hub(tmp_path, retry_after=0.01)
    hub.start("p")
    hub.log({"x": 1.0}, step=-1)
    hub.log({"x": 2.0}, step=1)
    hub.log({"x": 3.0}, step=2)
    hub.finish()
    assert neptune_reader.read(tmp_path).scalars["x"] == [(1, 2.0), (2, 3.0)]
    assert "from 0 to 999999999999, not -1" in caplog.text and list(tmp_path.rglob("*.rejected"))
