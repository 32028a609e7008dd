"""Somebody else's plugin beside this repository's packages: a wheel of its own, put on the path, with no change here.

The project is that of tests/packaging, where it is installed into a clean environment and put through the whole kit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1] / "packaging" / "third_party"
CLI = [sys.executable, "-m", "drivetrain"]

SCRIPT = """
import sys
import torch
from drivetrain import Accelerator
from drivetrain.testing.training import Case, reference, train

expected = reference(Case(accumulation=4), world_size=2)
for arguments, backend in (({"device": "toychip"}, "ddp"), ({"backend": "acme-mean"}, "acme-mean")):
    accelerator = Accelerator(**arguments)
    assert (accelerator.plan.device.name, accelerator.plan.backend.name) == ("toychip", backend)
    result = train(Case(accumulation=4, accelerator=arguments))
    assert result.largest_difference(expected) < 2e-6

accelerator = Accelerator(device="toychip", log_with="acme-log", project_dir=sys.argv[1])
accelerator.init_trackers("demo")
accelerator.log({"loss": torch.tensor(0.5)}, step=3)
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the plugin as pip installs it."""
    folder = tmp_path_factory.mktemp("acme")
    shutil.copytree(PROJECT, folder / "project")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, folder / "project"]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        folder / "site",
    ]
    subprocess.run([*install, wheel], check=True)
    return folder / "site"


def run(site, *arguments, timeout=120, **variables):
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_listed_and_checked(site):
    (record,) = [r for r in json.loads(run(site, *CLI, "plugins", "--json")) if r["name"] == "acme"]
    assert (record["status"], record["distribution"], record["version"]) == ("ok", "acme-drivetrain", "3.2.1")
    assert "plugin 'acme' (acme-drivetrain 3.2.1): ok" in run(site, *CLI, "plugins", "check", "acme")


def test_it_trains_on_two_processes(site, tmp_path):
    """Its device under ddp, which knows nothing of it; its backend on its device; its tracker."""
    (tmp_path / "script.py").write_text(SCRIPT)
    launch = [*CLI, "launch", "--num-processes", "2", tmp_path / "script.py", tmp_path]
    run(site, *map(str, launch), timeout=240, DRIVETRAIN_DEVICE="toychip")
    lines = [json.loads(line) for line in (tmp_path / "demo" / "acme.log").read_text().splitlines()]
    assert lines == [{"step": 3, "values": {"loss": 0.5}}]


def test_it_is_gone_without_its_folder(tmp_path):
    assert "acme" not in run(tmp_path, *CLI, "plugins", "--json")
