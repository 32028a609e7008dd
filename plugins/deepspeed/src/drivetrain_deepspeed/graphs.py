"""Which engines a loss goes through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from drivetrain_deepspeed.engine import Engine

__all__ = ["engines_in"]

E = TypeVar("E", bound=Engine)


def engines_in(loss: torch.Tensor, engines: Sequence[E]) -> list[E]:
    """The engines that update a parameter in a loss's graph, in the order given.

    Args:
        loss: The loss.
        engines: All engines; the walk ends once all were met.
    """
    found: set[int] = set()
    seen: set[object] = set()
    waiting = [loss.grad_fn]
    while waiting and len(found) < len(engines):
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found |= {i for i, engine in enumerate(engines) if engine.holds(leaf)}
        waiting += [following for following, _ in node.next_functions]
    return [engine for i, engine in enumerate(engines) if i in found]
