"""The epoch's global order, the same on every rank by construction.

torch's sequential and random samplers are replaced by arithmetic on (seed, epoch). Any other sampler runs on rank 0 alone, with seeded
generators, and its order is sent to the others: an unseeded sampler can't make ranks disagree.
"""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from drivetrain.data.plan import Order
from drivetrain.data.random import derive_seed, fork_rng
from drivetrain.data.ranks import Ranks
from drivetrain.data.seeding import seed_generators
from drivetrain.errors import ConfigurationError, UnsupportedError

__all__ = [
    "OrderSource",
    "RandomOrder",
    "SamplerOrder",
    "SequentialOrder",
    "has_own_batches",
    "order_of",
    "permuted",
    "sampler_of",
    "seeded_sampler",
]

# Streams of `derive_seed` beside those of batches, whose first number is an epoch.
_ORDER, _PERMUTATION = 2**62, 2**62 + 1


class OrderSource:
    """Where an epoch's order comes from.

    Args:
        measure: Gives the number of samples, batches or items of an epoch; asked anew, since a data set may grow between epochs.
    """

    #: Whether the order differs from epoch to epoch.
    shuffles = False
    #: Whether rank 0 draws it and sends it to the others; else each rank knows it from seed and epoch.
    is_drawn_by_first = False

    def __init__(self, measure: Callable[[], int]) -> None:
        self._measure = measure

    @property
    def length(self) -> int:
        """Number of samples, batches or items of an epoch, as far as known before it is drawn."""
        return self._measure()

    def fix_length(self, length: int) -> None:
        """Take another rank's word for the length: this rank doesn't read."""
        self._measure = lambda: length

    def draw(self, seed: int, epoch: int, ranks: Ranks) -> Order:
        """The order of an epoch. A collective operation for orders that rank 0 draws for all."""
        raise NotImplementedError

    def fingerprint(self, order: Order) -> int | None:
        """A number that tells whether a drawn order is the one that a state was saved with; None where seed and epoch say it all."""
        return None


class SequentialOrder(OrderSource):
    """0, 1, 2, ...

    Args:
        measure: Gives the size of the data set.

    Example:
        >>> SequentialOrder(lambda: 3).draw(seed=0, epoch=0, ranks=Ranks(0, 1))
        range(0, 3)
    """

    def draw(self, seed: int, epoch: int, ranks: Ranks) -> Order:  # noqa: D102
        return range(self.length)


class RandomOrder(OrderSource):
    """A permutation of the data set, or draws from it, that follow from seed and epoch.

    Args:
        measure: Gives the size of the data set.
        draws: Gives the number of samples of an epoch; beyond the size, permutations follow one another. None: the size.
        replacement: Draw with replacement.

    Example:
        >>> order = RandomOrder(lambda: 5).draw(seed=1, epoch=0, ranks=Ranks(0, 1))
        >>> sorted(order.tolist()), (order == RandomOrder(lambda: 5).draw(seed=1, epoch=0, ranks=Ranks(1, 2))).all().item()
        ([0, 1, 2, 3, 4], True)
    """

    shuffles = True

    def __init__(
        self, measure: Callable[[], int], draws: Callable[[], int] | None = None, *, replacement: bool = False
    ) -> None:
        super().__init__(measure if draws is None else draws)
        self._size = measure if draws is not None else None
        self._replacement = replacement

    def fix_length(self, length: int) -> None:  # noqa: D102
        super().fix_length(length)
        self._size = None

    def draw(self, seed: int, epoch: int, ranks: Ranks) -> Order:  # noqa: D102
        generator = torch.Generator().manual_seed(derive_seed(seed, _ORDER, epoch))
        count = self.length
        size = count if self._size is None else self._size()
        if self._replacement:
            return torch.randint(size, (count,), generator=generator).numpy()
        rounds = -(-count // size) if size else 0
        parts = [torch.randperm(size, generator=generator) for _ in range(rounds)]
        return torch.cat(parts)[:count].numpy() if parts else np.empty(0, dtype=np.int64)


class SamplerOrder(OrderSource):
    """What a sampler or batch sampler of any class yields on rank 0, with seeded generators.

    Args:
        sampler: An iterable with a length.
        batches: Whether it yields batches.
    """

    shuffles = False
    is_drawn_by_first = True

    def __init__(self, sampler: Iterable[Any], *, batches: bool) -> None:
        super().__init__(lambda: len(sampler))  # type: ignore[arg-type]
        self.sampler = sampler
        self._batches = batches

    def draw(self, seed: int, epoch: int, ranks: Ranks) -> Order:  # noqa: D102
        def run() -> list[Any]:
            with seeded_sampler(self.sampler, derive_seed(seed, _ORDER, epoch)):
                return self._read()

        order: list[Any] = ranks.call_on_first(run, f"The sampler {type(self.sampler).__name__}")
        self.fix_length(len(order))
        return order if self._batches else _compact(order)

    def _read(self) -> list[Any]:
        limit = 2 * len(self.sampler) + 1000  # type: ignore[arg-type]
        order = list(itertools.islice(self.sampler, limit))
        if len(order) == limit:
            raise ConfigurationError(
                f"{type(self.sampler).__name__} has the length {len(self.sampler)} but yields {limit} times and more. "  # type: ignore[arg-type]
                "Give it its true length, or none if it has no end."
            )
        return [list(batch) for batch in order] if self._batches else order

    def fingerprint(self, order: Order) -> int | None:  # noqa: D102
        if isinstance(order, np.ndarray):
            return zlib.crc32(np.ascontiguousarray(order).tobytes())
        return zlib.crc32(repr(list(order)).encode())


def _compact(order: list[Any]) -> Order:
    """An array, if all are integers."""
    if all(type(i) is int for i in order):
        return np.asarray(order, dtype=np.int64)
    if all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in order):
        return np.asarray([int(i) for i in order], dtype=np.int64)
    if all(isinstance(i, torch.Tensor) and i.ndim == 0 and not i.is_floating_point() for i in order):
        return np.asarray([int(i) for i in order], dtype=np.int64)
    return order


