"""The loss scale where gradients are shards on several meshes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["MeshScaler"]


class MeshScaler(torch.amp.GradScaler):
    """Torch's scaler, that takes gradients on different meshes and agrees on what it found.

    Torch searches all gradients of a device in one operation, which takes DTensors of one mesh only, and reduces the result over those dimensions along
    which the first of them is divided. So gradients are searched mesh by mesh, and the results are reduced over all processes that share the model.

    Example:
        >>> MeshScaler("cpu", init_scale=4.0).get_scale()
        4.0
    """

    #: Processes that must find the same; None where what is found is the same on all of them anyway.
    overflow_group: dist.ProcessGroup | None = None

    def _unscale_grads_(self, optimizer: Any, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        if self.overflow_group is None:
            return super()._unscale_grads_(optimizer, *args, **kwargs)
        found: dict[torch.device, torch.Tensor] = {}
        for part in _by_mesh(optimizer):
            for device, value in super()._unscale_grads_(part, *args, **kwargs).items():  # type: ignore[arg-type]
                found[device] = torch.maximum(found[device], value) if device in found else value.clone()
        for value in found.values():
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.overflow_group)
        return found


@dataclass(frozen=True, slots=True)
class _Part:
    """Some parameters of an optimizer, in the form in which the scaler reads one."""

    param_groups: list[dict[str, Any]]


def _by_mesh(optimizer: Any) -> list[_Part]:
    meshes: dict[Any, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                meshes.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    return [_Part([{"params": parameters}]) for parameters in meshes.values()]
