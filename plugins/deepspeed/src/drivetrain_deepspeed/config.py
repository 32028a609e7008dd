"""The configuration that an engine is made with: every value decided, none left to DeepSpeed's defaults by accident."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from drivetrain_deepspeed.options import DeepSpeedOptions

__all__ = ["Facts", "resolve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known where an engine is made.

    Args:
        world_size: Number of processes.
        micro_batch_size: Rows per process and micro-batch, from the loaders; None where there is none that says it.
        accumulation_steps: Micro-batches per optimizer step, as the Accelerator counts them.
        max_grad_norm: A norm to clip to that was asked for already; None: the script clips, or nobody.
        precision: The Accelerator's mixed precision.
        device_type: torch type of the device.
        hidden_size: Of the model's configuration, which sizes of buckets are derived from.
        parameter_count: Elements of the model's parameters.
        client_optimizer: The script has a torch optimizer.
        client_scheduler: The script has a torch scheduler.
        learning_rate, weight_decay, betas, eps: Of a placeholder for the configuration's optimizer.
        total_num_steps, warmup_num_steps: Of a placeholder for the configuration's scheduler, in optimizer steps.

    Example:
        >>> Facts(world_size=2).precision
        'no'
    """

    world_size: int
    micro_batch_size: int | None = None
    accumulation_steps: int = 1
    max_grad_norm: float | None = None
    precision: Literal["no", "bf16", "fp16"] = "no"
    device_type: str = "cpu"
    hidden_size: int | None = None
    parameter_count: int = 0
    client_optimizer: bool = True
    client_scheduler: bool = True
    learning_rate: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    total_num_steps: int | None = None
    warmup_num_steps: int | None = None


def resolve(options: DeepSpeedOptions, facts: Facts) -> dict[str, Any]:
    """The complete configuration of one engine.

    Example:
        >>> resolve(DeepSpeedOptions(zero_stage=1), Facts(world_size=2, micro_batch_size=4))["zero_optimization"]
        {'stage': 1}
    """
    zero: dict[str, Any] = {"stage": options.zero_stage}
    if options.offload_optimizer_device != "none":
        zero["offload_optimizer"] = {"device": options.offload_optimizer_device}
    if options.offload_param_device != "none":
        zero["offload_param"] = {"device": options.offload_param_device}
    micro = facts.micro_batch_size or 1
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": facts.accumulation_steps,
        "train_batch_size": micro * facts.accumulation_steps * facts.world_size,
        "gradient_clipping": facts.max_grad_norm or 0.0,  # 1.0 if it isn't said
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31,
    }
    if facts.precision != "no":
        config[facts.precision] = {"enabled": True}
    if facts.precision == "fp16":
        config["fp16"].update(initial_scale_power=16, hysteresis=1)
    return config
