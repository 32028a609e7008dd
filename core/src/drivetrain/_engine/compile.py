"""torch.compile, of whole models or of their repeated blocks, in place."""

from __future__ import annotations

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
        """Compile; a module that is compiled already stays as it is."""
        for module in (repeated_blocks(model) if self.regional else []) or [model]:
            if module._compiled_call_impl is None:
                module._compiled_call_impl = torch.compile(_call_of(module), **self.arguments)


def _call_of(module: torch.nn.Module) -> Callable[..., Any]:
    """The module's call, in a frame of ours.

    ``Module.compile`` compiles nothing, and says nothing, where the class is torch's own (``Sequential``, ``TransformerEncoderLayer``): Dynamo skips
    the frames of torch's files, of which ``forward`` is one.
    """
    call = module._call_impl

    def call_module(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return call_module


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
