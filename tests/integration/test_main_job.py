"""The README's main job as it is typed, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_digits_are_recognised_by_two_processes(tmp_path):
    script = ROOT / "docs" / "examples" / "digits" / "train.py"
    command = [sys.executable, "-m", "drivetrain", "launch", "--cpu", "--num-processes", "2", str(script)]
    result = subprocess.run(
        [*command, "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (accuracy,) = re.findall(r"2 processes: ([\d.]+)% of 359 images right", result.stdout)
    assert float(accuracy) > 95
    assert "epoch 1/8: 100%" in result.stderr  # the progress bar
    assert "rank 1]" not in result.stdout + result.stderr  # which the main process alone shows
    assert "Traceback" not in result.stderr

    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "checkpoints").is_dir()
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [row["values"]["loss"] for row in rows if "loss" in row["values"]]
    assert losses[-1] < losses[0] / 5
    for path in ("loss.png", "checkpoints", metrics):
        assert str(tmp_path / path) in result.stdout
    assert "Next:" in result.stdout
