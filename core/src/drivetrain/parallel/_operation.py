"""The steps that every collective on tensors takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.errors import ConfigurationError
from drivetrain.parallel._frames import INLINE, Frames, tell_failure
from drivetrain.parallel._packing import Leaf, align, leaves_of, pack
from drivetrain.parallel.structure import map_tensors

__all__ = ["all_inline", "check_rank", "inline", "prepare", "replace"]


def prepare(
    what: str, data: Any, group: dist.ProcessGroup | None, check: Callable[[Leaf], Any] | None = None
) -> list[Leaf]:
    """The tensors of ``data``. If that fails here, the other ranks must not wait for this one."""
    try:
        leaves = leaves_of(data)
        if check is not None:
            for leaf in leaves:
                check(leaf)
    except Exception as error:
        tell_failure(what, error, group)
        raise
    return leaves


def inline(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, int]:
    """The packed tensors, if a frame can carry them, and their size."""
    total = 0
    on_cpu = True
    for tensor in tensors:
        total += align(tensor.numel() * tensor.element_size())
        on_cpu = on_cpu and tensor.device.type == "cpu"
    if not on_cpu or total > INLINE or not total:
        return None, total
    return pack(tensors, size=total, device=torch.device("cpu")), total


def all_inline(leaves: Sequence[Leaf], frames: Frames) -> bool:
    """Whether the frames carried the values of ``leaves`` on every rank."""
    return frames.fits and not any(leaf.tensor.device.type != "cpu" for leaf in leaves)


def replace(data: Any, leaves: Sequence[Leaf], results: Sequence[torch.Tensor]) -> Any:
    """``data`` with ``results`` in place of its tensors."""
    if len(leaves) == 1 and leaves[0].path == "":
        return results[0]
    by_id = {id(leaf.tensor): result for leaf, result in zip(leaves, results, strict=True)}
    return map_tensors(lambda tensor: by_id[id(tensor)], data)


def check_rank(rank: int, world: int, name: str) -> None:
    """Refuse a rank that doesn't exist."""
    if not 0 <= rank < world:
        raise ConfigurationError(f"{name}={rank} is no rank: there are {world}, numbered from 0 to {world - 1}.")
