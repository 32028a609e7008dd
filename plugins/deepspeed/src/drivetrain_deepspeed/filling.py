"""Models whose weights have no values yet: filled module by module, and cut at once (stage 3)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import deepspeed
import torch

from drivetrain.big_model import has_empty, inner_first, reset_functions
from drivetrain.errors import UnsupportedError

__all__ = ["fill"]


def fill(model: torch.nn.Module, device: torch.device, config: dict[str, Any]) -> None:
    """Give a model made under ``init_empty_weights()`` its first values, so that no process ever has all of it. Collective.

    Inner modules come first, as in a constructor. Each module's own weights are filled by the model's ``_init_weights`` (transformers' models have
    it) or its ``reset_parameters``, taken from rank 0, and cut by ``deepspeed.zero.Init``.

    Args:
        model: The model, all of its weights on the meta device.
        device: Where this process computes.
        config: The engine's configuration.

    Raises:
        UnsupportedError: On every rank, for a model that is empty in part, or a module that nothing fills.
    """
    tensors = list(itertools.chain(model.parameters(), model.buffers()))
    if not all(p.is_meta for p in model.parameters()):
        raise UnsupportedError(
            f"Some of {sum(1 for _ in tensors)} weights of {type(model).__name__} have values, and others are on the meta device. Make the whole "
            "model under init_empty_weights(), or none of it."
        )
    owners = [m for m in inner_first(model) if has_empty(m)]
    functions = {id(m): reset_functions(m, model) for m in owners}
    unknown = sorted({type(m).__name__ for m in owners if not functions[id(m)]})
    if unknown:
        _refuse(unknown)
    for module in owners:
        _fill_module(module, functions[id(module)], device, config)


def _refuse(classes: list[str]) -> None:
    raise UnsupportedError(
        f"{', '.join(classes)}: nothing says how to fill their weights, which are on the meta device. Give them a reset_parameters(), or make the "
        "model without init_empty_weights()."
    )


def _fill_module(
    module: torch.nn.Module,
    functions: list[Callable[[torch.nn.Module], Any]],
    device: torch.device,
    config: dict[str, Any],
) -> None:
    empty = {n: p for n, p in module._parameters.items() if p is not None and p.is_meta}
    for old in empty.values():
        data = torch.full(old.shape, float("nan"), dtype=old.dtype, device=device)
        # The same object with values: optimizers hold it, and modules that are tied to this one.
        torch.utils.swap_tensors(old, torch.nn.Parameter(data, requires_grad=old.requires_grad))
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.zeros_like(buffer, device=device)
    for function in functions:
        with torch.no_grad():
            function(module)
        if not any(module._parameters[n].isnan().any() for n in empty):  # type: ignore[union-attr]
            break
    else:
        if empty:
            _refuse([type(module).__name__])
    for name in empty:
        torch.distributed.broadcast(module._parameters[name].detach(), src=0)  # type: ignore[union-attr]
    if empty:
        holder = torch.nn.Module()  # `Init` takes a module with all that is below it
        holder._parameters.update({n: module._parameters[n] for n in empty})
        deepspeed.zero.Init(module=holder, config_dict_or_path=config)
