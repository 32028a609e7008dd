"""Somebody else's plugin: its own distribution, built, installed into a clean environment, with no change to this repository."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PROJECT = Path(__file__).parent / "third_party"


@pytest.fixture(scope="module")
def acme(clean, tmp_path_factory) -> Path:
    """A wheel of the plugin, made outside of the repository and installed beside core and ddp."""
    folder = tmp_path_factory.mktemp("acme")
    shutil.copytree(PROJECT, folder / "project")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, folder / "project"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = folder.glob("*.whl")
    clean.pip_install("drivetrain[ddp,testing]", "pytest-timeout", wheel)
    return folder


def test_it_is_listed_and_checked(clean, acme, tmp_path):
    listed = clean.run("drivetrain", "plugins", "--json", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    (record,) = [r for r in json.loads(listed.stdout) if r["name"] == "acme"]
    assert (record["status"], record["distribution"], record["version"]) == ("ok", "acme-drivetrain", "3.2.1")
    check = clean.run("drivetrain", "plugins", "check", "acme", cwd=tmp_path)
    assert check.returncode == 0, check.stdout + check.stderr


def test_it_trains_and_passes_the_kit(clean, acme, tmp_path):
    checks = acme / "project" / "checks" / "acme_checks.py"
    plugins = ("-p", "drivetrain.testing.pytest_plugin")
    result = clean.run("python", "-m", "pytest", "-q", "-m", "not full", *plugins, checks, cwd=tmp_path, timeout=1000)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]


def test_it_is_gone_when_it_is_uninstalled(clean, acme, tmp_path):
    command = [sys.executable, "-m", "pip", "--python", clean.folder / "bin" / "python", "uninstall", "-q", "-y"]
    subprocess.run([*command, "acme-drivetrain"], check=True, capture_output=True)
    listed = clean.run("drivetrain", "plugins", "--json", cwd=tmp_path)
    assert "acme" not in listed.stdout
