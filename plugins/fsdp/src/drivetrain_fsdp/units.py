"""What is asked of a sharded model's units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from drivetrain_fsdp.mesh import Mesh
from drivetrain_fsdp.options import FullyShardedDataParallelPlugin

__all__ = ["expected_collectives", "set_prefetching", "units_of"]


def units_of(model: torch.nn.Module) -> list[Any]:
    """The units of a model, the model itself first.

    Example:
        >>> units_of(torch.nn.Linear(2, 2))
        []
    """
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def set_prefetching(units: Sequence[torch.nn.Module], options: FullyShardedDataParallelPlugin) -> None:
    """Say for each unit which ones are gathered while it computes: those beside it in the model."""
    forward, backward = int(options.forward_prefetch), options.backward_units
    for i, unit in enumerate(units):
        assert isinstance(unit, FSDPModule)
        if forward:
            unit.set_modules_to_forward_prefetch(list(units[i + 1 : i + 1 + forward]))  # type: ignore[arg-type]
        if backward is not None:
            # None ahead is said by naming the unit itself, which is there already.
            ahead = list(reversed(units[max(i - backward, 0) : i])) or [unit]
            unit.set_modules_to_backward_prefetch(ahead)  # type: ignore[arg-type]


def expected_collectives(
    models: Sequence[torch.nn.Module], mesh: Mesh, options: FullyShardedDataParallelPlugin
) -> dict[str, dict[str, int]]:
    """Collectives of one forward and backward of each model without reduction, and with it; those of divided layers and sequences come on top."""
    shards = mesh.sizes["dp_shard"] * mesh.sequence_parts
    gathers = scatters = 0
    for model in models:
        trainable = any(p.requires_grad for p in model.parameters())
        for unit in units_of(model):
            own = _own_parameters(unit)
            if not own:
                continue
            again = options.reshard() is not False and (unit is not model or options.reshard() is not None)
            gathers += 1 + (again and trainable)
            scatters += any(p.requires_grad for p in own)
    micro_batch = {"all_gather": gathers} if shards > 1 else {}
    window = dict(micro_batch)
    if shards > 1 and scatters:
        window["reduce_scatter"] = scatters
    if mesh.sizes["dp_replicate"] > 1 and scatters:
        window["all_reduce"] = scatters
    return {"micro_batch": micro_batch, "window": window}


def _own_parameters(unit: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters that a unit gathers: its own and those of modules below that aren't units or parts of one."""
    found: list[torch.nn.Parameter] = []

    def visit(module: torch.nn.Module) -> None:
        found.extend(p for p in module._parameters.values() if p is not None)
        for child in module.children():
            if not isinstance(child, FSDPModule):
                visit(child)

    visit(unit)
    return found
