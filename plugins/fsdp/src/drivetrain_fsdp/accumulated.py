"""Gradients that stay on each process inside a window: torch keeps them beside the whole parameters, and has no public way to them.

All that is known of torch's private parts stands here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from drivetrain.errors import UnsupportedError

__all__ = ["clear_gradients", "gradients_so_far", "put_gradients"]


def _parts(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, Any]]:
    """Each shard of a model, with what torch keeps about it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for part in group.fsdp_params:
                    yield part.sharded_param, part


def gradients_so_far(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """This process's gradients that aren't reduced yet, by the shard's ``id``.

    Raises:
        UnsupportedError: For divided layers, whose gradients are parts of parts.
    """
    found: dict[int, torch.Tensor] = {}
    for shard, part in _parts(model):
        gradient = part.unsharded_accumulated_grad
        if gradient is None:
            gradient = getattr(getattr(part, "_unsharded_param", None), "grad", None)
        if gradient is None:
            continue
        if isinstance(gradient, DTensor):
            raise UnsupportedError(
                "With tp_size above 1 a checkpoint can't hold gradients inside an accumulation window. Save where accelerator.sync_gradients is True."
            )
        found[id(shard)] = gradient.detach()
    return found


def put_gradients(model: torch.nn.Module, gradients: Mapping[int, torch.Tensor], device: torch.device) -> None:
    """Go on with gradients that `gradients_so_far` gave, and with no others."""
    for shard, part in _parts(model):
        _clear(part)
        gradient = gradients.get(id(shard))
        if gradient is not None:
            dtype = part.mp_policy.reduce_dtype or part.mp_policy.param_dtype or shard.dtype
            part.unsharded_accumulated_grad = gradient.to(device, dtype, copy=True)


def clear_gradients(model: torch.nn.Module, shards: set[int] | None = None) -> None:
    """Drop gradients that aren't reduced yet, of these shards (by ``id``) or of all."""
    for shard, part in _parts(model):
        if shards is None or id(shard) in shards:
            _clear(part)


def _clear(part: Any) -> None:
    part.unsharded_accumulated_grad = None
    whole = getattr(part, "_unsharded_param", None)
    if whole is not None:
        whole.grad = None
