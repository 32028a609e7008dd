"""One epoch of a loader, as pairs of a batch and what is known about it.

A *feed* reads: from a map-style data set by a plan, from a sampler without an end, from an iterable data set in rounds; here, or on rank 0 for
all. It keeps the position up to date with what it hands out. Placement, the stack of loaders and the user's view are the loader's job.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal

from torch.utils.data import DataLoader

from drivetrain.data.batch import BatchInfo, WindowPlan
from drivetrain.data.config import DataLoaderConfiguration
from drivetrain.data.dispatch import Channel, Delivery, Step, follow, serve
from drivetrain.data.order import OrderSource, permuted
from drivetrain.data.plan import Layout, Order, Plan, make_plan, remaining_order
from drivetrain.data.random import derive_seed
from drivetrain.data.ranks import Ranks
from drivetrain.data.samplers import IndexSource, SamplerStream, items_per_round
from drivetrain.data.seeding import BatchSeeder, batch_seed
from drivetrain.data.shardings import GlobalShuffle
from drivetrain.data.state import Progress
from drivetrain.errors import CheckpointError, DrivetrainError
from drivetrain.interfaces.data_sharding import DataSharding
from drivetrain.parallel.structure import ignorant_find_batch_size, slice_tensors

__all__ = ["Context", "Feed", "MapFeed", "Pairs", "SamplerFeed", "SourceReader"]

Pairs = Iterator[tuple[Any, BatchInfo]]


class SourceReader:
    """Reads batches from torch's loader by indices and seeds.

    Args:
        source: A plain DataLoader over ``index_source``.
        index_source: Its (batch) sampler.
        seeder: Seeds in this process, where there are no workers.
    """

    def __init__(self, source: DataLoader[Any], index_source: IndexSource, seeder: BatchSeeder) -> None:
        self.source = source
        self.seeder = seeder
        self._index_source = index_source
        #: Whether the user's own iteration wraps this one, perhaps in a thread of its own.
        self.may_thread = False

    def read(self, requests: Iterator[tuple[Any, int]], length: int, seed: int) -> Iterator[Any]:
        """Yield one batch per request.

        Args:
            requests: Indices and the batch's seed.
            length: How many, as far as known.
            seed: For the workers' base seed.
        """
        generator: Any = self.source.generator
        generator.manual_seed(seed)
        if self.source.num_workers > 0:
            self._index_source.start(requests, length)
            return iter(self.source)
        return self._read_here(requests, length)

    def _read_here(self, requests: Iterator[tuple[Any, int]], length: int) -> Iterator[Any]:
        box: list[tuple[Any, int]] = []
        self._index_source.start(iter(box.pop, None), length)
        fetch = iter(self.source).__next__
        read, put = self.seeder.read, box.append
        home = threading.get_ident() if self.may_thread else None
        for request in requests:
            put(request)
            try:
                if home is None or home == threading.get_ident():
                    batch = read(fetch, request[1])
                else:  # generators belong to the process: another thread must not seed them under the training loop
                    batch = fetch()
            except StopIteration:
                return
            yield batch

    def forget_workers(self) -> None:
        """Persistent workers start anew, with what is set now."""
        self.source._iterator = None


@dataclass(slots=True)
class Context:
    """What all feeds of a loader share.

    Args:
        reader: Reads here.
        ranks: The ranks that hold different data.
        config: How loaders behave; ``even_batches`` may change between epochs.
        progress: Position and seed.
        layout: How epochs are cut, but for ``even_batches``.
        sharding: The strategy.
        channel: Rank 0 reads and sends, when set.
        slice_fn: The user's way to cut a global batch when dispatching.
        dataset: The user's.
        samplers: The user's, if any.
    """

    reader: SourceReader
    ranks: Ranks
    config: DataLoaderConfiguration
    progress: Progress
    layout: Layout
    sharding: DataSharding
    channel: Channel | None
    slice_fn: Callable[..., Any] | None
    dataset: Any
    samplers: tuple[Any, ...]

    def current_layout(self) -> Layout:
        """How the next epoch is cut."""
        given = self.config.even_batches
        even: Literal["split", "repeat", "none"] = "repeat" if given == "repeat" else "split" if given else "none"
        return replace(self.layout, even=even)

    def tell_epoch(self, epoch: int) -> None:
        """Samplers and data sets that have a ``set_epoch`` hear of each epoch."""
        told: list[Any] = []
        for owner in (self.dataset, *self.samplers):
            set_epoch = getattr(owner, "set_epoch", None)
            if callable(set_epoch) and all(owner is not other for other in told):
                told.append(owner)
                set_epoch(epoch)

    @property
    def reads_items(self) -> bool:
        """Whether each item of the data set is a batch, of a size that is known only when it was read."""
        return self.layout.unit == "items"


class Feed:
    """One way to read an epoch.

    Args:
        context: What it reads with.
    """

    def __init__(self, context: Context) -> None:
        self.context = context

    def length(self) -> int:
        """Batches of an epoch on this rank.

        Raises:
            TypeError: If it isn't known before.
        """
        raise TypeError(f"{type(self.context.dataset).__name__} has no length, so the loader has none.")

    def samples(self) -> int | None:
        """Samples of an epoch over all ranks, without repeated ones; None if unknown."""
        return None

    def open(self, skip: int | None) -> Pairs:
        """Read from the present position, or from the batch ``skip`` of the epoch. Collective where ranks must agree or rank 0 reads.

        Args:
            skip: Batches of the epoch to leave out; overrides a position inside of the epoch.
        """
        raise NotImplementedError

    def window(self, info: BatchInfo, size: int) -> WindowPlan | None:
        """The accumulation window that starts with a batch; None if the length isn't known."""
        return None

    def deliver(self, deliveries: Iterator[Delivery], index: int) -> Pairs:
        """The pairs of what rank 0 sent (or kept for itself)."""
        rank = self.context.ranks.index
        for number, (batch, cut, is_last, note) in enumerate(deliveries, index):
            self.note(note)
            yield batch, self.describe(batch, BatchInfo(number, cut.rows[rank], cut.rows, is_last, cut))

    def note(self, note: Any) -> None:
        """Take down where the reading rank's stream is, as a batch is handed out."""

    def describe(self, batch: Any, info: BatchInfo) -> BatchInfo:
        """Rows of a batch of the data set's own making are counted; 0 for one that is repeated."""
        if self.context.reads_items:
            info.rank_rows = None
            if info.rows:
                info.rows = ignorant_find_batch_size(batch)
        return info


