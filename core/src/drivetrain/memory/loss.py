"""A loss for a model whose own isn't known: what comes out decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from drivetrain.errors import UnsupportedError

__all__ = ["default_loss"]


def default_loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """Call a model with a batch as training scripts do, and make a scalar of what comes out.

    A mapping is given as keywords, of a pair the second is the target, anything else is the one input. A loss that the model returns is taken; a target of
    integers gives cross-entropy, one of the output's shape a mean square.

    Raises:
        UnsupportedError: If the model returns nothing that can be trained.

    Example:
        >>> model = torch.nn.Linear(2, 3)
        >>> default_loss(model, (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long))).item() > 0
        True
    """
    target = None
    if isinstance(batch, Mapping):
        output = model(**batch)
        target = batch.get("labels")
    elif isinstance(batch, Sequence) and len(batch) == 2:
        output, target = model(batch[0]), batch[1]
    elif isinstance(batch, Sequence) and len(batch) == 1:
        output = model(batch[0])
    else:
        output = model(batch)
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    found = [t for t in tree_leaves(_plain(output)) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not found:
        raise UnsupportedError(f"{type(model).__name__} returns no tensor that can be trained: say loss=.")
    first = next((t for t in found if t.ndim == 0), found[0])
    if first.ndim == 0:
        return first
    if isinstance(target, torch.Tensor) and not target.is_floating_point() and target.shape == first.shape[:-1]:
        return torch.nn.functional.cross_entropy(first.flatten(0, -2).float(), target.flatten())
    if isinstance(target, torch.Tensor) and target.shape == first.shape:
        return torch.nn.functional.mse_loss(first.float(), target.float())
    return first.float().pow(2).mean()


def _plain(output: Any) -> Any:
    if isinstance(output, Mapping):
        return dict(output)
    return output if isinstance(output, torch.Tensor | Sequence) else vars(output)
