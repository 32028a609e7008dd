"""Seeds before each batch is read, so that augmentation depends on (seed, epoch, global batch) alone.

Generators of workers start anew on resume and batches meet other workers; in this process, looking one batch ahead would move the
training loop's generators. Neither matters when each batch starts from its own seed and the training loop's state is put back.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

__all__ = ["BatchSeeder", "Seeded", "batch_seed", "seed_generators"]

# The CPU's default generator is one object for the process's life. The methods are looked up once: they are called for each batch.
_get_state = torch.default_generator.get_state
_set_state = torch.default_generator.set_state
_manual_seed = torch.default_generator.manual_seed


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
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    _manual_seed(seed)


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

    torch's generator takes 2 microseconds of care, Python's 14 and NumPy's 75. With ``mode="auto"`` the latter two are looked after for
    the first batches and now and then later; from the first batch that uses one, it is looked after always.

    Args:
        mode: True, False (seeds nothing) or "auto".
        used: Generators ("python", "numpy") that data is known to use.

    Example:
        >>> seeder = BatchSeeder("auto")
        >>> before = torch.get_rng_state()
        >>> a, b = seeder.read(random.random, 5), seeder.read(random.random, 5)
        >>> a == b, bool((torch.get_rng_state() == before).all()), seeder.used
        (True, True, {'python'})
    """

    __slots__ = ("_count", "_mode", "used")

    #: The first reads, and then each so-many-th, find out which generators are used.
    FIRST, EVERY = 4, 256

    def __init__(self, mode: bool | str, used: set[str] | None = None) -> None:
        self._mode = mode
        self._count = 0
        self.used = set(used or ())

    def read(self, fetch: Callable[[], Any], seed: int) -> Any:
        """Call ``fetch`` with seeded generators.

        Args:
            fetch: Reads one batch; may raise.
            seed: From 0 to 2**63 - 1.
        """
        mode = self._mode
        if mode is False:
            return fetch()
        self._count = count = self._count + 1
        state = _get_state()
        _manual_seed(seed)
        try:
            if mode is True or self.used or count <= self.FIRST or count % self.EVERY == 0:
                return self._read_all(fetch, seed)
            return fetch()
        finally:
            _set_state(state)

    def _read_all(self, fetch: Callable[[], Any], seed: int) -> Any:
        count, mode, used = self._count, self._mode, self.used
        probe = mode is not True and (count <= self.FIRST or count % self.EVERY == 0)
        python = probe or mode is True or "python" in used
        numpy = probe or mode is True or "numpy" in used
        python_state = random.getstate() if python else None
        numpy_state = np.random.get_state() if numpy else None
        if python:
            random.seed(seed)
        if numpy:
            np.random.seed(seed & 0xFFFFFFFF)
        seeded = (random.getstate(), np.random.get_state(legacy=False)) if probe else None
        try:
            return fetch()
        finally:
            if seeded is not None:
                self._note_use(*seeded)
            if python_state is not None:
                random.setstate(python_state)
            if numpy_state is not None:
                np.random.set_state(numpy_state)

    def _note_use(self, python: Any, numpy: Any) -> None:
        if random.getstate() != python:
            self.used.add("python")
        now = np.random.get_state(legacy=False)
        same = now["state"]["pos"] == numpy["state"]["pos"] and now["has_gauss"] == numpy["has_gauss"]
        if not same or not np.array_equal(now["state"]["key"], numpy["state"]["key"]):
            self.used.add("numpy")
