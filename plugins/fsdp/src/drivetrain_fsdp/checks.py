"""What can't be sharded, found before any collective and said in a sentence."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch.distributed.fsdp import FSDPModule

from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain_fsdp.options import FullyShardedDataParallelPlugin

__all__ = ["check_model", "check_unit", "ignored_parameters"]


def check_model(
    model: torch.nn.Module, others: Sequence[torch.nn.Module], device: torch.device, *, device_placement: bool
) -> None:
    """Refuse models of which ``fully_shard`` would make something wrong.

    Args:
        model: The model.
        others: Models that are sharded already.
        device: Where shards will be.
        device_placement: Whether the model may be moved.

    Raises:
        UnsupportedError: For a model that shares parameters with another one, has parts on other devices that must stay there, or a
            trainable scalar.
    """
    if isinstance(model, FSDPModule) or any(isinstance(m, FSDPModule) for m in model.modules()):
        raise UnsupportedError(
            f"{type(model).__name__} holds modules that are sharded already, by another prepare() or by hand. Prepare each module once: pass the "
            "whole model to prepare(), and use its parts through it."
        )
    theirs = {id(p) for other in others for p in other.parameters()}
    shared = [n for n, p in model.named_parameters() if id(p) in theirs]
    if shared:
        raise UnsupportedError(
            f"{', '.join(shared[:3])} of {type(model).__name__} belong to another prepared model as well. Put both models into one module, and "
            "prepare that: each parameter is sharded once."
        )
    scalars = [n for n, p in model.named_parameters() if p.ndim == 0]
    if scalars:
        raise UnsupportedError(
            f"{', '.join(scalars[:3])} of {type(model).__name__} have no dimension to shard along. Give them the shape (1,), or name their modules "
            "in ignored_modules if they are frozen."
        )
    if device_placement:
        return
    elsewhere = [n for n, p in model.named_parameters() if not p.is_meta and p.device.type != device.type]
    if elsewhere:
        raise UnsupportedError(
            f"device_placement=False, and {', '.join(elsewhere[:3])} aren't on {device}: shards live there. Move the model, or let it be placed."
        )


def check_unit(unit: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Refuse a unit whose gradients can't travel together.

    Raises:
        UnsupportedError: If parameters to be trained have several dtypes.
    """
    dtypes = {p.dtype for p in parameters if p.requires_grad}
    if len(dtypes) > 1:
        names = " and ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise UnsupportedError(
            f"The unit {type(unit).__name__} has parameters to train in {names}: gradients of a unit are reduced together, in one dtype. Convert "
            "them, freeze those of one dtype, or make other units (transformer_cls_names_to_wrap)."
        )


def ignored_parameters(model: torch.nn.Module, options: FullyShardedDataParallelPlugin) -> set[torch.nn.Parameter]:
    """Parameters below modules that are to be left out.

    Raises:
        ConfigurationError: If a name is that of no module, or a parameter would have to be trained.
    """
    wanted = options.ignored_modules
    if not wanted:
        return set()
    if isinstance(wanted, str):
        pattern = re.compile(wanted)
        modules = [m for n, m in model.named_modules() if n and pattern.fullmatch(n)]
        if not modules:
            raise ConfigurationError(f"ignored_modules={wanted!r} matches no module of {type(model).__name__}.")
    else:
        by_name = dict(model.named_modules())
        absent = [n for n in wanted if isinstance(n, str) and n not in by_name]
        if absent:
            raise ConfigurationError(f"ignored_modules: {type(model).__name__} has no module {absent[0]!r}.")
        modules = [by_name[n] if isinstance(n, str) else n for n in wanted]
    ignored = {p for m in modules for p in m.parameters()}
    trained = [n for n, p in model.named_parameters() if p in ignored and p.requires_grad]
    if trained:
        raise ConfigurationError(
            f"ignored_modules: {trained[0]} is to be trained, and the gradients of ignored parameters aren't averaged over processes. Freeze it "
            "with requires_grad_(False), or don't ignore it."
        )
    return ignored
