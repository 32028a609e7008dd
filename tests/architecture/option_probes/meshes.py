"""Options of meshes, and of activations that are computed again."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain import Accelerator, ActivationCheckpointing, ParallelismConfig, PlanningOptions

from . import effect


def shape(**sizes):
    """The mesh that two processes form."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    mesh = accelerator.torch_device_mesh
    found = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    accelerator.end_training()
    return {name: size for name, size in found.items() if size > 1}


@effect("ParallelismConfig.dp_replicate_size", (1, [{"dp_shard": 2}] * 2), (2, [{"dp_replicate": 2}] * 2), ranks=2)
def dp_replicate_size(value, folder):
    return shape(dp_replicate_size=value)


@effect("ParallelismConfig.dp_shard_size", (2, [{"dp_shard": 2}] * 2), (1, ["ConfigurationError"] * 2), ranks=2)
def dp_shard_size(value, folder):
    return shape(dp_shard_size=value)


@effect("ParallelismConfig.tp_size", (1, [{"dp_shard": 2}] * 2), (2, [{"tp": 2}] * 2), ranks=2)
def tp_size(value, folder):
    return shape(tp_size=value)


@effect("ParallelismConfig.cp_size", (1, [{"dp_shard": 2}] * 2), (2, [{"cp": 2}] * 2), ranks=2)
def cp_size(value, folder):
    return shape(cp_size=value)


@effect("ParallelismConfig.sp_size", (1, [{"dp_shard": 2}] * 2), (2, [{"sp": 2}] * 2), ranks=2)
def sp_size(value, folder):
    return shape(sp_size=value)


@effect("ParallelismConfig.sp_backend", (None, [{"sp": 2}] * 2), ("other", ["ConfigurationError"] * 2), ranks=2)
def sp_backend(value, folder):
    return shape(sp_size=2, sp_backend=value)


@effect("ParallelismConfig.cp_backend", ("torch", "made"), ("other", "ConfigurationError"))
def cp_backend(value, folder):
    ParallelismConfig(cp_backend=value)
    return "made"


@effect("ParallelismConfig.cp_comm_strategy", ("allgather", "made"), ("alltoall", "ConfigurationError"))
def cp_comm_strategy(value, folder):
    ParallelismConfig(cp_comm_strategy=value)
    return "made"


@effect(
    "ParallelismConfig.tp_plan",
    ({"*": "colwise_rep"}, [[(2, 4), (2, 4)]] * 2),
    ({"0": "colwise", "1": "rowwise"}, [[(2, 4), (4, 2)]] * 2),
    ranks=2,
)
def tp_plan(value, folder):
    """Shapes of the weights that a rank holds."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2, tp_plan=value))
    model = accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
    assert model(torch.ones(1, 4)).shape == (1, 4)
    shapes = [tuple(layer.weight.to_local().shape) for layer in model]
    accelerator.end_training()
    return shapes


@effect("Accelerator.parallelism_config", (1, [2, 2]), (2, [1, 1]), ranks=2)
def parallelism_config(value, folder):
    """Processes that see different rows."""
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=value))
    size = accelerator.backend.data_world_size
    accelerator.end_training()
    return size


# -- activations -----------------------------------------------------------------------------------------------------------


class Tall(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).tanh()


class Flat(Tall):
    pass


class Counting(TorchDispatchMode):
    """Counts operators that are really run: what a selective policy has kept isn't."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def computed(operator="tanh", **options):
    """How often an operator runs in forward and backward of four blocks."""
    accelerator = Accelerator(cpu=True, backend="single", kwargs_handlers=[ActivationCheckpointing(**options)])
    model = accelerator.prepare(torch.nn.Sequential(Tall(), Tall(), Tall(), Flat()))
    with Counting() as counting:
        accelerator.backward(model(torch.ones(2, 4)).mean())
    accelerator.end_training()
    return counting.seen[operator]


@effect("ActivationCheckpointing.every", (1, 7), (2, 6))
def every(value, folder):
    return computed(every=value)


@effect("ActivationCheckpointing.classes", (["Flat"], 5), (["Flat", "Tall"], 8))
def classes(value, folder):
    return computed(classes=value)


@effect("ActivationCheckpointing.keep", ("nothing", 7), ("matmuls", 4))
def keep(value, folder):
    return computed("addmm", keep=value)


@effect("ActivationCheckpointing.budget", (0.0, 7), (1.0, 4))
def budget(value, folder):
    return computed(budget=value)


@effect("ActivationCheckpointing.offload", (False, 7), (True, 4))
def offload(value, folder):
    return computed(offload=value)


def planned(**settings):
    """The backend that a model with 2.6 MB of state gets on two ranks, where nobody asks for one."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[PlanningOptions(**settings)])
    try:
        blocks = (torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Tanh()) for _ in range(8))
        accelerator.prepare(torch.nn.Sequential(*blocks))
        return accelerator.backend.spec.name
    finally:
        accelerator.end_training()


@effect("PlanningOptions.device_memory", ("1GB", ["ddp"] * 2), ("1.7MB", ["fsdp"] * 2), ranks=2)
def device_memory(value, folder):
    return planned(device_memory=value, headroom=0)


@effect("PlanningOptions.headroom", (0.0, ["ddp"] * 2), (0.5, ["fsdp"] * 2), ranks=2)
def headroom(value, folder):
    return planned(device_memory="3.2MB", headroom=value)
