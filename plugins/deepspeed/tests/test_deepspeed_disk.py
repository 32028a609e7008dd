"""Optimizer state on a disk, and DeepSpeed's own Adam on the CPU. Operators are compiled when they are first used, for minutes: the full run does it once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from drivetrain import Accelerator
from drivetrain.testing.pytest_plugin import Workers
from drivetrain.testing.training import whole
from drivetrain_deepspeed.dummies import DummyOptim
from drivetrain_deepspeed.options import DeepSpeedPlugin

pytestmark = [pytest.mark.full, pytest.mark.slow]

ROWS = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
LABELS = torch.randint(10, (16,), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    """Compile in one process: two at once wait for each other's locks."""
    from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("libaio's headers aren't there")
    for builder in (AsyncIOBuilder, CPUAdamBuilder):
        builder().load(verbose=False)


def network() -> torch.nn.Module:
    """Large enough that a process's half of the state is put on the disk: DeepSpeed keeps what is below 1 MiB in memory."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 1024),
        torch.nn.Tanh(),
        torch.nn.Linear(1024, 1024),
        torch.nn.Tanh(),
        torch.nn.Linear(1024, 10),
    )


def plain(steps: int, **settings: Any) -> dict[str, Any]:
    """The same training on one device."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    norms = []
    for _ in range(steps):
        cross_entropy(model(ROWS), LABELS).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    state = {n: optimizer.state[p] for n, p in model.named_parameters()}
    return {"weights": {n: p.detach() for n, p in model.named_parameters()}, "norms": norms, "state": state}


def step(accelerator: Accelerator, model: Any, optimizer: Any) -> float:
    size = 16 // accelerator.num_processes
    mine = slice(size * accelerator.process_index, size * (accelerator.process_index + 1))
    accelerator.backward(cross_entropy(model(ROWS[mine]), LABELS[mine]))
    norm = float(accelerator.clip_grad_norm_(model.parameters(), 0.5))
    optimizer.step()
    optimizer.zero_grad()
    return norm


def swapped(folder: Path) -> int:
    """Bytes of files in a folder."""
    return sum(f.stat().st_size for f in folder.rglob("*.swp"))


def on_disk(folder: Path, checkpoint: Path, pipelined: bool) -> dict[str, Any]:
    """On a rank: four steps, and once more the last two from a checkpoint, by an Accelerator of its own."""
    found: dict[str, Any] = {}
    for start in (0, 2):
        section = {"device": "nvme", "nvme_path": str(folder)}
        if pipelined:
            section |= {"pipeline_read": True, "pipeline_write": True, "buffer_count": 8}
        document = {
            "train_micro_batch_size_per_gpu": 8,
            "zero_optimization": {"stage": 3, "offload_optimizer": section},
        }
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=document))
        inner = network()
        model, optimizer = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters(), lr=1e-3))
        if start:
            accelerator.load_state(str(checkpoint))
        norms = []
        for number in range(start, 4):
            norms.append(step(accelerator, model, optimizer))
            if number == 1:
                accelerator.save_state(str(checkpoint))
        names = accelerator.backend.parameter_names([model])
        state = accelerator.backend.optimizer_state(optimizer.optimizer, [model])["state"]
        found[f"from {start}"] = {
            "norms": norms,
            "swapped": swapped(folder),
            "weights": whole(copy.deepcopy(accelerator.backend.model_state(model))),
            "exp_avg": whole({n: values["exp_avg"] for n, values in state.items()}),
        }
        assert len(names) == len(state)
        accelerator.end_training()
    return found


@pytest.mark.parametrize("pipelined", [False, True], ids=["", "pipelined"])
def test_optimizer_state_on_a_disk(workers: Workers, tmp_path: Path, pipelined: bool) -> None:
    """Norms, weights, state, and a resumed training are those of plain PyTorch, and the state was on the disk."""
    folder = tmp_path / "swap"
    folder.mkdir()
    expected = plain(4, lr=1e-3)
    for result in workers(2).run(on_disk, folder, tmp_path / "checkpoint", pipelined):
        for start, part in ((0, result["from 0"]), (2, result["from 2"])):
            assert part["swapped"] > 10_000_000
            assert part["norms"] == pytest.approx(expected["norms"][start:], rel=1e-4)
            for name, value in expected["weights"].items():
                torch.testing.assert_close(part["weights"][name], value, atol=5e-6, rtol=0)
                torch.testing.assert_close(part["exp_avg"][name], expected["state"][name]["exp_avg"], atol=1e-6, rtol=0)


def with_cpu_adam(stage: int) -> dict[str, Any]:
    """On a rank."""
    document = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "DeepSpeedCPUAdam", "params": {"lr": 1e-3, "weight_decay": 0.01}},
    }
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=document))
    inner = network()
    model, optimizer = accelerator.prepare(inner, DummyOptim(inner.parameters(), lr=1e-3, weight_decay=0.01))
    norms = [step(accelerator, model, optimizer) for _ in range(4)]
    weights = whole(copy.deepcopy(accelerator.backend.model_state(model)))
    name = type(optimizer.optimizer).__name__
    accelerator.end_training()
    return {"norms": norms, "weights": weights, "name": name}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_own_adam(workers: Workers, stage: int) -> None:
    """It is used when it is asked for, and differs from torch's by rounding."""
    expected = plain(4, lr=1e-3, weight_decay=0.01)
    for result in workers(2).run(with_cpu_adam, stage):
        assert result["name"] == "DeepSpeedCPUAdam"
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        for name, value in expected["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, atol=2e-5, rtol=0)
