"""One training step on each process, then the time: ``first_step.py PEER FILE``, started by a launcher."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    """Set up the peer, train one batch, note the time on rank 0."""
    peer, mark = sys.argv[1:]
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4)
    backward = torch.Tensor.backward
    if peer == "hand":
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    elif peer == "fabric":
        from lightning_fabric import Fabric

        fabric = Fabric()  # its launcher passes its choices on
        model, optimizer = fabric.setup(model, optimizer)
        loader = fabric.setup_dataloaders(loader)
        backward = fabric.backward
    else:
        if peer == "accelerate":
            from accelerate import Accelerator
        else:
            from drivetrain import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        backward = accelerator.backward
    x, y = next(iter(loader))
    backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    assert dist.get_world_size() == 2
    if dist.get_rank() == 0:
        Path(mark).write_text(repr(time.time()))
    dist.barrier()
    # How a process ends isn't measured, and with gloo it can hang: if the last reference to the group is the one that DDP
    # holds, torch 2.13 joins the group's thread while holding the interpreter's lock, which that thread waits for.
    os._exit(0)


if __name__ == "__main__":
    main()
