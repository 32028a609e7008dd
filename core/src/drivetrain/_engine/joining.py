"""After ranks ran out of batches at different times: those that were done early get what they missed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator

__all__ = ["catch_up"]


def catch_up(accelerator: Any) -> None:
    """Give every rank the optimizer, scheduler and precision state and the step count of the rank that stepped most often. Collective.

    Backends make the weights equal; without this, momenta and learning rates would differ from then on, and the weights with them.

    Args:
        accelerator: The Accelerator, after its backend has joined the ranks.
    """
    from drivetrain.parallel import collectives, object_collectives
    from drivetrain.parallel.structure import send_to_device

    owner: Accelerator = accelerator
    steps = collectives.gather(torch.tensor([owner.step], device=owner.device)).tolist()
    if len(set(steps)) == 1:
        return
    source = steps.index(max(steps))
    parts: list[Any] = [*owner._optimizers, *owner._schedulers, owner.backend.precision]
    box: list[Any] = [None]
    if owner.process_index == source:
        box = [[send_to_device(dict(part.state_dict()), "cpu") for part in parts]]
    object_collectives.broadcast_object_list(box, from_process=source)
    if owner.process_index != source:
        for part, state in zip(parts, box[0], strict=True):
            part.load_state_dict(state)
    owner.step = max(steps)
