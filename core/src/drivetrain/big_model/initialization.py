"""Building a model without the memory of its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["init_empty_weights", "init_on_device"]


@contextlib.contextmanager
def init_empty_weights(include_buffers: bool = False) -> Iterator[None]:
    """Inside, modules are made with weights on the meta device: shapes and dtypes without memory.

    A backend that shards fills each process's part when the model is prepared. Buffers stay real, unless they are included: those that are
    computed in a constructor and aren't saved (frequencies of rotary embeddings) couldn't be filled otherwise.

    Args:
        include_buffers: Buffers are made on the meta device as well.

    Example:
        >>> with init_empty_weights():
        ...     layer = torch.nn.Linear(10**4, 10**4)
        >>> layer.weight.device.type
        'meta'
    """
    with init_on_device("meta", include_buffers=include_buffers):
        yield


@contextlib.contextmanager
def init_on_device(device: str | torch.device, include_buffers: bool = False) -> Iterator[None]:
    """Inside, modules are made with their parameters on a device.

    Each parameter is moved when a module takes it, so never more than one of them is elsewhere. Tied parameters stay tied.

    Args:
        device: The device.
        include_buffers: Buffers are made there as well.

    Example:
        >>> with init_on_device("meta", include_buffers=True):
        ...     norm = torch.nn.BatchNorm1d(2)
        >>> norm.running_mean.is_meta
        True
    """
    target = torch.device(device)
    register_parameter = torch.nn.Module.register_parameter
    register_buffer = torch.nn.Module.register_buffer

    def parameter(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register_parameter(module, name, param)
        if param is not None and param.device != target:
            moved = type(param)(param.data.to(target), requires_grad=param.requires_grad)
            vars(moved).update(vars(param))
            module._parameters[name] = moved

    def buffer(module: torch.nn.Module, name: str, tensor: torch.Tensor | None, *args: Any, **kwargs: Any) -> None:
        register_buffer(module, name, tensor, *args, **kwargs)
        if tensor is not None:
            module._buffers[name] = tensor.to(target)

    torch.nn.Module.register_parameter = parameter  # type: ignore[method-assign, assignment]
    if include_buffers:
        torch.nn.Module.register_buffer = buffer  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
        torch.nn.Module.register_buffer = register_buffer  # type: ignore[method-assign]
