"""DeepSpeed's own launcher, and what a bug report says."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from click.testing import CliRunner

from drivetrain._engine.detect import survey_process
from drivetrain._plugins import get_registry
from drivetrain.cli import main

#: What DeepSpeed's launcher sets on the second of two machines with three processes each.
VARIABLES = {
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "RANK": "4",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_SIZE": "3",
    "CROSS_RANK": "1",
    "CROSS_SIZE": "2",
}


def test_variables_of_the_launcher_say_who_a_process_is():
    process = survey_process(get_registry().specs("cluster").values(), VARIABLES).process
    assert (process.rank, process.world_size, process.local_rank, process.local_world_size) == (4, 6, 1, 3)
    assert (process.node_rank, process.cluster) == (1, "deepspeed")


SCRIPT = """
import sys
from drivetrain._engine.detect import survey_process
from drivetrain._plugins import get_registry
import os
process = survey_process(get_registry().specs("cluster").values(), os.environ).process
sys.stdout.write(f"{process.rank}/{process.world_size} {process.local_world_size} {process.cluster}\\n")
"""


def test_a_script_under_the_launcher(tmp_path):
    script = tmp_path / "who.py"
    script.write_text(SCRIPT)
    command = [
        "-m",
        "deepspeed.launcher.runner",
        "--num_accelerators",
        "2",
        "--no_local_rank",
        "--master_port",
        "29655",
    ]
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}  # noqa: PTH120
    result = subprocess.run(
        [sys.executable, *command, str(script)], capture_output=True, text=True, timeout=250, env=environ
    )
    assert result.returncode == 0, result.stderr
    for line in ("0/2 2 deepspeed", "1/2 2 deepspeed"):
        assert line in result.stdout


def test_a_bug_report_says_which_operators_there_are():
    result = CliRunner().invoke(main, ["env", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)["backend deepspeed"]
    assert facts["communication"] in ("gloo", "nccl")
    states = [facts[name].split(", ") for name in facts if name.startswith("operators ") and facts[name] != "none"]
    assert {"cpu_adam", "async_io"} <= {name for names in states for name in names}
