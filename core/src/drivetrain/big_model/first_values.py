"""Who gives the weights of a model their first values: for backends that fill models made without any."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["has_empty", "inner_first", "reset_functions"]


def inner_first(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Each module of a model once, after those inside of it: the order in which constructors end.

    Example:
        >>> [type(m).__name__ for m in inner_first(torch.nn.Sequential(torch.nn.Tanh()))]
        ['Tanh', 'Sequential']
    """
    seen: set[int] = set()

    def visit(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for child in module.children():
            yield from visit(child)
        yield module

    return visit(model)


def has_empty(module: torch.nn.Module) -> bool:
    """Whether a module itself, without those inside of it, has weights or buffers on the meta device.

    Example:
        >>> has_empty(torch.nn.Linear(2, 2, device="meta")), has_empty(torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta")))
        (True, False)
    """
    own = itertools.chain(module._parameters.values(), module._buffers.values())
    return any(t is not None and t.is_meta for t in own)


def reset_functions(module: torch.nn.Module, model: torch.nn.Module) -> list[Callable[[torch.nn.Module], Any]]:
    """What fills a module's own weights, to be called with the module, one after the other until none is empty.

    Args:
        module: A part of the model.
        model: All of it: its ``_init_weights``, which transformers' models have, comes first; then the module's ``reset_parameters``.

    Example:
        >>> module = torch.nn.Linear(2, 2)
        >>> len(reset_functions(module, torch.nn.Sequential(module)))
        1
    """
    found: list[Callable[[torch.nn.Module], Any]] = []
    for holder in model.modules():
        function = getattr(holder, "_init_weights", None)  # also below an adapter's wrapper
        if callable(function):
            found.append(function)
            break
    own = [n for n in ("reset_parameters", "_reset_parameters") if callable(getattr(module, n, None))]
    return [*found, *map(operator.methodcaller, own)]
