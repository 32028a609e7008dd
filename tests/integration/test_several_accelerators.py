"""One Accelerator after another in the same processes."""

import subprocess
import sys

BACKENDS = ("ddp", "fsdp", "deepspeed", "ddp")


def test_a_launched_script_may_make_one_after_another(tmp_path):
    """The launcher's store keeps what the groups before wrote into it; torch's own process groups wait there for each other without end."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from drivetrain import Accelerator\n"
        f"for trial, backend in enumerate({BACKENDS}):\n"
        "    accelerator = Accelerator(cpu=True, backend=backend)\n"
        "    print(trial, accelerator.gather(torch.tensor([accelerator.process_index + trial])).tolist(), flush=True)\n"
        "    accelerator.end_training()\n"
    )
    command = [sys.executable, "-m", "drivetrain", "launch", "--cpu", "-n", "2", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    lines = [line.partition("] ")[2] for line in ran.stdout.splitlines()]
    told = [line for line in lines if line[:1].isdigit()]
    assert sorted(told) == sorted([f"{trial} [{trial}, {trial + 1}]" for trial in range(len(BACKENDS))] * 2), ran.stdout
