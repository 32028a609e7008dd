"""What the plugin offers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs import hookimpl
from drivetrain.specs import BackendSpec, Capability, Detection, Request, Score, ShardingPlannerSpec

DRIVETRAIN_API = 1

DDP = BackendSpec(
    name="ddp",
    summary="A replica on each process, gradients averaged by DistributedDataParallel",
    target="drivetrain_ddp.backend:DDPBackend",
    options="drivetrain_ddp.options:DistributedDataParallelKwargs",
    accepts=("ddp_kwargs",),
    exports=("DistributedDataParallelKwargs", "DDPCommunicationHookType"),
    capabilities=frozenset(
        {
            Capability.DISTRIBUTED,
            Capability.NO_SYNC,
            Capability.UNEVEN_INPUTS,
            Capability.MID_WINDOW_STATE,
            Capability.MULTIPLE_MODELS,
            Capability.COMPILE,
            Capability.CLIP_VALUE,
            Capability.ITEM_WEIGHTS,
        }
    ),
)


@hookimpl
def drivetrain_register_backends() -> Iterable[BackendSpec]:
    """Offer ddp."""
    return [DDP]


@hookimpl
def drivetrain_detect_backend(request: Request) -> Iterable[Detection] | None:
    """Several processes: ddp works on any device."""
    if not request.process.is_distributed:
        return None
    return [Detection("ddp", Score.POSSIBLE, f"{request.process.world_size} processes; a replica on each")]


@hookimpl
def drivetrain_register_sharding_planners() -> Iterable[ShardingPlannerSpec]:
    """Offer plans for ddp."""
    return [
        ShardingPlannerSpec(
            name="ddp",
            summary="a replica on each device",
            target="drivetrain_ddp.planner:DDPPlanner",
            backend="ddp",
        )
    ]
