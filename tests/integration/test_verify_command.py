"""`drivetrain verify` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DIGITS = Path(__file__).parents[2] / "docs" / "examples" / "digits" / "train.py"

#: Trains a small network; what is planted comes in at three places.
SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Accelerator
from drivetrain.utils import set_seed

set_seed(1)
accelerator = Accelerator({arguments})
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(60, 4), torch.randn(60, 1)), batch_size=5, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
{prepared}
accelerator.init_trackers("run")
for x, y in loader:
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print("step", accelerator.step, sys.argv[1:])
    if accelerator.project_dir:
        accelerator.get_tracker("jsonl").log_scalars({{"loss": loss.item()}}, step=0)
accelerator.save_state()
accelerator.end_training()
"""


def verify(folder, *words, arguments="", prepared="", timeout=240):
    """The program's result on the script."""
    (folder / "train.py").write_text(SCRIPT.format(arguments=arguments, prepared=prepared))
    return subprocess.run(
        [sys.executable, "-m", "drivetrain", "verify", "--cpu", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


def test_parity_of_a_script_that_chooses_its_backend_and_leaves_nothing_behind(tmp_path):
    arguments = "backend='fsdp', log_with='jsonl', project_dir='out'"
    words = ("--steps", "4", "--json", "--keep", "kept", "train.py", "--lr", "3")
    result = verify(tmp_path, *words, arguments=arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert (found["parity"], found["steps"], found["processes"], found["backend"]) == (True, 4, 2, "fsdp")
    assert found["exit_codes"] == {"several processes": 0, "one process": 0}
    assert max(found["largest"].values()) < 1e-4
    assert any("dropout was switched off" in note for note in found["notes"])
    assert sorted(f.name for f in tmp_path.iterdir()) == ["kept", "out", "train.py"]
    assert list((tmp_path / "out").iterdir()) == []
    output = next((tmp_path / "kept" / "several" / "output").glob("**/rank-1.log")).read_text()
    assert output.count("step") == 4 and "['--lr', '3']" in output


def test_a_rank_that_freezes_a_layer_is_named_though_the_run_breaks(tmp_path):
    frozen = "accelerator.process_index and accelerator.unwrap_model(model)[3].requires_grad_(False)"
    result = verify(tmp_path, "--steps", "4", "train.py", prepared=frozen)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "part at step 1: frozen parameters of 3.bias" in result.stdout
    assert "[frozen-on-a-rank]" in result.stdout and "rank 1 alone" in result.stdout
    assert "the run of several processes ended with exit code 1" in result.stdout


def test_what_cannot_be_compared_is_said(tmp_path):
    (tmp_path / "other.py").write_text("print('no training')\n")
    result = verify(tmp_path, "other.py")
    assert result.returncode == 2
    assert "recorded nothing (exit code 0)" in result.stderr and "drivetrain.Accelerator" in result.stderr
    result = verify(tmp_path, "tran.py")
    assert result.returncode == 2
    assert "Did you mean train.py" in result.stderr
    assert verify(tmp_path).returncode == 2


@pytest.mark.full
def test_ranks_that_wait_for_each_other_are_ended_and_it_is_said_where_they_stand(tmp_path):
    hangs = (
        "def stop(*_):\n    import time\n    if accelerator.step == 2 and accelerator.process_index: time.sleep(600)\n"
    )
    hook = "accelerator.unwrap_model(model).register_forward_pre_hook(stop)"
    result = verify(tmp_path, "--steps", "4", "--timeout", "20", "train.py", prepared=hangs + hook)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "the record of rank 0 stops in step 3, after 'loss'" in result.stdout
    assert "the record of rank 1 stops in step 2, after 'after'" in result.stdout
    assert "ended with exit code" in result.stdout


@pytest.mark.full
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_the_example_of_digits_trains_the_same(tmp_path, backend):
    words = ("--backend", backend, "--steps", "25", str(DIGITS), "--fresh", "--epochs", "1", "--output", "out")
    result = verify(tmp_path, *words)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Parity holds over" in result.stdout and f"({backend}, float32)" in result.stdout
    assert [f.name for f in (tmp_path / "out").iterdir()] == ["loss.png"]
