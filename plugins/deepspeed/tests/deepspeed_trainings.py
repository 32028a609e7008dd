"""What tests of DeepSpeed's trainings have in common."""

from __future__ import annotations

from typing import Any

import torch

from drivetrain import Accelerator
from drivetrain.testing.training import make_data, whole
from drivetrain_deepspeed.options import DeepSpeedPlugin

BATCH = torch.utils.data.default_collate(make_data(16))


def make(**settings: Any) -> Accelerator:
    """An Accelerator with a stage; what isn't a setting of the plugin goes to the Accelerator."""
    accelerator = {n: settings.pop(n) for n in list(settings) if n not in DeepSpeedPlugin.hints()}
    return Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(**settings), **accelerator)


def rows(accelerator: Accelerator) -> dict[str, torch.Tensor]:
    """This rank's share of the batch."""
    size = 16 // accelerator.num_processes
    start = size * accelerator.process_index
    return {name: value[start : start + size] for name, value in BATCH.items()}


def weights(accelerator: Accelerator, model: Any) -> dict[str, torch.Tensor]:
    return whole(accelerator.backend.model_state(model))


def differ(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a)


def plain_step(model: Any, optimizer: Any, loss: torch.Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
