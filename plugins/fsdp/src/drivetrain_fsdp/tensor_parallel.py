"""Tensor parallel: layers divided over processes that see the same rows."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from drivetrain.errors import ConfigurationError, UnsupportedError

__all__ = ["divide_layers", "find_plan"]

#: How a layer can be divided, under the names that transformers' plans have.
_STYLES: dict[str, Any] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicate": None,
}

#: Names of the layers of attention and MLP blocks: the first of a pair is divided by its outputs, the second by its inputs.
_COLUMNS = r"(q|k|v)(_proj|_lin)?|query|key|value|wq|wk|wv|gate_proj|up_proj|w1|w3|fc1|fc_in|lin1"
_ROWS = r"o_proj|out_proj|out_lin|wo|o|down_proj|w2|fc2|fc_out|lin2"

#: Attributes of attention modules that count heads.
_HEADS = ("num_heads", "n_heads", "num_attention_heads", "num_key_value_heads", "n_kv_heads", "nhead")


def find_plan(model: torch.nn.Module, given: Mapping[str, str]) -> dict[str, str]:
    """How each layer is divided, by its name.

    Args:
        model: The model.
        given: Patterns of names, as in ``ParallelismConfig(tp_plan=...)``; empty: the model's own plan, or a derived one.

    Raises:
        ConfigurationError: For an unknown style, a pattern that matches nothing, or a model for which there is no plan.

    Example:
        >>> class MLP(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.fc1, self.fc2 = torch.nn.Linear(2, 4), torch.nn.Linear(4, 2)
        >>> find_plan(torch.nn.ModuleList([MLP()]), {})
        {'0.fc1': 'colwise', '0.fc2': 'rowwise'}
    """
    patterns = dict(given) or _own_plan(model)
    if not patterns:
        return _derive(model)
    names = [n for n, _ in model.named_modules() if n]
    plan: dict[str, str] = {}
    for pattern, style in patterns.items():
        if style not in _STYLES:
            raise ConfigurationError(
                f"tp_plan: {pattern!r} is to be divided {style!r}. Styles are {', '.join(sorted(_STYLES))}."
            )
        found = fnmatch.filter(names, pattern)
        if not found and given:
            raise ConfigurationError(f"tp_plan: {pattern!r} matches no module of {type(model).__name__}.")
        plan.update(dict.fromkeys(found, style))
    return {n: s for n, s in plan.items() if _STYLES[s] is not None}


def _own_plan(model: torch.nn.Module) -> dict[str, str]:
    """That of transformers' models, whose pieces have each a part of it."""
    plan: dict[str, str] = {}
    for prefix, module in model.named_modules():
        for attribute in ("_tp_plan", "tp_plan"):
            own = getattr(module, attribute, None)
            if isinstance(own, Mapping):
                plan.update({f"{prefix}.{pattern}" if prefix else pattern: style for pattern, style in own.items()})
                break
    return plan


def _derive(model: torch.nn.Module) -> dict[str, str]:
    plan: dict[str, str] = {}
    for prefix, module in model.named_modules():
        linear = {n: c for n, c in module.named_children() if isinstance(c, torch.nn.Linear)}
        columns = [n for n in linear if re.fullmatch(_COLUMNS, n)]
        rows = [n for n in linear if re.fullmatch(_ROWS, n)]
        if columns and len(rows) == 1:
            path = f"{prefix}." if prefix else ""
            plan.update({f"{path}{n}": "colwise" for n in columns} | {f"{path}{rows[0]}": "rowwise"})
    if not plan:
        raise ConfigurationError(
            f"tp_size: {type(model).__name__} has no plan of its own, and no attention or MLP whose layers have usual names (q_proj, o_proj, up_proj, "
            "down_proj, fc1, fc2, ...). Give one: ParallelismConfig(tp_plan={'blocks.*.first': 'colwise', 'blocks.*.second': 'rowwise'})."
        )
    return plan


def divide_layers(model: torch.nn.Module, mesh: DeviceMesh, given: Mapping[str, str]) -> dict[str, str]:
    """Divide a model's layers over a dimension of the mesh, in place. Collective.

    Args:
        model: The model, with equal weights on every process.
        mesh: That dimension.
        given: Patterns of names, see `find_plan`.

    Returns:
        How each layer is divided, by its name.

    Raises:
        UnsupportedError: For a layer that can't be divided evenly, or shares its weight.
    """
    plan = find_plan(model, given)
    modules = dict(model.named_modules())
    for name, style in plan.items():
        _check(model, name, modules[name], style, mesh.size())
    _divide_heads(modules, plan, mesh.size())
    for name, style in plan.items():
        parallelize_module(modules[name], mesh, _STYLES[style]())
    return plan


def _check(model: torch.nn.Module, name: str, layer: torch.nn.Module, style: str, size: int) -> None:
    weight = getattr(layer, "weight", None)
    if not isinstance(layer, torch.nn.Linear | torch.nn.Embedding) or weight is None:
        raise UnsupportedError(
            f"tp_plan: {name} is a {type(layer).__name__}; Linear and Embedding layers can be divided."
        )
    by_rows = style.startswith("colwise") is isinstance(layer, torch.nn.Linear)  # of the weight
    dim = 0 if by_rows else 1
    if weight.shape[dim] % size:
        raise UnsupportedError(
            f"tp_plan: {name} has {weight.shape[dim]} {'outputs' if by_rows else 'inputs'}, which {size} processes can't share evenly. "
            "Leave it out of tp_plan, or use another tp_size."
        )
    holders = [m for m in model.modules() for p in m._parameters.values() if p is weight]
    if len(holders) > 1:
        raise UnsupportedError(f"tp_plan: {name} shares its weight with another module. Leave both out of tp_plan.")


def _divide_heads(modules: Mapping[str, torch.nn.Module], plan: Mapping[str, str], size: int) -> None:
    """Attention that counts its heads has fewer of them now."""
    holders = {name.rpartition(".")[0] for name, style in plan.items() if style == "colwise"}
    for name in holders:
        module = modules[name]
        for attribute in _HEADS:
            heads = vars(module).get(attribute)
            if not isinstance(heads, int):
                continue
            if heads % size:
                raise UnsupportedError(f"tp_size={size} doesn't divide the {heads} heads of {name} ({attribute}).")
            setattr(module, attribute, heads // size)
