"""Compression of gradients on their way between processes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from drivetrain.errors import ConfigurationError
from drivetrain_ddp.options import DDPCommunicationHookType as Hook
from drivetrain_ddp.options import DistributedDataParallelKwargs

__all__ = ["register_communication_hook"]

_HOOKS: dict[Hook, Any] = {
    Hook.FP16: default_hooks.fp16_compress_hook,
    Hook.BF16: default_hooks.bf16_compress_hook,
    Hook.POWER_SGD: powerSGD_hook.powerSGD_hook,
    Hook.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
}
_WRAPPERS: dict[Hook, Any] = {
    Hook.FP16: default_hooks.fp16_compress_wrapper,
    Hook.BF16: default_hooks.bf16_compress_wrapper,
}


def register_communication_hook(
    model: DistributedDataParallel, options: DistributedDataParallelKwargs, group: dist.ProcessGroup | None
) -> None:
    """Register the hook that the options ask for.

    Raises:
        ConfigurationError: For a setting that PowerSGD doesn't have.
    """
    if options.comm_hook is Hook.NO:
        return
    hook = _HOOKS[options.comm_hook]
    state: Any = group
    if options.comm_hook in (Hook.POWER_SGD, Hook.BATCHED_POWER_SGD):
        try:
            state = powerSGD_hook.PowerSGDState(process_group=group, **options.comm_state_option)
        except TypeError as error:
            raise ConfigurationError(f"comm_state_option: {error}") from None
    if options.comm_wrapper is not Hook.NO:
        hook = _WRAPPERS[options.comm_wrapper](hook)
    model.register_comm_hook(state=state, hook=_anonymous(hook))


def _anonymous(hook: Any) -> Any:
    """Hide a hook's name: torch knows its bf16 hooks by theirs, and refuses them but for NCCL and XCCL; gloo sums bf16 as well."""

    def run(state: Any, bucket: Any) -> Any:
        return hook(state, bucket)

    run.__annotations__.clear()  # torch compares them with classes, and they are text here
    return run
