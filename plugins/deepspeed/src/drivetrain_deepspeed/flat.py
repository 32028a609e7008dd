"""Parameters in the flat tensors of DeepSpeed's files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from drivetrain.errors import CheckpointError

__all__ = ["Layout", "cut"]


@dataclass(frozen=True, slots=True)
class Layout:
    """What lies in a flat tensor.

    Args:
        shapes: Shapes of parameters by name, in their order.
        stage: ZeRO's stage. Below 3 the parts of all processes make one flat tensor; at 3 each parameter is cut into equal parts.
        paddings: Values between one parameter and the next, for each; None where there are none.
    """

    shapes: Mapping[str, Sequence[int]]
    stage: int
    paddings: Sequence[int] | None = None


def cut(parts: Sequence[torch.Tensor], layout: Layout, where: Path) -> dict[str, torch.Tensor]:
    """Put whole parameters together.

    Args:
        parts: Flat tensors of all processes, in the order of ranks.
        layout: What lies in them.
        where: For messages.

    Returns:
        Tensors by name, each with values of its own.

    Raises:
        CheckpointError: If there are too few values.

    Example:
        >>> cut([torch.tensor([0.0, 1.0]), torch.tensor([2.0, -1.0])], Layout({"a": (2,), "b": (1,)}, stage=1), Path("x"))
        {'a': tensor([0., 1.]), 'b': tensor([2.])}
        >>> cut([torch.tensor([0.0, 1.0]), torch.tensor([2.0, -1.0])], Layout({"a": (3,)}, stage=3), Path("x"))
        {'a': tensor([0., 1., 2.])}
    """
    sizes = {name: math.prod(shape) for name, shape in layout.shapes.items()}
    shares = {name: math.ceil(size / len(parts)) for name, size in sizes.items()}
    gaps = layout.paddings if layout.paddings is not None else [0] * len(sizes)
    if len(gaps) != len(sizes):
        raise CheckpointError(f"{where} has {len(gaps)} paddings for {len(sizes)} parameters")
    held = min(p.numel() for p in parts) if layout.stage == 3 else sum(p.numel() for p in parts)
    needed = sum(shares.values()) if layout.stage == 3 else sum(sizes.values()) + sum(gaps)
    if held < needed - (0 if layout.stage == 3 or not gaps else gaps[-1]):
        raise CheckpointError(f"{where} holds {held} values of parameters of {needed}: a file is cut short")
    whole = torch.cat(list(parts)) if layout.stage < 3 else None
    found: dict[str, torch.Tensor] = {}
    offset = 0
    for (name, shape), gap in zip(layout.shapes.items(), gaps, strict=True):
        if whole is not None:
            values = whole[offset : offset + sizes[name]].clone()
            offset += sizes[name] + gap
        else:
            values = torch.cat([part[offset : offset + shares[name]] for part in parts])[: sizes[name]]
            offset += shares[name]
        found[name] = values.view(tuple(shape))
    return found
