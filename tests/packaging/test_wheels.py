"""Wheels of all packages, built here and installed into clean environments: what a user gets, from an empty folder on."""

from __future__ import annotations

import json
import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_wheels_hold_what_they_need_and_nothing_else(wheels, packages):
    found = {wheel.name.split("-")[0]: _names(wheel) for wheel in wheels.glob("*.whl")}
    assert len(found) == len(packages)
    for module, names in found.items():
        assert f"{module}/py.typed" in names
        assert any(name.endswith("licenses/LICENSE") for name in names)
        assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {module}
        assert not any(Path(name).name.startswith("test_") or "/tests/" in name for name in names)
    assert "drivetrain/cli/templates/train.py.txt" in found["drivetrain"]
    assert "drivetrain/_plugins/known_plugins.json" in found["drivetrain"]


def test_each_wheel_can_be_installed_by_itself(wheels, new_environment, tmp_path):
    """Everything that it needs is found from nothing; what is installed then runs in the tests below."""

    def install(wheel: Path) -> set[str]:
        environment = new_environment(tmp_path / wheel.stem)
        report = json.loads(environment.pip_install("--dry-run", "--report", "-", str(wheel)).stdout)
        return {item["metadata"]["name"] for item in report["install"]}

    found = sorted(wheels.glob("*.whl"))
    with ThreadPoolExecutor() as pool:
        for wheel, chosen in zip(found, pool.map(install, found), strict=True):
            assert {wheel.name.split("-")[0].replace("_", "-"), "drivetrain", "torch"} <= chosen


def test_core_alone_trains_on_one_device(clean, wheels, tmp_path):
    clean.pip_install("drivetrain")
    result = clean.run("drivetrain", "quickstart", "--num-processes", 1, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "1 processes trained one model" in result.stdout
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_core_alone_stops_before_it_starts_two_processes(clean, tmp_path):
    result = clean.run("drivetrain", "quickstart", cwd=tmp_path)
    assert result.returncode == 1
    assert re.search(r'pip install "?drivetrain(\[ddp\]|-ddp)', result.stderr)
    assert "epoch" not in result.stdout
    assert "Traceback" not in result.stderr


def test_with_ddp_quickstart_trains_on_two_processes_in_an_empty_folder(clean, tmp_path):
    clean.pip_install("drivetrain[ddp]")
    result = clean.run("drivetrain", "quickstart", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (
        sum(bool(line) for line in (tmp_path / "train.py").read_text().splitlines()) <= 33
    )  # about 30, and blank ones
    assert "2 processes trained one model" in result.stdout
    (accuracy,) = re.findall(r"epoch 10 .* accuracy ([\d.]+)%", result.stdout)
    assert float(accuracy) > 90


def test_the_standard_extra_brings_the_tensorboard_tracker(clean, tmp_path):
    clean.pip_install("drivetrain[standard]")
    result = clean.run("drivetrain", "plugins", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for name in ("builtin", "ddp", "tensorboard"):
        assert f'"{name}"' in result.stdout
    check = clean.run("drivetrain", "plugins", "check", "tensorboard", cwd=tmp_path)
    assert check.returncode == 0, check.stdout + check.stderr
