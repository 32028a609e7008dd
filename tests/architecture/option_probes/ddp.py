"""DistributedDataParallel's options, on two ranks."""

from __future__ import annotations

import contextlib

import torch

from drivetrain import Accelerator, DistributedDataParallelKwargs
from drivetrain.rehearsal import record_collectives

from . import effect


class Two(torch.nn.Module):
    """A model with a part that may go unused, and a statistic."""

    def __init__(self, spare, width):
        super().__init__()
        if spare:  # before the others, so that it has a bucket of its own
            self.spare = torch.nn.Linear(width, width, bias=False)
        self.first = torch.nn.Linear(width, width)
        self.second = torch.nn.Linear(width, width)
        self.register_buffer("statistic", torch.zeros(1))

    def forward(self, x):
        return self.second(self.first(x))


@contextlib.contextmanager
def ddp(*, spare=False, width=64, seed=0, **options):
    torch.manual_seed(seed)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    model = Two(spare, width)
    with torch.no_grad():
        model.statistic += accelerator.process_index
    yield accelerator, accelerator.prepare(model)
    accelerator.end_training()


def gradients(steps=1, **options):
    """Rank 0's gradient after micro-batches that differ between ranks."""
    with ddp(**options) as (accelerator, model):
        for _ in range(steps):
            model.zero_grad()
            generator = torch.Generator().manual_seed(accelerator.process_index)
            accelerator.backward(model(torch.randn(8, 64, generator=generator)).pow(2).mean())
        return model.module.first.weight.grad.clone()


def all_reduces(steps=3, **options):
    """Collectives of the last of some backward passes, for a model with a mebibyte of weights in each layer."""
    with ddp(width=512, **options) as (accelerator, model):
        for _ in range(steps):
            with record_collectives() as sent:
                accelerator.backward(model(torch.ones(2, 512)).mean())
        return sum(message.kind == "all_reduce" for message in sent)


@effect("DistributedDataParallelKwargs.dim", (0, ["made"] * 2), (1, ["ConfigurationError"] * 2), ranks=2)
def dim(value, folder):
    with ddp(dim=value):
        return "made"


@effect(
    "DistributedDataParallelKwargs.check_reduction", (False, ["made"] * 2), (True, ["ConfigurationError"] * 2), ranks=2
)
def check_reduction(value, folder):
    with ddp(check_reduction=value):
        return "made"


@effect("DistributedDataParallelKwargs.broadcast_buffers", (True, [0.0, 0.0]), (False, [0.0, 1.0]), ranks=2)
def broadcast_buffers(value, folder):
    """A statistic that the ranks counted differently, after the next forward."""
    with ddp(broadcast_buffers=value) as (accelerator, model):
        model.module.statistic.fill_(accelerator.process_index)
        model(torch.ones(2, 64))
        return float(model.module.statistic)


@effect("DistributedDataParallelKwargs.init_sync", (True, [True] * 2), (False, [False] * 2), ranks=2)
def init_sync(value, folder):
    """Whether ranks that made different weights have the same afterwards."""
    with ddp(init_sync=value, seed=torch.distributed.get_rank()) as (accelerator, model):
        mine = accelerator.gather(model.module.first.weight[:1])
        return bool(torch.equal(mine[0], mine[1]))


@effect("DistributedDataParallelKwargs.bucket_cap_mb", (25, [1, 1]), (1, [2, 2]), ranks=2)
def bucket_cap_mb(value, folder):
    return all_reduces(bucket_cap_mb=value)


def unused(**options):
    """Two passes in which a part of the model isn't used."""
    try:
        with ddp(spare=True, **options) as (accelerator, model):
            for _ in range(2):
                accelerator.backward(model(torch.ones(2, 64)).mean())
    except RuntimeError as error:
        return "refused" if "unused" in str(error) or "Expected to have finished" in str(error) else str(error)
    return "done"


@effect("DistributedDataParallelKwargs.find_unused_parameters", (True, ["done"] * 2), (False, ["refused"] * 2), ranks=2)
def find_unused_parameters(value, folder):
    return unused(find_unused_parameters=value)


@effect("DistributedDataParallelKwargs.static_graph", (True, ["done"] * 2), (False, ["refused"] * 2), ranks=2)
def static_graph(value, folder):
    return unused(static_graph=value)


@effect("DistributedDataParallelKwargs.gradient_as_bucket_view", (True, [True] * 2), (False, [False] * 2), ranks=2)
def gradient_as_bucket_view(value, folder):
    """Whether gradients share one piece of memory."""
    with ddp(gradient_as_bucket_view=value) as (accelerator, model):
        accelerator.backward(model(torch.ones(2, 64)).mean())
        places = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        return len(places) == 1


@effect("DistributedDataParallelKwargs.skip_all_reduce_unused_params", (True, [2, 2]), (False, [3, 3]), ranks=2)
def skip_all_reduce_unused_params(value, folder):
    return all_reduces(spare=True, find_unused_parameters=True, skip_all_reduce_unused_params=value)


@effect("DistributedDataParallelKwargs.comm_hook", ("no", [True] * 2), ("bf16", [False] * 2), ranks=2)
def comm_hook(value, folder):
    """Whether gradients are those that travelled whole."""
    return torch.equal(gradients(comm_hook=value), gradients())


@effect("DistributedDataParallelKwargs.comm_wrapper", ("no", [True] * 2), ("fp16", [False] * 2), ranks=2)
def comm_wrapper(value, folder):
    power = {"comm_hook": "power_sgd", "comm_state_option": {"start_powerSGD_iter": 2}, "steps": 4}
    return torch.equal(gradients(comm_wrapper=value, **power), gradients(**power))


@effect("DistributedDataParallelKwargs.comm_state_option", (1, [True] * 2), (16, [False] * 2), ranks=2)
def comm_state_option(value, folder):
    """Whether gradients are those of rank 1, torch's default."""
    ranks = [{"matrix_approximation_rank": r, "start_powerSGD_iter": 2} for r in (value, 1)]
    return torch.equal(*[gradients(comm_hook="power_sgd", comm_state_option=o, steps=4) for o in ranks])
