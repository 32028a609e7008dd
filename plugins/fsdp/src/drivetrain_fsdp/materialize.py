"""Models whose weights have no values yet: made under ``init_empty_weights()``, on all processes or on all but rank 0."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from drivetrain.big_model import has_empty, inner_first, reset_functions
from drivetrain.errors import UnsupportedError
from drivetrain.parallel.object_collectives import gather_object
from drivetrain_fsdp.options import FullyShardedDataParallelPlugin
from drivetrain_fsdp.shards import cut_like, local

__all__ = ["Start", "fill", "find_start", "replace_parameter"]


class Start(enum.Enum):
    """Where a model's first values come from.

    Example:
        >>> Start.WHOLE.name
        'WHOLE'
    """

    #: Every process has them.
    WHOLE = enum.auto()
    #: Rank 0 alone has them.
    RANK_0 = enum.auto()
    #: Nobody has: the model's own functions make them.
    EMPTY = enum.auto()


def find_start(model: torch.nn.Module, options: FullyShardedDataParallelPlugin) -> Start:
    """Find out, together with the other processes. Collective.

    Raises:
        UnsupportedError: On every rank, where what they have can't be put together.
    """
    tensors = list(itertools.chain(model.parameters(), model.buffers()))
    empty = sum(t.is_meta for t in tensors)
    mine = "none" if not empty else "all" if all(p.is_meta for p in model.parameters()) else "some"
    answers = gather_object([(mine, any(b.is_meta for b in model.buffers()))])
    kinds = [kind for kind, _ in answers]
    if set(kinds) == {"none"}:
        return Start.WHOLE
    if "some" in kinds:
        raise UnsupportedError(
            f"Some weights of {type(model).__name__} are on the meta device and others aren't (ranks "
            f"{[r for r, k in enumerate(kinds) if k == 'some']}). Make the whole model under init_empty_weights(), or none of it."
        )
    if set(kinds) == {"all"}:
        return Start.EMPTY
    if kinds[0] != "none":
        raise UnsupportedError(
            f"Ranks {[r for r, k in enumerate(kinds) if k == 'none']} have weights of {type(model).__name__}, and rank 0 has none: it is rank 0 "
            "that sends them. Make the model under init_empty_weights() on all processes but the first, or on all."
        )
    if not options.cpu_ram_efficient_loading:
        raise UnsupportedError(
            "cpu_ram_efficient_loading=False, and only rank 0 has weights. Leave it out, so that it sends them."
        )
    if any(buffers for _, buffers in answers):
        raise UnsupportedError(
            f"Buffers of {type(model).__name__} are on the meta device on some processes. Make them real: "
            "init_empty_weights(include_buffers=False)."
        )
    return Start.RANK_0


def replace_parameter(model: torch.nn.Module, old: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    """Put values in the place of a parameter on the meta device, under all of its names."""
    new = torch.nn.Parameter(data, requires_grad=old.requires_grad)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new
    return new


def fill(
    model: torch.nn.Module,
    device: torch.device,
    shards_on: torch.device,
    initialize: Callable[[torch.nn.Module], Any] | None,
) -> None:
    """Give a sharded model on the meta device its first values. Collective.

    Module by module, as a constructor does (inner ones first), the weights of one module alone are made whole, filled by its own function on
    every process, taken from rank 0, and cut. So numbers are those of a model that rank 0 made with the same seed.

    Args:
        model: The model, sharded.
        device: Where this process computes.
        shards_on: Where shards will be.
        initialize: Called with each module that has weights of its own; None: the model's ``_init_weights`` (transformers' models have it), and
            the module's ``reset_parameters``.

    Raises:
        UnsupportedError: On every rank, for a module that nothing fills.
    """
    owners = [m for m in inner_first(model) if has_empty(m)]
    functions = {id(m): [initialize] if initialize else reset_functions(m, model) for m in owners}
    unknown = sorted({type(m).__name__ for m in owners if not functions[id(m)]})
    if unknown:
        _refuse(unknown)

    def allocate(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        return torch.empty_like(tensor, device=shards_on if isinstance(tensor, DTensor) else device)

    model._apply(allocate)
    filled: set[int] = set()
    left: set[str] = set()
    for module in owners:
        if not _fill_module(module, functions[id(module)], device, filled) and initialize is None:
            left.add(type(module).__name__)
    if left:
        _refuse(sorted(left))


def _refuse(classes: list[str]) -> NoReturn:
    raise UnsupportedError(
        f"{', '.join(classes)}: nothing says how to fill their weights, which are on the meta device. Give them a reset_parameters(), or pass "
        "FullyShardedDataParallelPlugin(param_init_fn=...), a function that is called with each module (if a checkpoint is loaded next, one that does "
        "nothing)."
    )


def _fill_module(
    module: torch.nn.Module,
    functions: list[Callable[[torch.nn.Module], Any]],
    device: torch.device,
    filled: set[int],
) -> bool:
    """Fill one module's own weights, by the first of the functions that leaves none out; whether there is one."""
    shards: dict[str, Any] = {n: p for n, p in module._parameters.items() if isinstance(p, DTensor)}
    for name, shard in shards.items():
        whole = torch.full(shard.shape, float("nan"), device=device).to(shard.dtype)
        module._parameters[name] = torch.nn.Parameter(whole, requires_grad=shard.requires_grad)
    try:
        complete = False
        for function in functions:
            with torch.no_grad():
                function(module)
            complete = not any(module._parameters[n].isnan().any() for n in shards)  # type: ignore[union-attr]
            if complete:
                break
        values = {n: module._parameters[n] for n in shards}
    finally:
        module._parameters.update(shards)
    for name, shard in shards.items():
        value = values[name]
        assert value is not None
        if id(shard) in filled:  # tied to one that has its values
            continue
        filled.add(id(shard))
        data = value.detach()
        dist.broadcast(data, src=0)
        local(shard).detach().copy_(local(cut_like(data, shard)))
    return complete
