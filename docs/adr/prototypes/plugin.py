"""What the prototype offers, as any plugin does. Imports no torch and no vendor."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs import hookimpl
from drivetrain.specs import BackendSpec, Capability

DRIVETRAIN_API = 1

DEEPSPEED = BackendSpec(
    name="deepspeed-prototype",
    summary="ZeRO stages 0 to 3 by DeepSpeed's engine",
    target="prototype_deepspeed:DeepSpeedBackend",
    options="prototype_options:ZeROOptions",
    exclusive=True,
    capabilities=frozenset(
        {
            Capability.DISTRIBUTED,
            Capability.OWNS_BACKWARD,
            Capability.OWNS_STEP,
            Capability.OWNS_PRECISION,
            Capability.SHARDED_PARAMETERS,
            Capability.ITEM_WEIGHTS,
        }
    ),
)


@hookimpl
def drivetrain_register_backends() -> Iterable[BackendSpec]:
    """Offer it; it is only used when asked for by name."""
    return [DEEPSPEED]