class MapFeed(Feed):
    """A map-style data set, by a plan.

    Args:
        context: What it reads with.
        order: Where the epoch's order comes from.
    """

    def __init__(self, context: Context, order: OrderSource) -> None:
        super().__init__(context)
        self.order = order
        self._plan: Plan | None = None
        self._lengths: tuple[Any, tuple[int, ...]] | None = None

    def length(self) -> int:  # noqa: D102
        layout = self.context.current_layout()
        key = (self.order.length, layout)
        if self._lengths is None or self._lengths[0] != key:
            stand_in: Order = range(self.order.length or 0)
            if layout.unit == "batches":
                stand_in = [list(range(self.context.ranks.size)) for _ in stand_in]
            self._lengths = (key, make_plan(stand_in, layout, self.context.sharding).steps)
        return self._lengths[1][self.context.ranks.index]

    def samples(self) -> int | None:  # noqa: D102
        return self.order.length if self.context.layout.unit == "samples" else None

    def window(self, info: BatchInfo, size: int) -> WindowPlan | None:  # noqa: D102
        if self._plan is None or self.context.reads_items:
            return None
        return self._plan.window(info.index, size)

    def open(self, skip: int | None) -> Pairs:  # noqa: D102
        context, progress = self.context, self.context.progress
        skip = progress.skip_to(skip)
        plan = self._plan_epoch()
        if skip is not None:
            progress.taken = skip
        rank = context.ranks.index
        if 0 < plan.steps[rank] <= progress.taken and skip is None and not progress.epoch_is_given:
            progress.next_epoch()  # the state was saved at the very end of an epoch
            context.tell_epoch(progress.epoch)
            plan = self._plan_epoch()
        self._plan = plan
        if not progress.segments:
            self._lengths = ((self.order.length, plan.layout), plan.steps)
        start = progress.taken
        if context.channel is not None:
            return self._dispatched(plan, start)
        return self._local(plan, start)

    def _plan_epoch(self) -> Plan:
        context, progress = self.context, self.context.progress
        layout = context.current_layout()
        order = self.order.draw(progress.seed, progress.epoch, context.ranks)
        self._check(order)
        if isinstance(context.sharding, GlobalShuffle) and not self.order.shuffles:
            order = permuted(order, progress.seed, progress.epoch)
        if progress.resize(layout.to_dict()):
            self._warn_of_resize(progress.segments[-1], layout)
        order = remaining_order(order, progress.segments, context.sharding)
        return make_plan(order, layout, context.sharding)

    def _check(self, order: Order) -> None:
        """An epoch can only be resumed with the order that it began with."""
        progress = self.context.progress
        found = [len(order), self.order.fingerprint(order)]
        if progress.fingerprint is not None and progress.fingerprint != found:
            name = type(self.context.dataset).__name__
            if progress.fingerprint[0] != found[0]:
                raise CheckpointError(
                    f"The loader over {name} was saved inside an epoch of {progress.fingerprint[0]} samples or batches, and now there are "
                    f"{found[0]}. Resume with the same data set and sampler, or call set_epoch() to start an epoch."
                )
            raise CheckpointError(
                f"The sampler of the loader over {name} gives epoch {progress.epoch} another order than when its state was saved, so samples would "
                "be lost and repeated. Let it draw from a torch.Generator that it holds, or from torch's, NumPy's or Python's global generator."
            )
        progress.fingerprint = found

    def _warn_of_resize(self, before: dict[str, Any], layout: Layout) -> None:
        if before["round_rows"] != layout.round_rows:
            text = f"the global batch goes from {before['round_rows']} to {layout.round_rows} samples (keep_global_batch=True keeps it)"
        else:
            text = "the global batch stays as it is"
        warnings.warn(
            f"A loader goes on inside an epoch that was begun on {before['world']} ranks, now on {layout.world}: the samples not yet seen are "
            f"divided anew; {text}.",
            stacklevel=2,
        )

    def _local(self, plan: Plan, start: int) -> Pairs:
        context = self.context
        rank, world = context.ranks.index, plan.layout.world
        stop = max(start, plan.steps[rank])
        seed = self._epoch_seed()
        requests = ((plan.indices(step, rank), batch_seed(seed, step * world + rank)) for step in range(start, stop))
        batches = context.reader.read(requests, stop - start, derive_seed(seed, _WORKERS, rank))
        info = plan.info
        if context.reads_items:
            for step, batch in zip(range(start, stop), batches, strict=False):
                yield batch, self.describe(batch, info(step, rank))
            return
        step = start
        for batch in batches:
            yield batch, info(step, rank)
            step += 1
        if step != stop:
            raise DrivetrainError(
                f"{type(context.dataset).__name__} raised StopIteration at batch {step} of {stop}: an item of a map-style data set can't end it."
            )

    def _epoch_seed(self) -> int:
        """After a resize, batches have other samples: their seeds aren't used twice."""
        progress = self.context.progress
        return derive_seed(progress.seed, progress.epoch, *[s["taken"] for s in progress.segments])

    def _dispatched(self, plan: Plan, start: int) -> Pairs:
        context = self.context
        assert context.channel is not None
        ahead = bool(context.config.prefetch)
        if context.ranks.index > 0:
            return self.deliver(follow(context.channel, ahead=ahead), start)
        steps = self._whole_steps(plan, start) if context.slice_fn is not None else self._steps(plan, start)
        return self.deliver(serve(context.channel, steps, ahead=ahead), start)

    def _steps(self, plan: Plan, start: int) -> Iterator[Step]:
        """All ranks' batches, read one by one."""
        world = plan.layout.world
        seed = self._epoch_seed()
        places = [(step, r) for step in range(start, max(plan.steps)) for r in range(world) if step < plan.steps[r]]
        requests = ((plan.indices(step, r), batch_seed(seed, step * world + r)) for step, r in places)
        batches = self.context.reader.read(requests, len(places), derive_seed(seed, _WORKERS, 0))
        for step in range(start, max(plan.steps)):
            parts = [next(batches) if step < plan.steps[r] else None for r in range(world)]
            yield Step(parts, plan.round_at(step))

    def _whole_steps(self, plan: Plan, start: int) -> Iterator[Step]:
        """Each step read as one batch, and cut by the user's function."""
        world = plan.layout.world
        seed = self._epoch_seed()
        requests = (
            (
                [i for r in range(world) if step < plan.steps[r] for i in plan.indices(step, r)],
                batch_seed(seed, step * world),
            )
            for step in range(start, max(plan.steps))
        )
        batches = self.context.reader.read(requests, max(plan.steps) - start, derive_seed(seed, _WORKERS, 0))
        for step, batch in zip(range(start, max(plan.steps)), batches, strict=False):
            cut = plan.round_at(step)
            yield Step(cut_batch(batch, cut.received, self.context.slice_fn), cut)


