"""Which modules are gathered as one unit."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from drivetrain.big_model import inner_first
from drivetrain.errors import ConfigurationError
from drivetrain.memory.blocks import repeated_blocks
from drivetrain_fsdp.options import FullyShardedDataParallelPlugin

__all__ = ["can_be_unit", "choose_units", "shares_outside"]


def choose_units(
    model: torch.nn.Module, options: FullyShardedDataParallelPlugin, ignored: set[torch.nn.Parameter] | None = None
) -> list[torch.nn.Module]:
    """The units of a model below the model itself, which takes what is left; inner ones come first.

    A module that shares a parameter with a module outside of it is no unit: both must be gathered together, with what holds both.

    Args:
        model: The model.
        options: How to choose.
        ignored: Parameters that aren't sharded.

    Raises:
        ConfigurationError: If a class that was named isn't in the model, or the function isn't one of a module.

    Example:
        >>> layers = [torch.nn.TransformerEncoderLayer(8, 2, batch_first=True) for _ in range(2)]
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ModuleList(layers))
        >>> len(choose_units(model, FullyShardedDataParallelPlugin()))
        2
        >>> len(choose_units(model, FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Linear"])))
        5
    """
    chosen = {id(m) for m in _candidates(model, options, ignored or set())}
    found = [m for m in inner_first(model) if id(m) in chosen and m is not model and can_be_unit(m, ignored or set())]
    return [m for m in found if not shares_outside(model, m)]


def _candidates(
    model: torch.nn.Module, options: FullyShardedDataParallelPlugin, ignored: set[torch.nn.Parameter]
) -> list[torch.nn.Module]:
    policy = options.auto_wrap_policy
    if policy == "NO_WRAP":
        return []
    if policy == "SIZE_BASED_WRAP":
        return _by_size(model, options.min_num_params, ignored)
    if not isinstance(policy, str):
        return _by_function(model, policy)
    if policy == "TRANSFORMER_BASED_WRAP" or options.transformer_cls_names_to_wrap:
        return _by_class(model, options.transformer_cls_names_to_wrap)
    declared = _declared(model)
    named = [m for m in model.modules() if type(m).__name__ in declared]
    return named or repeated_blocks(model)


def _declared(model: torch.nn.Module) -> set[str]:
    """Classes that transformers' models say are not to be split, also below wrappers of adapters."""
    names: set[str] = set()
    for module in model.modules():
        names.update(getattr(module, "_no_split_modules", None) or ())
    return names


def _by_class(model: torch.nn.Module, names: list[str]) -> list[torch.nn.Module]:
    wanted = set(names) or _declared(model)
    if not wanted:
        raise ConfigurationError(
            "auto_wrap_policy='TRANSFORMER_BASED_WRAP' needs transformer_cls_names_to_wrap: the model declares no _no_split_modules."
        )
    present = {type(m).__name__ for m in model.modules()}
    absent = sorted(set(names) - present)
    if absent:
        raise ConfigurationError(
            f"transformer_cls_names_to_wrap names {', '.join(absent)}, and no module of {type(model).__name__} is of such a class. "
            f"There are: {', '.join(sorted(present))}."
        )
    return [m for m in model.modules() if type(m).__name__ in wanted]


def _by_size(model: torch.nn.Module, least: int, ignored: set[torch.nn.Parameter]) -> list[torch.nn.Module]:
    """From the inside out: a module becomes a unit once what isn't in inner ones is large enough."""
    taken: set[torch.nn.Parameter] = set(ignored)
    units = []
    for module in inner_first(model):
        rest = {p for p in module.parameters() if p not in taken}
        if sum(p.numel() for p in rest) >= least and can_be_unit(module, ignored):
            units.append(module)
            taken |= rest
    return units


def _by_function(model: torch.nn.Module, policy: Callable[..., Any]) -> list[torch.nn.Module]:
    try:
        parameters = inspect.signature(policy).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    if "recurse" in parameters:  # torch's policies of version 1
        return [
            m
            for m in model.modules()
            if policy(module=m, recurse=False, nonwrapped_numel=sum(p.numel() for p in m.parameters()))
        ]
    try:
        return [m for m in model.modules() if policy(m)]
    except TypeError as error:
        raise ConfigurationError(f"auto_wrap_policy: the function can't be called with a module: {error}") from error


def can_be_unit(module: torch.nn.Module, ignored: set[torch.nn.Parameter]) -> bool:
    """Whether a module is called (containers aren't), and has something to shard.

    Example:
        >>> can_be_unit(torch.nn.Linear(2, 2), set()), can_be_unit(torch.nn.ReLU(), set())
        (True, False)
    """
    if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict | torch.nn.ParameterList | torch.nn.ParameterDict):
        return False
    return any(p not in ignored for p in module.parameters())


def shares_outside(model: torch.nn.Module, unit: torch.nn.Module) -> bool:
    """Whether a parameter of a unit belongs to a module outside of it as well.

    Example:
        >>> first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> second.weight = first.weight
        >>> shares_outside(torch.nn.Sequential(first, second), first)
        True
    """
    inside = {id(m) for m in unit.modules()}
    own = {id(p) for p in unit.parameters()}
    return any(
        id(p) in own for m in model.modules() if id(m) not in inside for p in m._parameters.values() if p is not None
    )
