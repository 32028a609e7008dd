"""Against a real server over HTTP, which is killed in the middle of a run and started again."""

import importlib.util
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request

import pytest
from click.testing import CliRunner

from drivetrain.cli import main
from drivetrain.tracking.sync import find_spools

_spec = importlib.util.spec_from_file_location("mlflow_reader", pathlib.Path(__file__).with_name("mlflow_reader.py"))
mlflow_reader = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mlflow_reader)

ENVIRONMENT = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}

#: A training script: 300 rows, with an image and a file at the end; it says where it is, and waits to be told to go on.
SCRIPT = textwrap.dedent(
    """
    import pathlib, sys, time
    import numpy as np
    from drivetrain.tracking import TrackerHub, TrackingOptions
    from drivetrain_mlflow.plugin import SPEC

    folder, uri = pathlib.Path(sys.argv[1]), sys.argv[2]
    options = TrackingOptions(interval=0.0, finish_timeout=4.0, flush_timeout=60.0)
    hub = TrackerHub.from_plan([SPEC], logging_dir=folder, options=options)
    hub.start("http", {"lr": 0.1, "long": "p" * 7000}, {"mlflow": {"tracking_uri": uri, "run_name": "r"}})
    for step in range(300):
        hub.log({"loss": 1 / (step + 1), "constant": 1.0, "phase": "a" if step < 2 else float(step)}, step=step)
        if step == 99:
            assert hub.flush()
            (folder / "half").write_text("")
        if step == 119:
            while not (folder / "killed").exists():
                time.sleep(0.01)
        time.sleep(0.001)
    hub.log_images({"sample": np.full((4, 4, 3), 9, np.uint8)}, 300)
    (folder / "weights.bin").write_bytes(b"weights")
    hub.log_artifact(folder / "weights.bin", step=300)
    began = time.monotonic()
    print("delivered" if hub.finish() else "kept", time.monotonic() - began < 12.0)
    """
)


class Server:
    """``mlflow server`` in a folder, which can be killed and started again."""

    def __init__(self, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri, self._folder, self._process = f"http://127.0.0.1:{self.port}", folder, None

    def start(self):
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", self.port, "--workers", 1]
        command += [
            "--backend-store-uri",
            f"sqlite:///{self._folder}/ml.db",
            "--artifacts-destination",
            self._folder / "art",
        ]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                list(map(str, command)),
                env={**os.environ, **ENVIRONMENT},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for _ in range(900):
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            except OSError:
                assert self._process.poll() is None, (self._folder / "server.log").read_text()[-2000:]
                time.sleep(0.1)
        raise TimeoutError("the server isn't up after 90 s")

    def kill(self):
        """Without notice, with its workers, which are of its own session."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("server"))
    server.start()
    yield server
    server.kill()


@pytest.mark.timeout(300)
def test_a_server_that_is_killed_and_started_again_has_every_value_once(server, tmp_path, monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path), server.uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (tmp_path / "half").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        server.kill()  # while rows 100 to 119 are on their way
        (tmp_path / "killed").write_text("")
        output, errors = process.communicate(timeout=120)
    assert output.split() == ["kept", "True"], output + errors
    # One warning, whether the kill met a request or came between two, and at the end where the values are.
    assert len([line for line in errors.splitlines() if "kept in" in line]) == 1 and "Traceback" not in errors, errors
    assert "were not delivered; they are in" in errors
    assert len(list(find_spools(tmp_path))) == 1

    while_down = CliRunner().invoke(main, ["tracking", "sync", str(tmp_path)])
    assert while_down.exit_code == 1 and "remaining" in while_down.output
    server.start()
    synced = CliRunner().invoke(main, ["tracking", "sync", str(tmp_path)])
    assert synced.exit_code == 0, synced.output
    assert not list(find_spools(tmp_path))

    stored = mlflow_reader.read(server.uri)
    assert stored.scalars["loss"] == [(s, 1 / (s + 1)) for s in range(300)]
    assert stored.scalars["constant"] == [(s, 1.0) for s in range(300)]
    assert sorted(stored.scalars["phase"], key=lambda point: point[0])[:3] == [(0, "a"), (1, "a"), (2, 2.0)]
    assert len(stored.scalars["phase"]) == 300
    assert stored.config == {"lr": "0.1", "long": "p" * 7000}
    assert [step for step, _ in stored.images["sample"]] == [300] and stored.artifacts["weights.bin"] == b"weights"
    _, [run] = mlflow_reader.runs(server.uri)
    assert run.info.status == "FINISHED" and run.info.run_name == "r"
