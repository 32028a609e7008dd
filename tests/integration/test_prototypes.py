"""The prototypes beside ADR 1 still run, as far as their vendors are installed."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "docs" / "adr" / "prototypes" / "run.py"


@pytest.mark.full
def test_the_fsdp_prototype_keeps_its_figures():
    done = subprocess.run([sys.executable, RUN, "--backends", "fsdp"], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all as expected" in done.stdout
