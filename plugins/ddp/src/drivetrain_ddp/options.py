"""Settings of DistributedDataParallel."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from drivetrain.config import Options
from drivetrain.errors import ConfigurationError

__all__ = ["DDPCommunicationHookType", "DistributedDataParallelKwargs"]


class DDPCommunicationHookType(str, enum.Enum):
    """How gradients travel.

    Example:
        >>> DDPCommunicationHookType("bf16") is DDPCommunicationHookType.BF16
        True
    """

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"

    def __str__(self) -> str:
        return self.value


@dataclass
class DistributedDataParallelKwargs(Options):
    """Settings of DistributedDataParallel; those that aren't given keep torch's defaults.

    Args:
        dim: Dimension along which inputs are scattered; 0 is all that one device per process can have.
        broadcast_buffers: Rank 0's buffers (BatchNorm statistics) are sent to all at each synchronised forward, and not only once,
            when the model is prepared.
        init_sync: Parameters and buffers of rank 0 are sent to all when the model is prepared.
        bucket_cap_mb: Size of a gradient bucket, in MiB.
        find_unused_parameters: Let parameters go without a gradient in some iterations.
        check_reduction: Ignored by torch, and so refused here.
        gradient_as_bucket_view: Gradients share memory with the buckets.
        static_graph: The graph doesn't change between iterations. The first micro-batch of all reduces gradients, also inside a window.
        skip_all_reduce_unused_params: Don't reduce buckets of unused parameters.
        comm_hook: Compression of gradients: "no", "fp16", "bf16", "power_sgd" or "batched_power_sgd".
        comm_wrapper: "fp16" or "bf16" around ``comm_hook``, or "no".
        comm_state_option: Settings of PowerSGD's state (``matrix_approximation_rank``, ``start_powerSGD_iter``, ...).

    Example:
        >>> DistributedDataParallelKwargs(bucket_cap_mb=50, comm_hook="bf16").explicit()
        {'bucket_cap_mb': 50, 'comm_hook': <DDPCommunicationHookType.BF16: 'bf16'>}
    """

    dim: int = 0
    broadcast_buffers: bool = True
    init_sync: bool = True
    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    skip_all_reduce_unused_params: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("comm_hook", "comm_wrapper"):
            try:
                setattr(self, name, DDPCommunicationHookType(getattr(self, name)))
            except ValueError:
                known = ", ".join(h.value for h in DDPCommunicationHookType)
                raise ConfigurationError(
                    f"DistributedDataParallelKwargs({name}={getattr(self, name)!r}): use one of {known}."
                ) from None
        if self.comm_wrapper not in (
            DDPCommunicationHookType.NO,
            DDPCommunicationHookType.FP16,
            DDPCommunicationHookType.BF16,
        ):
            raise ConfigurationError(f"comm_wrapper={self.comm_wrapper.value!r}: use 'no', 'fp16' or 'bf16'.")
        if self.check_reduction:
            raise ConfigurationError("check_reduction=True has no effect in torch any more: leave it out.")
        if self.dim != 0:
            raise ConfigurationError(
                f"dim={self.dim}: with one device per process inputs aren't scattered; leave it out."
            )
        power_sgd = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)
        if self.comm_state_option and self.comm_hook not in power_sgd:
            raise ConfigurationError(
                f"comm_state_option is for comm_hook='power_sgd' and 'batched_power_sgd', not {self.comm_hook.value!r}."
            )
        if self.comm_wrapper is not DDPCommunicationHookType.NO and self.comm_hook is DDPCommunicationHookType.NO:
            raise ConfigurationError(
                f"comm_wrapper={self.comm_wrapper.value!r} wraps a comm_hook, and there is none: "
                f"use comm_hook={self.comm_wrapper.value!r}."
            )
        self.validate()

    def ddp_arguments(self) -> dict[str, Any]:
        """Keyword arguments for DistributedDataParallel: those that were given."""
        ours = {"dim", "check_reduction", "comm_hook", "comm_wrapper", "comm_state_option"}
        return {name: value for name, value in self.explicit().items() if name not in ours}
