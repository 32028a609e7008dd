"""What the plugin offers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs import hookimpl
from drivetrain.specs import BackendSpec, Capability, Detection, Request, Score, ShardingPlannerSpec

DRIVETRAIN_API = 1

FSDP = BackendSpec(
    name="fsdp",
    summary="Parameters, gradients and optimizer state sharded by fully_shard",
    target="drivetrain_fsdp.backend:FSDPBackend",
    options="drivetrain_fsdp.options:FullyShardedDataParallelPlugin",
    accepts=("fsdp_plugin",),
    exports=(
        "FullyShardedDataParallelPlugin",
        *(
            f"{name}=drivetrain_fsdp.saving:{name}"
            for name in ("save_fsdp_model", "load_fsdp_model", "save_fsdp_optimizer", "load_fsdp_optimizer")
        ),
    ),
    distributed_type="FSDP",
    capabilities=frozenset(
        {
            Capability.DISTRIBUTED,
            Capability.SHARDED_PARAMETERS,
            Capability.NO_SYNC,
            Capability.MID_WINDOW_STATE,
            Capability.MULTIPLE_MODELS,
            Capability.COMPILE,
            Capability.CLIP_VALUE,
            Capability.ITEM_WEIGHTS,
            Capability.DEVICE_MESH,
        }
    ),
)


@hookimpl
def drivetrain_register_backends() -> Iterable[BackendSpec]:
    """Offer fsdp."""
    return [FSDP]


@hookimpl
def drivetrain_detect_backend(request: Request) -> Iterable[Detection] | None:
    """Asked for by a mesh; else it serves several processes where nothing simpler is installed."""
    if "ParallelismConfig" in request.option_types:
        return [Detection("fsdp", Score.REQUESTED, "a ParallelismConfig was given")]
    if not request.process.is_distributed:
        return None
    return [Detection("fsdp", Score.FALLBACK + 50, f"{request.process.world_size} processes; a shard on each")]


@hookimpl
def drivetrain_register_sharding_planners() -> Iterable[ShardingPlannerSpec]:
    """Offer plans for fsdp."""
    return [
        ShardingPlannerSpec(
            name="fsdp",
            summary="all sharding strategies, with and without the CPU's memory",
            target="drivetrain_fsdp.planner:FSDPPlanner",
            backend="fsdp",
        )
    ]
