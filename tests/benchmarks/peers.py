"""The same training loop written with each peer.

An epoch is a generator that pauses after each step, so that peers can take turns inside their epochs. All peers start from
the same weights, see the same rows in each global batch, accumulate over the same windows, clip to the same norm and step the
same scheduler, so that they end with equal weights.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from . import MODULES

MAX_NORM = 1.0
BATCH_SIZE = 4


@dataclass(frozen=True, slots=True)
class Task:
    """What all peers train: ``batches`` batches per process and epoch, an optimizer step every ``accumulation``."""

    accumulation: int
    batches: int
    world_size: int
    rank: int

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer, Any, TensorDataset]:
        """Model, optimizer, scheduler and data, new and always equal."""
        generator = torch.Generator().manual_seed(0)
        rows = self.batches * BATCH_SIZE * self.world_size
        data = TensorDataset(torch.randn(rows, 8, generator=generator), torch.randn(rows, 1, generator=generator))
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        # Constant, since Accelerate steps a scheduler once per process: the losses shall be equal all the same.
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return model, optimizer, scheduler, data


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer that is set up: ``epoch()`` trains one epoch, step by step; ``model`` is the bare one."""

    name: str
    epoch: Callable[[], Iterator[None]]
    model: nn.Module


def build(name: str, task: Task) -> Peer:
    """Set up the peer ``name``."""
    return {"hand": _hand, "fabric": _fabric}.get(name, _accelerator)(name, task)


def _hand(name: str, task: Task) -> Peer:
    bare, optimizer, scheduler, data = task.parts()
    k = task.accumulation
    sampler = None
    model: nn.Module = bare
    if task.world_size > 1:
        model = DistributedDataParallel(bare)
        sampler = DistributedSampler(data, task.world_size, task.rank, shuffle=False)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)

    def epoch() -> Iterator[None]:
        for index, (x, y) in enumerate(loader):
            last = (index + 1) % k == 0
            with nullcontext() if last or task.world_size == 1 else model.no_sync():  # type: ignore[operator]
                loss = mse_loss(model(x), y)
                (loss / k if k > 1 else loss).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            yield

    return Peer(name, epoch, bare)


def _accelerator(name: str, task: Task) -> Peer:
    """Accelerate and Drivetrain: the same code under both names."""
    bare, optimizer, scheduler, data = task.parts()
    accelerator = importlib.import_module(MODULES[name]).Accelerator(
        cpu=True, gradient_accumulation_steps=task.accumulation
    )
    assert accelerator.num_processes == task.world_size
    model, optimizer, scheduler, loader = accelerator.prepare(
        bare, optimizer, scheduler, DataLoader(data, batch_size=BATCH_SIZE)
    )

    def epoch() -> Iterator[None]:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            yield

    return Peer(name, epoch, bare)


def _fabric(name: str, task: Task) -> Peer:
    from lightning_fabric import Fabric

    bare, optimizer, scheduler, data = task.parts()
    strategy = "ddp" if task.world_size > 1 else "auto"
    fabric = Fabric(accelerator="cpu", devices=task.world_size, strategy=strategy)
    fabric.launch()
    assert fabric.world_size == task.world_size
    model, optimizer = fabric.setup(bare, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=BATCH_SIZE))
    k = task.accumulation

    def epoch() -> Iterator[None]:
        for index, (x, y) in enumerate(loader):
            last = (index + 1) % k == 0
            with fabric.no_backward_sync(model, enabled=not last):
                loss = mse_loss(model(x), y)
                fabric.backward(loss / k if k > 1 else loss)
            if last:
                # Its default reads the norm on the host to look for NaN: not what the others do.
                fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM, error_if_nonfinite=False)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            yield

    return Peer(name, epoch, bare)


def process_group() -> tuple[int, int]:
    """Join the launcher's processes, if there is one; return (world size, rank)."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        return dist.get_world_size(), dist.get_rank()
    return 1, 0
