"""What torch's DataLoader is given in the place of the user's sampler, and the loader that it then is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain.data.batch import Round
from drivetrain.data.order import seeded_sampler
from drivetrain.data.plan import Layout, make_plan
from drivetrain.data.random import derive_seed
from drivetrain.data.ranks import Ranks
from drivetrain.interfaces.data_sharding import DataSharding

__all__ = ["IndexSource", "SamplerStream", "items_per_round", "source_loader"]


class IndexSource:
    """A (batch) sampler whose next iteration is set from outside: torch keeps one object over all epochs of persistent workers.

    Example:
        >>> source = IndexSource()
        >>> source.indices = iter([[0, 1], [2]])
        >>> list(source)
        [[0, 1], [2]]
    """

    def __init__(self) -> None:
        #: What the next iteration yields.
        self.indices: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.indices  # torch may ask twice, and reads only what it got last


class SamplerStream:
    """Batches of a sampler without a length, dealt in rounds. Rank 0's sampler is asked, a block of its items at a time.

    Args:
        sampler: The user's sampler or batch sampler.
        layout: How rounds are cut.
        sharding: The strategy.
        ranks: All ranks.
        seed: Seed for what the sampler draws in this epoch.
    """

    #: Items that rank 0 draws and sends at once; part of what decides the order of a sampler that draws, so it doesn't depend on the world.
    BLOCK = 256
    #: Rounds dealt at once.
    ROUNDS = 16

    def __init__(self, sampler: Any, layout: Layout, sharding: DataSharding, ranks: Ranks, seed: int) -> None:
        self._sampler = sampler
        self._layout = layout
        self._sharding = sharding
        self._ranks = ranks
        self._seed = seed
        #: What is known of each batch that was asked for and not yet received.
        self.rounds: deque[Round] = deque()

    def batches(self, skip: int) -> Iterator[Any]:
        """Yield this rank's indices, batch by batch.

        Args:
            skip: Items of the sampler that were read before.
        """
        rank = self._ranks.index
        items = islice(self._items(), skip, None)
        size = items_per_round(self._layout) * self.ROUNDS
        while True:
            rows = list(islice(items, size))
            plan = make_plan(rows, self._layout, self._sharding)
            for step in range(plan.steps[rank]):
                self.rounds.append(plan.round_at(step))
                yield plan.indices(step, rank)
            if len(rows) < size:
                return

    def _items(self) -> Iterator[Any]:
        iterator: Iterator[Any] | None = None

        def draw() -> list[Any]:
            nonlocal iterator
            with seeded_sampler(self._sampler, derive_seed(self._seed, number)):
                iterator = iter(self._sampler) if iterator is None else iterator
                return list(islice(iterator, self.BLOCK))

        for number in count():  # noqa: B007 (read by draw)
            block = self._ranks.call_on_first(draw, f"The sampler {type(self._sampler).__name__}")
            yield from block
            if len(block) < self.BLOCK:
                return


def items_per_round(layout: Layout) -> int:
    """Samples, batches or items that one full round takes from the order."""
    if layout.unit == "batches":
        return 1 if layout.split else layout.world
    return layout.round_rows


def source_loader(
    loader: DataLoader[Any], *, index_source: IndexSource, generator: torch.Generator, **fields: Any
) -> DataLoader[Any]:
    """A plain DataLoader with all settings of the user's, another sampler, and a generator of our own for the workers' seeds.

    Fields are copied rather than passed to a constructor, so that those which later versions of torch add come along.

    Args:
        loader: The user's loader, of any subclass.
        index_source: Takes the place of its batch sampler, or of its sampler where it doesn't batch.
        generator: Draws the workers' base seed, so that the training loop's generator isn't touched.
        **fields: Attributes to replace.
    """
    source: DataLoader[Any] = object.__new__(DataLoader)
    place = "sampler" if loader.batch_sampler is None else "batch_sampler"
    source.__dict__.update(loader.__dict__)
    source.__dict__.update({place: index_source, "generator": generator, "_iterator": None, **fields})
    return source
