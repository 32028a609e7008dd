"""`drivetrain test` says whether an installation trains rightly."""

from __future__ import annotations

import os
import subprocess
import sys


def selftest(folder, *flags):
    command = [sys.executable, "-m", "drivetrain", "test", "--cpu", *flags]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def test_all_is_well_on_two_processes(tmp_path):
    result = selftest(tmp_path, "-n", "2")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "2 process(es) on cpu, backend ddp"
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["ok", name] for name in ("collectives:", "objects:", "training:", "checkpoint:")
    ]
    assert lines[5] == "All is well."


def test_a_configuration_that_changes_numbers_is_found_out(tmp_path):
    """Gradients that travel in half precision aren't those of one process."""
    (tmp_path / "drivetrain.toml").write_text('[ddp]\ncomm_hook = "fp16"\n[launch]\nnum_processes = 2\n')
    result = selftest(tmp_path)
    assert result.returncode == 1
    assert "failed: weights differ from plain PyTorch's by" in result.stderr
    assert "Not all is well" in result.stderr
    assert "All is well" not in result.stdout
