"""From the user's DataLoader to a prepared one: how it is sharded, read and moved is decided here, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, MapDataPipe
from torch.utils.data.graph import traverse_dps
from torch.utils.data.graph_settings import get_all_graph_pipes

from drivetrain.data.config import DataLoaderConfiguration
from drivetrain.data.dispatch import Channel
from drivetrain.data.feeds import Context, Feed
from drivetrain.data.iterable import RoundStream, WorkerSetup, take_payload
from drivetrain.data.joined import join_layout
from drivetrain.data.loader import LoaderParts, PreparedDataLoader, make_prepared
from drivetrain.data.map_feeds import MapFeed, SamplerFeed
from drivetrain.data.order import OrderSource, has_own_batches, order_of, sampler_of
from drivetrain.data.placement import Placement
from drivetrain.data.plan import Layout
from drivetrain.data.random import derive_seed
from drivetrain.data.ranks import Ranks
from drivetrain.data.reader import SourceReader
from drivetrain.data.rollcall import RollCall
from drivetrain.data.samplers import IndexSource, source_loader
from drivetrain.data.seeding import BatchSeeder
from drivetrain.data.shardings import find_sharding
from drivetrain.data.stack import LoaderStack
from drivetrain.data.state import Progress
from drivetrain.data.streams import ShardedStreamFeed, StreamFeed
from drivetrain.errors import ConfigurationError, DistributedOperationError, RankMismatchError, UnsupportedError

__all__ = ["prepare_data_loader"]


def prepare_data_loader(
    loader: DataLoader[Any],
    *,
    device: torch.device | str | None = None,
    num_processes: int = 1,
    process_index: int = 0,
    config: DataLoaderConfiguration | None = None,
    stack: LoaderStack | None = None,
    group: dist.ProcessGroup | None = None,
    put_on_device: bool = True,
    rng_types: Sequence[Any] = (),
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    micro_batches: int = 1,
    replicated: bool = False,
) -> PreparedDataLoader[Any]:
    """Prepare a loader: each rank gets its part of the data, on its device, and the position can be saved and loaded.

    A collective operation of the ranks that hold different data: rank 0's seed becomes that of all, and lengths are compared.

    Args:
        loader: Any DataLoader. One that is prepared is returned as it is; one that this ``stack`` has seen gives the same result again.
        device: Where batches go; None leaves them.
        num_processes: Ranks that hold different data.
        process_index: This process's rank among them.
        config: How; default `DataLoaderConfiguration`.
        stack: The Accelerator's; a new one by default.
        group: The ranks' process group; None for all processes.
        put_on_device: Whether batches are moved at all.
        rng_types: Generators ("python", "numpy", "torch", a device type, "generator") made equal on all ranks when an epoch starts.
        slice_fn_for_dispatch: With dispatching: cuts a global batch, ``(batch, slice, process_index=..., num_processes=...)``.
        micro_batches: Batches that come joined as one, for a model whose call takes several.
        replicated: Whether several processes hold the same rows (parts of one replica of a model). All processes then take one seed, and
            call this.

    Raises:
        ConfigurationError: For settings that contradict each other or the loader.
        UnsupportedError: For a loader that can't be sharded.
        RankMismatchError: If ranks have loaders of different lengths or settings.

    Example:
        >>> config = DataLoaderConfiguration(data_seed=0)
        >>> loader = prepare_data_loader(DataLoader(range(7), batch_size=2), num_processes=2, process_index=1, config=config)
        >>> [batch.tolist() for batch in loader], len(loader)
        ([[2, 3], [6]], 2)
    """
    if isinstance(loader, PreparedDataLoader):
        return loader
    if not isinstance(loader, DataLoader):
        raise ConfigurationError(f"prepare_data_loader takes a torch DataLoader, got a {type(loader).__name__}.")
    stack = LoaderStack() if stack is None else stack
    known = stack.prepared(loader)
    if known is not None:
        return known
    config = replace(config) if config is not None else DataLoaderConfiguration()
    config.validate()
    _check_loader(loader)
    builder = _Builder(
        loader,
        config,
        Ranks(process_index, num_processes, group),
        stack,
        slice_fn_for_dispatch,
        put_on_device,
        micro_batches,
        Ranks.of() if replicated else Ranks(0, 1),
    )
    target = torch.device(device) if put_on_device and device is not None else None
    parts = LoaderParts(
        context=builder.context,
        feed=builder.feed,
        placement=Placement(target, non_blocking=config.non_blocking, prefetch=config.prefetch),
        stack=stack,
        rng_types=tuple(str(getattr(kind, "value", kind)) for kind in rng_types if num_processes > 1 or replicated),
        group=None if replicated else group,
        whole_class=builder.whole_class,
        state_per_rank=isinstance(builder.feed, ShardedStreamFeed),
    )
    prepared = make_prepared(loader, parts)
    stack.remember(loader, prepared)
    return prepared


def _check_loader(loader: DataLoader[Any]) -> None:
    if isinstance(loader.dataset, MapDataPipe) and _divides_itself(loader.dataset):
        raise UnsupportedError(
            "A map-style DataPipe of this loader has apply_sharding(): it divides itself over ranks, and prepare() would divide it again. "
            "Leave that pipe away."
        )
    if not getattr(loader, "in_order", True) and loader.num_workers > 1:
        raise UnsupportedError(
            "in_order=False lets batches of several workers overtake each other: neither their sizes on other ranks nor a position to resume "
            "from can be known. Use in_order=True, or one worker."
        )


def _divides_itself(dataset: MapDataPipe[Any]) -> bool:
    pipes = get_all_graph_pipes(traverse_dps(dataset))
    return any(callable(getattr(pipe, "apply_sharding", None)) for pipe in pipes)


class _Builder:
    """Makes the feed of one loader."""

    def __init__(
        self,
        loader: DataLoader[Any],
        config: DataLoaderConfiguration,
        ranks: Ranks,
        stack: LoaderStack,
        slice_fn: Callable[..., Any] | None,
        put_on_device: bool,
        micro_batches: int,
        everyone: Ranks,
    ) -> None:
        self.loader = loader
        self.micro_batches = micro_batches
        self.everyone = everyone
        self.config = config
        self.ranks = ranks
        self.iterable = isinstance(loader.dataset, IterableDataset)
        self.whole_class = type(loader).__iter__ is not DataLoader.__iter__ and not _is_stateful(type(loader))
        index = stack.next_index()
        self.dispatches = self._wants_dispatch(put_on_device)
        order = None if self.iterable else order_of(loader, world=ranks.size)
        self.layout = self._layout(yields_batches=not self.iterable and has_own_batches(loader))
        self.sharding = find_sharding(config.strategy, shuffled=order is not None and order.shuffles)
        self._check_strategy(order)
        self.layout = replace(self.layout, strategy=self.sharding.spec.name)
        if index < len(stack.joined):
            self.layout, order = join_layout(self.layout, stack.joined[index], order, self.sharding)
        seed = self.everyone.broadcast(self._agree(self._own_seed(index), order))
        self.context = Context(
            reader=self._reader(slice_fn),
            ranks=ranks,
            config=config,
            progress=Progress(seed),
            layout=self.layout,
            sharding=self.sharding,
            channel=self._channel(stack, index),
            slice_fn=slice_fn,
            dataset=loader.dataset,
            samplers=(loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)),
            roll=self._roll(stack, index),
        )
        self.feed = self._feed(order)

    # -- what kind ---------------------------------------------------------------------------------------------------------

    def _wants_dispatch(self, put_on_device: bool) -> bool:
        wanted = self.config.dispatch_batches
        if wanted is None:
            wanted = self.iterable and put_on_device and not self.whole_class
        if wanted and self.whole_class and self.ranks.size > 1:
            raise UnsupportedError(
                f"{type(self.loader).__name__} makes its batches in an __iter__ of its own, which rank 0 alone can't do for all. "
                "Use dispatch_batches=False."
            )
        return bool(wanted) and self.ranks.size > 1

    def _layout(self, *, yields_batches: bool) -> Layout:
        loader, world = self.loader, self.ranks.size
        if self.micro_batches > 1 and (yields_batches or self.whole_class or loader.batch_sampler is None):
            raise UnsupportedError(
                f"Models take {self.micro_batches} batches per call here, and only batches of a size that the loader is given can be joined: "
                "use DataLoader(batch_size=...), or gradient_accumulation_steps=1."
            )
        split = self.config.split_batches
        sampler: Any = loader.batch_sampler
        drop_last = bool(loader.drop_last or getattr(sampler, "drop_last", False))
        if sampler is None:
            if split and world > 1:
                raise ConfigurationError(
                    "split_batches=True divides batches of samples, and with batch_size=None the data set makes its own. "
                    "Give the loader a batch_size, or use split_batches=False."
                )
            return Layout(unit="items", world=world, round_rows=world, even="split", drop_last=drop_last)
        if yields_batches:
            return Layout(unit="batches", world=world, round_rows=0, even="split", drop_last=drop_last, split=split)
        size = int(sampler.batch_size if loader.batch_size is None else loader.batch_size) * self.micro_batches
        if split and size < world:
            raise ConfigurationError(
                f"split_batches=True can't divide batches of {size} over {world} ranks: raise batch_size to {world} at least."
            )
        return Layout(
            unit="samples",
            world=world,
            round_rows=size if split else size * world,
            even="split",
            drop_last=drop_last,
            split=split,
        )

    def _check_strategy(self, order: OrderSource | None) -> None:
        if (
            order is None
            and self.config.strategy not in ("auto", "interleaved")
            and self.sharding.spec.name != "interleaved"
        ):
            what = type(self.loader.dataset).__name__ if self.iterable else type(self.loader.sampler).__name__
            raise UnsupportedError(
                f"The strategy {self.sharding.spec.name!r} needs an order that is known before it is read, and {what} has none. "
                "Use strategy='auto' or 'interleaved' for it; a data set with shard(num_shards=, index=) and num_shards decides itself."
            )

    # -- what ranks must agree on ------------------------------------------------------------------------------------------

    def _own_seed(self, index: int) -> int:
        if self.config.data_seed is not None:
            return self.config.data_seed
        sampler: Any = self.loader.sampler
        if isinstance(sampler, DistributedSampler):
            return sampler.seed
        for generator in (getattr(sampler, "generator", None), self.loader.generator):
            if isinstance(generator, torch.Generator):
                return generator.initial_seed()
        return derive_seed(torch.initial_seed(), index)

    def _agree(self, seed: int, order: OrderSource | None) -> int:
        """Rank 0's seed. Without a process group (ranks simulated in one process) the configuration's must do."""
        if self.ranks.size == 1:
            return seed
        if not self.ranks.connected:
            if self.config.data_seed is None:
                raise DistributedOperationError(
                    f"{self.ranks.size} ranks must agree on a seed, and there is no process group. Make one, or give data_seed."
                )
            return seed
        mine = {
            "dispatches": self.dispatches,
            "samples": None if order is None or self.dispatches else order.length,
            "layout": self.layout.to_dict(),
            "even_batches": self.config.even_batches,
            "prefetch": self.config.prefetch,
        }
        everyone = self.ranks.all_gather((seed, mine, None if order is None else order.length))
        first = everyone[0][1]
        for rank, (_, theirs, _) in enumerate(everyone):
            for key, value in theirs.items():
                if value != first[key]:
                    raise RankMismatchError(
                        f"Rank {rank} prepares a loader with {key}={value!r}, and rank 0 one with {first[key]!r}. All ranks must prepare the same "
                        "loaders in the same order, over data sets of the same length: prepare() divides them."
                    )
        if order is not None and self.dispatches and self.ranks.index > 0:
            order.fix_length(everyone[0][2])
        return int(everyone[0][0])

    # -- how it is read ----------------------------------------------------------------------------------------------------

    def _reader(self, slice_fn: Callable[..., Any] | None) -> SourceReader:
        loader = self.loader
        index_source = IndexSource()
        fields: dict[str, Any] = {}
        self._stream: RoundStream | None = None
        if self.iterable:
            self._stream = self._make_stream(slice_fn)
            fields = {
                "dataset": self._stream,
                "batch_sampler": index_source,
                "batch_size": 1,
                "drop_last": False,
                "collate_fn": take_payload,
                "worker_init_fn": WorkerSetup(loader.worker_init_fn),
            }
        source = source_loader(loader, index_source=index_source, generator=torch.Generator(), **fields)
        reader = SourceReader(
            source,
            index_source,
            BatchSeeder(self.config.seed_batches),
            seeds_workers=self.config.seed_batches is not False,
        )
        reader.may_thread = self.whole_class
        return reader

    def _make_stream(self, slice_fn: Callable[..., Any] | None) -> RoundStream:
        dataset: Any = self.loader.dataset
        self._sharded = not self.dispatches and self.ranks.size > 1 and _shards(dataset) >= self.ranks.size
        if self._sharded:
            dataset = _shard(dataset, self.ranks)
        layout = replace(self.layout, world=1, round_rows=1) if self._sharded else self.layout
        rank = None if self.dispatches else 0 if self._sharded else self.ranks.index
        whole = self.dispatches and slice_fn is not None and self.layout.unit == "samples"
        return RoundStream(dataset, layout, rank=rank, collate=self.loader.collate_fn, whole=whole)

    def _channel(self, stack: LoaderStack, index: int) -> Channel | None:
        if not self.dispatches:
            return None
        if not self.ranks.connected:
            raise DistributedOperationError("Dispatching batches needs a process group.")
        pin = bool(self.loader.pin_memory) and torch.accelerator.is_available()
        return Channel(self.ranks, self._side_group(stack), tag=index, pin=pin)

    def _roll(self, stack: LoaderStack, index: int) -> RollCall | None:
        if not self.iterable or self.dispatches or self.ranks.size == 1 or not self.ranks.connected:
            return None
        return RollCall(self.ranks, self._side_group(stack), index)

    def _side_group(self, stack: LoaderStack) -> dist.ProcessGroup:
        if stack.side_group is None:
            stack.side_group = Channel.make_group(self.ranks)
        return stack.side_group  # type: ignore[no-any-return]

    def _feed(self, order: OrderSource | None) -> Feed:
        if self._stream is not None:
            return (
                ShardedStreamFeed(self.context, self._stream)
                if self._sharded
                else StreamFeed(self.context, self._stream)
            )
        if order is not None:
            return MapFeed(self.context, order)
        if self.dispatches:
            raise UnsupportedError(
                "dispatch_batches=True needs a sampler with a length for a map-style data set. Use dispatch_batches=False: each rank reads its own."
            )
        return SamplerFeed(self.context, sampler_of(self.loader))


def _is_stateful(cls: type) -> bool:
    """Whether it is torchdata's StatefulDataLoader: its ``__iter__`` only keeps a state, which loaders here do themselves."""
    return any(c.__name__ == "StatefulDataLoader" and c.__module__.startswith("torchdata.") for c in cls.__mro__)


def _shards(dataset: Any) -> int:
    """In how many shards a data set can be divided by its ``shard`` method."""
    if not callable(getattr(dataset, "shard", None)):
        return 0
    count: Any = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", 0)
    return int(count)


def _shard(dataset: Any, ranks: Ranks) -> Any:
    return dataset.shard(num_shards=ranks.size, index=ranks.index)
