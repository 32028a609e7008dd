"""Norms beside parameters of a lower precision: which of them can't have such, and what the others need."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["keeps_statistics", "narrow_inputs", "stop_narrowing"]


def keeps_statistics(module: torch.nn.Module) -> bool:
    """Whether a module is a norm with running statistics: those are float32, and its parameters must be of their dtype.

    Example:
        >>> keeps_statistics(torch.nn.BatchNorm1d(2)), keeps_statistics(torch.nn.LayerNorm(2))
        (True, False)
    """
    return isinstance(module, _NormBase) and module.running_mean is not None


def narrow_inputs(model: torch.nn.Module, device_type: str) -> None:
    """Let a model's norms take float32 inputs beside parameters in a lower precision, by rounding the inputs to it.

    The fused norms of CPUs refuse that pair, and autocast there leaves them alone; on accelerators it computes them in float32, and nothing is done here.

    Args:
        model: The model; `stop_narrowing` undoes it.
        device_type: torch type of the device that it runs on.

    Example:
        >>> model = torch.nn.LayerNorm(2, dtype=torch.bfloat16)
        >>> narrow_inputs(model, "cpu")
        >>> model(torch.ones(1, 2)).dtype
        torch.bfloat16
    """
    if device_type != "cpu":
        return
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm | torch.nn.GroupNorm | _NormBase):
            module.register_forward_pre_hook(_narrow)


def stop_narrowing(model: torch.nn.Module) -> None:
    """Take away what `narrow_inputs` did.

    Example:
        >>> model = torch.nn.LayerNorm(2, dtype=torch.bfloat16)
        >>> narrow_inputs(model, "cpu")
        >>> stop_narrowing(model)
        >>> len(model._forward_pre_hooks)
        0
    """
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is _narrow:
                del module._forward_pre_hooks[key]


def _narrow(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    weight: Any = module.weight
    if weight is None or not args or not isinstance(args[0], torch.Tensor):
        return None
    if args[0].dtype is not torch.float32 or weight.dtype is torch.float32:
        return None
    return (args[0].to(weight.dtype), *args[1:])
