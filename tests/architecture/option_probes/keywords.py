"""Keywords of the Accelerator that hold options objects, or are short for one of their fields."""

from __future__ import annotations

import torch

from drivetrain import (
    Accelerator,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

from . import effect
from .scene import step, training


@effect("Accelerator.split_batches", (True, [2, 2]), (False, [4, 4]), ranks=2)
def split_batches(value, folder):
    loader = Accelerator(cpu=True, split_batches=value).prepare(torch.utils.data.DataLoader(range(8), batch_size=4))
    return len(next(iter(loader)))


@effect("Accelerator.dataloader_config", (False, [2, 1]), (True, [2, 2]), ranks=2)
def dataloader_config(value, folder):
    config = DataLoaderConfiguration(even_batches=value)
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(torch.utils.data.DataLoader(range(3)))
    return len(list(loader))


@effect("Accelerator.project_config", ("a", "a"), ("b", "b"))
def project_config(value, folder):
    with training(project_config=ProjectConfiguration(project_dir=value)) as (accelerator, *_):
        return accelerator.project_dir


@effect("Accelerator.gradient_accumulation_plugin", (1, 4), (4, 1))
def gradient_accumulation_plugin(value, folder):
    with training(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=value)) as (a, model, optimizer):
        for _ in range(4):
            step(a, model, optimizer)
        return a.step


@effect("Accelerator.kwargs_handlers", (64.0, 64.0), (128.0, 128.0))
def kwargs_handlers(value, folder):
    handlers = [GradScalerKwargs(init_scale=value)]
    with training(mixed_precision="fp16", kwargs_handlers=handlers) as (accelerator, *_):
        return accelerator.scaler.get_scale()


@effect("Accelerator.dynamo_plugin", ("no", False), ("eager", True))
def dynamo_plugin(value, folder):
    with training(dynamo_plugin=TorchDynamoPlugin(backend=value)) as (_, model, _):
        return model._compiled_call_impl is not None


@effect("Accelerator.ddp_kwargs", (True, [True] * 2), (False, [False] * 2), ranks=2)
def ddp_kwargs(value, folder):
    from drivetrain import DistributedDataParallelKwargs

    with training(ddp_kwargs=DistributedDataParallelKwargs(find_unused_parameters=value)) as (_, model, _):
        return model.find_unused_parameters
