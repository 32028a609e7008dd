"""The blocks that a model repeats: what is compiled, recomputed and sharded one by one."""

from __future__ import annotations

from collections import Counter

import torch

__all__ = ["repeated_blocks"]


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
