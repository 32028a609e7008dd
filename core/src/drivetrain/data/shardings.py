"""Strategies: which rank gets which batches of the epoch's global order."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from drivetrain._lazy import load_target
from drivetrain.errors import ConfigurationError
from drivetrain.interfaces.data_sharding import DataSharding
from drivetrain.specs import DataShardingSpec

__all__ = [
    "BUILTIN_SPECS",
    "Contiguous",
    "FunctionSharding",
    "GlobalShuffle",
    "Interleaved",
    "even_parts",
    "find_sharding",
]

#: Descriptors of the strategies below.
BUILTIN_SPECS = (
    DataShardingSpec(
        name="interleaved",
        summary="Batch i goes to rank i % n",
        target="drivetrain.data.shardings:Interleaved",
    ),
    DataShardingSpec(
        name="contiguous",
        summary="Each rank gets one run of consecutive samples",
        target="drivetrain.data.shardings:Contiguous",
    ),
    DataShardingSpec(
        name="random",
        summary="A global shuffle by seed and epoch, then interleaved",
        target="drivetrain.data.shardings:GlobalShuffle",
    ),
)


def even_parts(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of ``parts`` parts of ``total`` that differ by one at most, larger ones first.

    Example:
        >>> even_parts(7, 3), even_parts(1, 3)
        ((3, 2, 2), (1, 0, 0))
    """
    size, larger = divmod(total, parts)
    return (size + 1,) * larger + (size,) * (parts - larger)


class Interleaved(DataSharding):
    """Batch i goes to rank i % n: what one process would read next is what the ranks read next, together.

    Example:
        >>> list(Interleaved().shard(iter([[0], [1], [2]]), rank=0, world_size=2))
        [[0], [2]]
    """

    def __init__(self, spec: DataShardingSpec = BUILTIN_SPECS[0]) -> None:
        super().__init__(spec)

    def shard(self, batches: Iterator[Sequence[int]], rank: int, world_size: int) -> Iterator[Sequence[int]]:  # noqa: D102
        return itertools.islice(batches, rank, None, world_size)


class Contiguous(DataSharding):
    """Each rank gets one run of consecutive samples of the epoch's order: data that is read in order is read in order by each rank.

    Example:
        >>> list(Contiguous().shard(iter([[0], [1], [2]]), rank=0, world_size=2))
        [[0], [1]]
    """

    def __init__(self, spec: DataShardingSpec = BUILTIN_SPECS[1]) -> None:
        super().__init__(spec)

    def shard(self, batches: Iterator[Sequence[int]], rank: int, world_size: int) -> Iterator[Sequence[int]]:  # noqa: D102
        everything = list(batches)
        sizes = even_parts(len(everything), world_size)
        start = sum(sizes[:rank])
        return iter(everything[start : start + sizes[rank]])


class GlobalShuffle(Interleaved):
    """The order is a permutation of the whole data set that follows from seed and epoch; then interleaved.

    Example:
        >>> GlobalShuffle().spec.name
        'random'
    """

    def __init__(self, spec: DataShardingSpec = BUILTIN_SPECS[2]) -> None:
        super().__init__(spec)


class FunctionSharding(DataSharding):
    """A user's function, from the epoch's global indices to one rank's.

    Args:
        function: ``(indices, rank, world_size) -> indices``. Gets the epoch's sample indices in order; or its batches, for loaders with a
            batch sampler of their own. Must return the same for the same arguments on every rank.

    Example:
        >>> list(FunctionSharding(lambda indices, rank, n: indices[rank::n]).select([5, 6, 7], 1, 2))
        [6]
    """

    def __init__(self, function: Callable[[Sequence[Any], int, int], Iterable[Any]]) -> None:
        super().__init__(DataShardingSpec(name="custom", summary="A function of the script"))
        self.select = function

    def shard(self, batches: Iterator[Sequence[int]], rank: int, world_size: int) -> Iterator[Sequence[int]]:  # noqa: D102
        return iter(self.select(list(batches), rank, world_size))


def find_sharding(strategy: Any, *, shuffled: bool) -> DataSharding:
    """The strategy for a loader.

    Args:
        strategy: As `DataLoaderConfiguration.strategy`.
        shuffled: Whether the loader shuffles; decides "auto".

    Raises:
        PluginNotFoundError: For a name that nobody offers.
        ConfigurationError: For something else that is no strategy.

    Example:
        >>> find_sharding("auto", shuffled=True).spec.name
        'random'
    """
    if strategy == "auto":
        strategy = "random" if shuffled else "interleaved"
    if isinstance(strategy, str):
        strategy = load_target(strategy) if ":" in strategy else _by_name(strategy)
    if isinstance(strategy, DataSharding):
        return strategy
    if inspect.isclass(strategy) and issubclass(strategy, DataSharding):
        return strategy(DataShardingSpec(name=strategy.__name__.lower()))
    if callable(strategy):
        return FunctionSharding(strategy)
    raise ConfigurationError(
        f"strategy is a {type(strategy).__name__}: use a name, a function or a DataSharding (`drivetrain plugins --kind data-sharding`)."
    )


def _by_name(name: str) -> DataSharding:
    for spec in BUILTIN_SPECS:
        if spec.name == name:
            return load_target(spec.target)(spec)  # type: ignore[no-any-return]
    from drivetrain._plugins import get_registry

    spec = get_registry().get("data-sharding", name)
    return load_target(spec.target)(spec)  # type: ignore[no-any-return]
