"""torch.compile, of whole models or of their repeated blocks, in place."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Compiler", "repeated_blocks"]


def repeated_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that a model repeats: members of module lists and sequences in which one class with parameters stands twice or more.

    Example:
        >>> import torch
        >>> layer = lambda: torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> model = torch.nn.ModuleDict({"head": torch.nn.Linear(8, 8), "layers": torch.nn.ModuleList([layer(), layer()])})
        >>> [type(b).__name__ for b in repeated_blocks(model)]
        ['TransformerEncoderLayer', 'TransformerEncoderLayer']
    """
    blocks: list[torch.nn.Module] = []

    def visit(module: torch.nn.Module) -> None:
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)):
            composite = [c for c in module if len(list(c.children()))]
            counts = Counter(type(c) for c in composite)
            repeated = [c for c in composite if counts[type(c)] > 1]
            blocks.extend(repeated)
            rest = [c for c in module if not any(c is r for r in repeated)]
        else:
            rest = list(module.children())
        for child in rest:
            visit(child)

    visit(model)
    return blocks


class Compiler:
    """Compiles modules in place, so that names, types and state dicts stay as they are.

    Args:
        arguments: Keyword arguments of ``torch.compile``.
        regional: Compile each repeated block by itself: compile time doesn't grow with depth. The whole model where there is none.

    Example:
        >>> Compiler({"backend": "eager"}, regional=False).arguments
        {'backend': 'eager'}
    """

    def __init__(self, arguments: dict[str, Any], *, regional: bool) -> None:
        self.arguments = arguments
        self.regional = regional

    def __call__(self, model: torch.nn.Module) -> None:
        """Compile; a module that is compiled already stays as it is.

        Not with ``module.compile()``: torch passes over the frames of its own modules (Sequential, Linear, TransformerEncoder), so that of
        a model made of them nothing would be compiled. From a frame of ours it inlines them, as ``torch.compile(module)`` does.
        """
        codes: dict[type, types.CodeType] = {}
        for module in (repeated_blocks(model) if self.regional else []) or [model]:
            if module._compiled_call_impl is None:
                entry = _entry(module._call_impl, codes.get(type(module)))
                codes[type(module)] = entry.__code__
                module._compiled_call_impl = torch.compile(entry, **self.arguments)


def _entry(call: Callable[..., Any], code: types.CodeType | None) -> types.FunctionType:
    """The frame in which compiling begins.

    What torch compiled is kept with a frame's code, a limited number of versions of it. Blocks of one class share them (they are compiled once);
    different models have a ``code`` of their own, so that they don't use up each other's.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return types.FunctionType(code or run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)


def uncompile(model: torch.nn.Module) -> torch.nn.Module:
    """Undo what `Compiler` did, in place.

    Example:
        >>> import torch
        >>> m = torch.nn.Linear(2, 2)
        >>> Compiler({"backend": "eager"}, regional=False)(m)
        >>> uncompile(m)._compiled_call_impl is None
        True
    """
    for module in model.modules():
        if module._compiled_call_impl is not None:
            module._compiled_call_impl = None
    return model
