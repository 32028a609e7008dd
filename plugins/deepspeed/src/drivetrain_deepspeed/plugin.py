"""What the plugin offers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs import hookimpl
from drivetrain.specs import BackendSpec, Capability, ClusterSpec, ShardingPlannerSpec

DRIVETRAIN_API = 1

DEEPSPEED = BackendSpec(
    name="deepspeed",
    summary="ZeRO sharding and offload by DeepSpeed's engine",
    target="drivetrain_deepspeed.loading:DeepSpeedBackend",
    options="drivetrain_deepspeed.options:DeepSpeedPlugin",
    accepts=("deepspeed_plugin", "deepspeed_plugins"),
    exports=(
        "DeepSpeedPlugin",
        "DummyOptim=drivetrain_deepspeed.dummies:DummyOptim",
        "DummyScheduler=drivetrain_deepspeed.dummies:DummyScheduler",
    ),
    report="drivetrain_deepspeed.report:report",
    adopts="drivetrain_deepspeed.foreign:read_checkpoint",
    distributed_type="DEEPSPEED",
    exclusive=True,
    precisions=("fp32", "bf16", "fp16"),
    capabilities=frozenset(
        {
            Capability.DISTRIBUTED,
            Capability.DEVICE_MESH,
            Capability.OWNS_BACKWARD,
            Capability.OWNS_STEP,
            Capability.OWNS_PRECISION,
            Capability.SHARDED_PARAMETERS,
            Capability.MULTIPLE_MODELS,
            Capability.ITEM_WEIGHTS,
            Capability.NAMED_OPTIONS,
        }
    ),
)

#: `deepspeed train.py` sets RANK and its like as torchrun does, but calls processes per machine by another name.
LAUNCHER = ClusterSpec(
    name="deepspeed",
    summary="DeepSpeed's own launcher",
    marker=("CROSS_SIZE",),
    rank=("RANK",),
    world_size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_world_size=("LOCAL_SIZE",),
    node_rank=("CROSS_RANK",),
    required=("rank", "world_size", "local_rank", "local_world_size"),
    priority=210,
)


@hookimpl
def drivetrain_register_clusters() -> Iterable[ClusterSpec]:
    """Offer it."""
    return [LAUNCHER]


@hookimpl
def drivetrain_register_backends() -> Iterable[BackendSpec]:
    """Offer it; it is used when it is asked for."""
    return [DEEPSPEED]


@hookimpl
def drivetrain_register_sharding_planners() -> Iterable[ShardingPlannerSpec]:
    """Offer plans for it."""
    return [
        ShardingPlannerSpec(
            name="deepspeed",
            summary="ZeRO stages 0 to 3, with and without the CPU's memory",
            target="drivetrain_deepspeed.planner:DeepSpeedPlanner",
            backend="deepspeed",
        )
    ]
