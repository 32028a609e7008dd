"""Seeds before each batch is read, so that augmentation depends on (seed, epoch, global batch) alone.

Generators of workers start anew on resume and batches meet other workers; in this process, looking one batch ahead would move the
training loop's generators. Neither matters when each batch starts from its own seed and the training loop's state is put back.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["BatchSeeder", "Seeded", "batch_seed", "seed_generators"]

_torch = torch.default_generator


class _Generator(NamedTuple):
    """One of the process's generators: its state, a way to seed it, to put a state back, and to compare two."""

    state: Callable[[], Any]
    seed: Callable[[int], Any]
    restore: Callable[[Any], Any]
    equal: Callable[[Any, Any], bool]


def _same_numpy(a: Any, b: Any) -> bool:
    return a[2:4] == b[2:4] and np.array_equal(a[1], b[1])


_GENERATORS = {
    "torch": _Generator(_torch.get_state, _torch.manual_seed, _torch.set_state, torch.equal),
    "python": _Generator(random.getstate, random.seed, random.setstate, operator.eq),
    "numpy": _Generator(
        np.random.get_state, lambda s: np.random.seed(s & 0xFFFFFFFF), np.random.set_state, _same_numpy
    ),
}


def batch_seed(seed: int, index: int) -> int:
    """The seed of one batch of an epoch; cheap, since it is made for each batch.

    Args:
        seed: The epoch's.
        index: The batch's place among all ranks' batches.

    Returns:
        An integer from 0 to 2**63 - 1. Steps are the golden ratio's (Weyl sequence): no two batches of an epoch share a seed.

    Example:
        >>> batch_seed(0, 0), len({batch_seed(1, i) % 2**32 for i in range(1000)})
        (0, 1000)
    """
    return (seed + index * 0x9E3779B97F4A7C15) & 0x7FFFFFFFFFFFFFFF


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's CPU generator. Devices are left alone: data is read on the CPU.

    Args:
        seed: From 0 to 2**63 - 1.

    Example:
        >>> seed_generators(3)
    """
    for generator in _GENERATORS.values():
        generator.seed(seed)


class Seeded:
    """Indices of one batch on their way to a worker, where they arrive as they were and seed the generators by arriving.

    A worker reads a batch as soon as it has taken its indices from the queue. Seeding while they are unpickled needs no wrapper around the
    user's data set, so ``get_worker_info().dataset`` stays the user's own.

    Args:
        indices: What the data set gets.
        seed: The batch's seed.

    Example:
        >>> import pickle
        >>> pickle.loads(pickle.dumps(Seeded([3, 1], seed=7)))
        [3, 1]
    """

    __slots__ = ("indices", "seed")

    def __init__(self, indices: Any, seed: int) -> None:
        self.indices = indices
        self.seed = seed

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, int]]:
        return _arrive, (self.indices, self.seed)


def _arrive(indices: Any, seed: int) -> Any:
    seed_generators(seed)
    return indices


class BatchSeeder:
    """Reads batches in this process from their own seeds, and puts the training loop's generators back.

    That costs 2 microseconds for torch's generator, 14 for Python's and 75 for NumPy's, which most data never uses. So with ``mode="auto"``
    a generator is looked after from the first batch on that is seen to use it. All are watched for the first batches and now and then later.
    In torch's deterministic mode, all are looked after always.

    Args:
        mode: True (always), False (never) or "auto".

    Example:
        >>> seeder = BatchSeeder("auto")
        >>> before = torch.get_rng_state()
        >>> a, b = seeder.read(random.random, 5), seeder.read(random.random, 5)
        >>> a == b, bool((torch.get_rng_state() == before).all()), seeder.used
        (True, True, {'python'})
    """

    __slots__ = ("_always", "_mode", "attends_from", "reads", "used")

    #: All generators are watched during the first reads and then at each so-many-th; torch's, which takes little, more often.
    FIRST, EVERY, EVERY_FOR_TORCH = 8, 512, 64

    def __init__(self, mode: bool | str) -> None:
        self._mode = mode
        #: Reads so far.
        self.reads = 0
        #: The next read that is more than a call; all of them once a generator is looked after.
        self.attends_from = 0
        self._always = False
        #: Names of the generators that data was seen to use.
        self.used: set[str] = set()
        self.start()

    def start(self) -> None:
        """An epoch begins."""
        self.attends_from = sys.maxsize if self._mode is False else 0
        self._always = self._mode is True or torch.are_deterministic_algorithms_enabled()

    def read(self, fetch: Callable[[], Any], seed: int, index: int = 0) -> Any:
        """Call ``fetch`` with generators seeded with ``batch_seed(seed, index)``.

        Args:
            fetch: Reads one batch; may raise.
            seed: The epoch's seed, or the batch's with ``index`` 0; from 0 to 2**63 - 1.
            index: The batch's place among all ranks' batches.
        """
        self.reads += 1
        if self.reads < self.attends_from:
            return fetch()
        return self.attend(fetch, batch_seed(seed, index))

    def attend(self, fetch: Callable[[], Any], seed: int) -> Any:
        """The part of `read` that does something: when ``reads``, with this one, has come to ``attends_from``."""
        count = self.reads
        if self._always:
            return self._read(fetch, seed, _GENERATORS, watch=False)
        watch_all = count <= self.FIRST or count % self.EVERY == 0
        watch_torch = count % self.EVERY_FOR_TORCH == 0
        names: Collection[str] = _GENERATORS if watch_all else {"torch", *self.used} if watch_torch else self.used
        try:
            return self._read(fetch, seed, names, watch=watch_all or watch_torch)
        finally:
            if count >= self.FIRST and not self.used:
                self.attends_from = count - count % self.EVERY_FOR_TORCH + self.EVERY_FOR_TORCH

    def _read(self, fetch: Callable[[], Any], seed: int, names: Collection[str], *, watch: bool) -> Any:
        saved = []
        for name in names:
            generator = _GENERATORS[name]
            before = generator.state()
            generator.seed(seed)
            saved.append((name, generator, before, generator.state() if watch else None))
        try:
            return fetch()
        finally:
            for name, generator, before, seeded in saved:
                if watch and not generator.equal(generator.state(), seeded):
                    self.used.add(name)
                generator.restore(before)
