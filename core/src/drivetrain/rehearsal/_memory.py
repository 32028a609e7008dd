"""Bytes of tensors by what they are for, over time."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["CATEGORIES", "MemoryLog"]

#: What a block of memory can be for; the first that applies is what it counts as.
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "buffers",
    "inputs",
    "communication",
    "activations",
    "temporaries",
)


@dataclass(slots=True, eq=False)
class _Block:
    nbytes: int
    phase: str
    category: int = len(CATEGORIES) - 1


class MemoryLog:
    """Every block that comes, changes its size and goes. What a block was for may be found out later: sums are made at the end.

    Example:
        >>> log, x = MemoryLog(), torch.ones(4)
        >>> log.add(x, "forward")
        >>> log.label(x, "inputs")
        >>> log.peak()
        (16, {'inputs': 16})
    """

    def __init__(self) -> None:
        self._live: dict[int, tuple[_Block, weakref.ref[Any]]] = {}
        self._events: list[tuple[_Block, int]] = []
        self._begin = 0
        #: How many events there were when each step ended.
        self.marks: list[int] = []

    def add_input(self, tensor: torch.Tensor, phase: str) -> None:
        """Count a tensor that comes from the data: itself, and not what it is a part of, which needn't be on the device."""
        if tensor.untyped_storage()._cdata not in self._live:
            self.add(tensor, phase, nbytes=tensor.numel() * tensor.element_size())
            self.label(tensor, "inputs")

    def add(self, tensor: torch.Tensor, phase: str, *, nbytes: int | None = None) -> None:
        """Count a tensor's storage, if it isn't yet."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        block = _Block(int(storage.nbytes()) if nbytes is None else nbytes, phase)
        self._live[key] = block, weakref.ref(storage, functools.partial(self._gone, key))
        self._events.append((block, block.nbytes))

    def _gone(self, key: int, _: Any) -> None:
        block, _ref = self._live.pop(key)
        self._events.append((block, -block.nbytes))

    def resized(self, storage: Any) -> None:
        """A storage has another size now."""
        entry = self._live.get(storage._cdata)
        if entry is not None:
            block = entry[0]
            now = int(storage.nbytes())
            self._events.append((block, now - block.nbytes))
            block.nbytes = now
            block.category = min(block.category, CATEGORIES.index("communication"))  # gathered, and given back

    def label(self, tensor: torch.Tensor, category: str) -> None:
        """Say what a tensor is for."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        if entry is not None:
            entry[0].category = min(entry[0].category, CATEGORIES.index(category))

    def keep_activations(self) -> None:
        """Backward begins: what a forward pass left behind is kept for it."""
        rank = CATEGORIES.index("activations")
        for block, _ in self._live.values():
            if block.phase in ("forward", "loop"):
                block.category = min(block.category, rank)

    def keep_gradients(self) -> None:
        """Backward has ended: what it left behind, and nobody sent, are gradients, also those that a backend keeps beside the parameters' own."""
        for block, _ in self._live.values():
            if block.phase == "backward" and CATEGORIES[block.category] == "temporaries":
                block.category = CATEGORIES.index("gradients")

    def mark(self) -> None:
        """A step has ended."""
        self.marks.append(len(self._events))

    def live(self) -> dict[str, int]:
        """Bytes by category now."""
        sums: Counter[str] = Counter()
        for block, _ in self._live.values():
            sums[CATEGORIES[block.category]] += block.nbytes
        return _sorted(sums)

    def begin(self) -> None:
        """Training begins: what was before is setting up."""
        self._begin = len(self._events)

    def setup_peak(self) -> int:
        """Most bytes at once before training began."""
        return self._most(0, self._begin)[0]

    def peak(self) -> tuple[int, dict[str, int]]:
        """Most bytes at once since training began, up to the last mark (or the end), and what they were for."""
        most, place = self._most(self._begin, self.marks[-1] if self.marks else len(self._events))
        sums: Counter[str] = Counter()
        for block, change in self._events[:place]:
            sums[CATEGORIES[block.category]] += change
        return most, _sorted(sums)

    def _most(self, start: int, end: int) -> tuple[int, int]:
        most = now = place = 0
        for i, (_, change) in enumerate(self._events[:end], 1):
            now += change
            if i >= start and now > most:
                most, place = now, i
        return most, place


def _sorted(sums: Counter[str]) -> dict[str, int]:
    return {name: sums[name] for name in CATEGORIES if sums[name]}