#: The stream of `derive_seed` for workers' base seeds; those of batches start with smaller numbers.
_WORKERS = 2**61


def cut_batch(batch: Any, sizes: tuple[int, ...], slice_fn: Callable[..., Any] | None) -> list[Any]:
    """Cut a collated batch into the ranks' parts of these sizes, with the user's function or by rows."""
    cut = slice_tensors if slice_fn is None else slice_fn
    parts, start = [], 0
    for rank, size in enumerate(sizes):
        rows = slice(start, start + size)
        parts.append(cut(batch, rows, process_index=rank, num_processes=len(sizes)) if size else None)
        start += size
    return parts


class SamplerFeed(Feed):
    """A map-style data set whose sampler has no length, perhaps no end.

    Args:
        context: What it reads with.
        sampler: The user's sampler or batch sampler.
    """

    def __init__(self, context: Context, sampler: Any) -> None:
        super().__init__(context)
        self._sampler = sampler

    def length(self) -> int:  # noqa: D102
        raise TypeError(f"{type(self._sampler).__name__} has no length, so the loader has none.")

    def open(self, skip: int | None) -> Pairs:  # noqa: D102
        context, progress = self.context, self.context.progress
        layout = context.current_layout()
        skip = progress.skip_to(skip)
        progress.resize(layout.to_dict())
        progress.taken = progress.taken if skip is None else skip
        before = sum(s["taken"] * items_per_round(Layout(**_fields(s))) for s in progress.segments)
        seed = derive_seed(progress.seed, progress.epoch)
        stream = SamplerStream(self._sampler, layout, context.sharding, context.ranks, seed)
        indices = stream.batches(before + progress.taken * items_per_round(layout))
        rank, world, start = context.ranks.index, layout.world, progress.taken
        requests = (
            (batch, batch_seed(seed, step * world + rank)) for step, batch in zip(count(start), indices, strict=False)
        )
        batches = context.reader.read(requests, 0, derive_seed(seed, _WORKERS, rank))
        return self._ahead(batches, stream, start)

    def _ahead(self, batches: Iterator[Any], stream: SamplerStream, start: int) -> Pairs:
        rank = self.context.ranks.index
        batch, failure = ahead_of(batches)
        index = start
        while batch is not END:
            present, cut = batch, stream.rounds.popleft()
            batch, failure = ahead_of(batches)
            is_last = batch is END and failure is None
            yield present, self.describe(present, BatchInfo(index, cut.rows[rank], cut.rows, is_last, cut))
            index += 1
        if failure is not None:
            raise failure


def _fields(segment: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in segment.items() if k != "taken"}


#: What `ahead_of` returns when there is nothing more.
END: Any = object()


def ahead_of(batches: Iterator[Any]) -> tuple[Any, Exception | None]:
    """The next batch, read before the present one is handed out: its failure must not cost the present one."""
    try:
        return next(batches, END), None
    except Exception as error:
        return END, error
