"""What is known where an engine is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Facts", "micro_batch_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the script and the Accelerator say about one engine.

    Args:
        world_size: Number of processes with different data.
        micro_batch_size: Rows per process and micro-batch, from the loaders; None where there is none that says it.
        accumulation_steps: Micro-batches per optimizer step, as the Accelerator counts them.
        max_grad_norm: A norm to clip to that was asked for already; None: the script clips, or nobody.
        precision: The Accelerator's mixed precision.
        device_type: torch type of the device.
        hidden_size: Of the model's configuration, which sizes of buckets are derived from.
        parameter_count: Elements of the model's parameters.
        client_optimizer: The script has a torch optimizer.
        client_scheduler: The script has a torch scheduler.
        config_optimizer: A placeholder stands for the configuration's optimizer. With neither, the model is only evaluated.
        config_scheduler: A placeholder stands for the configuration's scheduler.
        learning_rate, weight_decay, betas, eps: What the placeholder was given.
        total_num_steps, warmup_num_steps: Of the scheduler's placeholder, in optimizer steps.

    Example:
        >>> Facts(world_size=2).trains, Facts(world_size=2, client_optimizer=False).trains
        (True, False)
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
    client_scheduler: bool = False
    config_optimizer: bool = False
    config_scheduler: bool = False
    learning_rate: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    total_num_steps: int | None = None
    warmup_num_steps: int | None = None

    @property
    def trains(self) -> bool:
        """Whether the engine has an optimizer."""
        return self.client_optimizer or self.config_optimizer


def micro_batch_of(sizes: Sequence[int], *, smallest: bool = True) -> int | None:
    """The micro-batch size that loaders with these batch sizes say; None if there are none.

    Example:
        >>> micro_batch_of([8, 32]), micro_batch_of([8, 32], smallest=False), micro_batch_of([])
        (8, 32, None)
    """
    return (min(sizes) if smallest else max(sizes)) if sizes else None
