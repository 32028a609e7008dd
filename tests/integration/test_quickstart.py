"""`drivetrain quickstart`: a script that trains on two processes, and never somebody's file overwritten."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.resources import files

import pytest
from click.testing import CliRunner

from drivetrain.cli.quickstart import _write, quickstart

TEMPLATE = files("drivetrain.cli").joinpath("templates", "train.py.txt").read_text(encoding="utf-8")


def test_another_file_is_not_overwritten(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("mine")
    result = CliRunner().invoke(quickstart, ["--dir", str(tmp_path)])
    assert result.exit_code != 0
    assert "won't overwrite it" in str(result.exception)
    assert result.exception.exit_code == 2
    assert script.read_text() == "mine"


def test_the_same_file_is_run_again_and_force_overwrites(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(TEMPLATE)
    _write(script, force=False)
    assert "is there already" in capsys.readouterr().err
    script.write_text("mine")
    _write(script, force=True)
    assert script.read_text() == TEMPLATE


def test_the_template_is_short():
    assert len(TEMPLATE.splitlines()) <= 40
    compile(TEMPLATE, "train.py", "exec")


@pytest.mark.slow
def test_it_trains_on_two_processes_in_a_new_folder(tmp_path):
    command = [sys.executable, "-m", "drivetrain", "quickstart", "--dir", "new"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "2 processes trained one model" in result.stdout
    (accuracy,) = re.findall(r"epoch 10 .* accuracy ([\d.]+)%", result.stdout)
    assert float(accuracy) > 90
    assert (tmp_path / "new" / "model" / "model.safetensors").exists()
    assert "Next:" in result.stderr
    assert [p.name for p in (tmp_path / "new" / "run" / "checkpoints").iterdir()] != []
    again = [*command[:3], "launch", "--cpu", "--num-processes", "1", "train.py", "11"]
    result = subprocess.run(again, cwd=tmp_path / "new", capture_output=True, text=True, timeout=280)
    assert "step 320, epoch 10." in result.stderr
    assert re.findall(r"epoch +(\d+)", result.stdout) == ["11"]
