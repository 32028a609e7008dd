"""A small cluster, and launching on it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from drivetrain.testing.launching import marked_processes

from .small_cluster import SmallCluster


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """An API server that runs pods as processes; programs find it through KUBECONFIG."""
    folder = tmp_path / "cluster"
    folder.mkdir()
    monkeypatch.setenv("MARK", f"kubernetes-{tmp_path.name}-{os.getpid()}")
    small = SmallCluster(folder)
    monkeypatch.setenv("KUBECONFIG", str(small.kubeconfig))
    yield small
    small.close()
    assert marked_processes(os.environ["MARK"], within=10) == []


@pytest.fixture
def job(cluster):
    """``job(script, *flags, arguments=())``: starts `drivetrain launch --on kubernetes`; the script lies in the pods alone."""
    started = []

    def start(script, *flags, arguments=(), **environ):
        (cluster.folder / "train.py").write_text(script)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        words = ["launch", "--cpu", "--on", "kubernetes", "--kubernetes-image", "train:1", "--main-process-port", port]
        command = [sys.executable, "-m", "drivetrain", *map(str, [*words, *flags, "train.py", *arguments])]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environ}
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture
def soon():
    """``soon(condition, seconds)``: whether it becomes true in time."""

    def wait(condition, seconds):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    return wait