@contextlib.contextmanager
def seeded_sampler(sampler: Any, seed: int) -> Iterator[None]:
    """Seed all that a sampler may draw from: Python, NumPy, torch, and torch generators that it or the sampler inside it holds.

    Everything is put back afterwards.
    """
    generators = []
    for owner in (sampler, getattr(sampler, "sampler", None)):
        held = vars(owner).values() if hasattr(owner, "__dict__") else ()
        generators += [g for g in held if isinstance(g, torch.Generator)]
    states = [g.get_state() for g in generators]
    try:
        with fork_rng():
            seed_generators(seed)
            for generator in generators:
                generator.manual_seed(seed)
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def permuted(order: Order, seed: int, epoch: int) -> Order:
    """A permutation of an order by seed and epoch.

    Example:
        >>> sorted(permuted([[0, 1], [2]], seed=0, epoch=0))
        [[0, 1], [2]]
    """
    generator = torch.Generator().manual_seed(derive_seed(seed, _PERMUTATION, epoch))
    places = torch.randperm(len(order), generator=generator).numpy()
    if isinstance(order, list):
        return [order[i] for i in places.tolist()]
    array: Order = np.asarray(order, dtype=np.int64)[places]
    return array


def _is_torchs(sampler: Any, cls: type) -> bool:
    """Whether a sampler is of torch's class, or torchdata's of that name that has a state: no other with an order of its own."""
    kind = type(sampler)
    names = (cls.__name__, f"Stateful{cls.__name__}")
    return kind is cls or (kind.__module__.startswith("torchdata.stateful_dataloader") and kind.__name__ in names)


def has_own_batches(loader: DataLoader[Any]) -> bool:
    """Whether the user gave a batch sampler of another class than torch's, whose batches may have any size.

    Example:
        >>> has_own_batches(DataLoader([1, 2])), has_own_batches(DataLoader([1, 2], batch_sampler=[[0, 1]]))
        (False, True)
    """
    return loader.batch_sampler is not None and not _is_torchs(loader.batch_sampler, BatchSampler)


def sampler_of(loader: DataLoader[Any]) -> Any:
    """What decides the order of a loader over a map-style data set: its own batch sampler, or its sampler."""
    batch_sampler: Any = loader.batch_sampler
    if has_own_batches(loader):
        return batch_sampler
    return loader.sampler if batch_sampler is None else batch_sampler.sampler


def order_of(loader: DataLoader[Any], *, world: int) -> OrderSource | None:
    """The order source of a loader over a map-style data set.

    torch's ``DistributedSampler`` is taken for what it divides: all samples, shuffled or not.

    Returns:
        None for a sampler without a length.

    Raises:
        ConfigurationError: For a ``DistributedSampler`` made for another number of ranks.
        UnsupportedError: For another sampler that gives each rank its own samples already.
    """
    sampler = sampler_of(loader)
    if not has_own_batches(loader):
        if _is_torchs(sampler, SequentialSampler):
            return SequentialOrder(lambda: len(sampler))
        if _is_torchs(sampler, RandomSampler):
            data = sampler.data_source
            draws = None if sampler._num_samples is None else lambda: sampler.num_samples if len(data) else 0
            return RandomOrder(lambda: len(data), draws, replacement=sampler.replacement)
        if _is_torchs(sampler, DistributedSampler):
            return _divided(sampler, world)
    _refuse_sharding(sampler)
    try:
        len(sampler)
    except (TypeError, NotImplementedError):
        return None
    return SamplerOrder(sampler, batches=has_own_batches(loader))


def _divided(sampler: DistributedSampler[Any], world: int) -> OrderSource:
    if sampler.num_replicas != world:
        raise ConfigurationError(
            f"The DistributedSampler has num_replicas={sampler.num_replicas}, and {world} ranks share this loader. "
            "Leave the sampler away: prepare() shards the loader."
        )
    data: Any = sampler.dataset
    return RandomOrder(lambda: len(data)) if sampler.shuffle else SequentialOrder(lambda: len(data))


def _refuse_sharding(sampler: Any) -> None:
    for candidate in (sampler, getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None)):
        if isinstance(candidate, DistributedSampler):
            raise UnsupportedError(
                f"The loader's {type(sampler).__name__} gives each rank its own samples already, and prepare() would divide them again. "
                "Use a sampler of all samples, or keep this loader out of prepare()."
            )
