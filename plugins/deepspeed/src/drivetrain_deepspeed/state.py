"""State of engines under canonical names; nothing is put together, each process gives and takes its parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from drivetrain.errors import UnsupportedError
from drivetrain.interfaces import Shards
from drivetrain_deepspeed.engine import Engine
from drivetrain_deepspeed.partitions import Partition

__all__ = ["load_model_state", "load_optimizer_state", "model_state", "optimizer_state"]


def model_state(module: torch.nn.Module, partition: Partition) -> dict[str, Any]:
    """Parameters and buffers by name: fp32 values of those that are trained.

    Args:
        module: The user's model.
        partition: Where its values are.
    """
    state: dict[str, Any] = dict(module.state_dict())
    known: dict[int, Any] = {}  # tied parameters are one value
    for buffer, parameters in partition.buffers():
        with partition.held(buffer):
            known.update({id(p): partition.read(p) for p in parameters})
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in state:
            if id(parameter) not in known:
                known[id(parameter)] = partition.read(parameter)
            value = known[id(parameter)]
            state[name] = value if isinstance(value, Shards) else value.detach()
    return state


def load_model_state(
    module: torch.nn.Module, partition: Partition, state: Mapping[str, Any], *, strict: bool
) -> tuple[list[str], list[str]]:
    """Write whole tensors or parts. What can fail on one process comes before the first collective.

    Args:
        module: The user's model.
        partition: Where its values are.
        state: Values by name.
        strict: Whether a missing or unexpected name is an error.

    Returns:
        Missing and unexpected names.

    Raises:
        RuntimeError: As ``Module.load_state_dict`` does.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    known = module.state_dict().keys()
    missing = [n for n in known if n not in state]
    unexpected = [n for n in state if n not in known]
    wrong = [
        f"{n} has the shape {tuple(state[n].shape)}, not {_shape(p)}"
        for n, p in parameters.items()
        if n in state and tuple(state[n].shape) != _shape(p)
    ]
    if wrong or (strict and (missing or unexpected)):
        raise RuntimeError(
            f"{type(module).__name__} doesn't fit the state: "
            + "; ".join([*wrong, *(f"missing: {n}" for n in missing), *(f"unexpected: {n}" for n in unexpected)])
        )
    rest = {n: v for n, v in state.items() if n in known and n not in parameters}
    module.load_state_dict(rest, strict=False)
    names = {id(p): n for n, p in parameters.items() if n in state}
    for buffer, held in partition.buffers():
        with partition.held(buffer, write=True):
            for parameter in held:
                if id(parameter) in names:
                    partition.write(parameter, state[names.pop(id(parameter))])
    for name in names.values():  # frozen ones
        partition.write(parameters[name], state[name])
    partition.refresh()
    return missing, unexpected


def _shape(parameter: Any) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def optimizer_state(engine: Engine, names: Mapping[int, str]) -> dict[str, Any]:
    """Optimizer state by parameter name.

    Args:
        engine: The engine.
        names: Each parameter's name, by ``id``.
    """
    state: dict[str, dict[str, Any]] = {}
    inner = engine.optimizer
    for buffer, parameters in engine.partition.buffers():
        values = inner.state.get(buffer, {})
        with engine.partition.held(buffer):
            for parameter in parameters if values else ():
                state[names[id(parameter)]] = {
                    key: engine.partition.read(parameter, value) if _is_alike(value, buffer) else value
                    for key, value in values.items()
                }
    groups = [
        {**{k: v for k, v in g.items() if k != "params"}, "params": [names[id(p)] for p in parameters]}
        for g, parameters in zip(inner.param_groups, engine.groups, strict=True)
    ]
    stepped = engine.engine.lr_scheduler  # one that the engine steps; schedulers of the script are saved by themselves
    more = {} if stepped is None else {"scheduler": stepped.state_dict()}
    return {**more, "state": state, "param_groups": groups}


def _is_alike(value: Any, buffer: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == buffer.shape


def load_optimizer_state(engine: Engine, names: Mapping[int, str], state: Mapping[str, Any]) -> None:
    """Write what `optimizer_state` gave, here or at another stage or number of processes.

    Args:
        engine: The engine.
        names: Each parameter's name, by ``id``.
        state: The state, of whole tensors or parts.

    Raises:
        UnsupportedError: If groups hold other parameters, or an optimizer's state can't be cut.
    """
    order = [[names[id(p)] for p in group] for group in engine.groups]
    saved = [list(group["params"]) for group in state["param_groups"]]
    if saved != order:
        differing = sorted({n for g in saved for n in g} ^ {n for g in order for n in g}) or ["their order"]
        raise UnsupportedError(
            f"The optimizer's parameters differ from the checkpoint's: {', '.join(differing[:5])}. "
            "Build the optimizer with the same parameter groups as the saved one."
        )
    inner, partition = engine.optimizer, engine.partition
    for group, given in zip(inner.param_groups, state["param_groups"], strict=True):
        group.update({k: v for k, v in given.items() if k != "params"})
    for buffer, parameters in partition.buffers():
        partition.forget_state(buffer)
        with partition.held(buffer, write=True):
            _load_buffer(inner, partition, buffer, {names[id(p)]: p for p in parameters}, state["state"])
    partition.link()
    if engine.engine.lr_scheduler is not None and "scheduler" in state:
        engine.engine.lr_scheduler.load_state_dict(state["scheduler"])


def _load_buffer(
    inner: Any, partition: Partition, buffer: torch.Tensor, parameters: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """One flat buffer's state, from that of the parameters in it."""
    for name, parameter in parameters.items():
        for key, value in state.get(name, {}).items():
            here = inner.state[buffer]
            if not isinstance(value, (Shards, torch.Tensor)) or len(value.shape) == 0:
                here[key] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            if tuple(value.shape) != _shape(parameter):
                raise UnsupportedError(
                    f"The optimizer's {key} of {name} has the shape {tuple(value.shape)}, and the parameter {_shape(parameter)}: it can't be cut "
                    "with the parameter, as ZeRO does. Use a backend that keeps whole parameters."
                )
            if key not in here:
                here[key] = torch.zeros_like(buffer, dtype=value.dtype)
            partition.write(parameter, value, here[key])
