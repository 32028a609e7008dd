"""What the plugin offers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs import hookimpl
from drivetrain.specs import BackendSpec, Capability

DRIVETRAIN_API = 1

DEEPSPEED = BackendSpec(
    name="deepspeed",
    summary="ZeRO sharding and offload by DeepSpeed's engine",
    target="drivetrain_deepspeed.backend:DeepSpeedBackend",
    options="drivetrain_deepspeed.options:DeepSpeedPlugin",
    accepts=("deepspeed_plugin",),
    exports=(
        "DeepSpeedPlugin",
        "DummyOptim=drivetrain_deepspeed.dummies:DummyOptim",
        "DummyScheduler=drivetrain_deepspeed.dummies:DummyScheduler",
    ),
    distributed_type="DEEPSPEED",
    exclusive=True,
    precisions=("fp32", "bf16", "fp16"),
    capabilities=frozenset(
        {
            Capability.DISTRIBUTED,
            Capability.OWNS_BACKWARD,
            Capability.OWNS_STEP,
            Capability.OWNS_PRECISION,
            Capability.SHARDED_PARAMETERS,
            Capability.MULTIPLE_MODELS,
            Capability.ITEM_WEIGHTS,
        }
    ),
)


@hookimpl
def drivetrain_register_backends() -> Iterable[BackendSpec]:
    """Offer it; it is used when it is asked for."""
    return [DEEPSPEED]
