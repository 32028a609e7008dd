"""Feeds of map-style data sets: by a plan of the epoch, or by a sampler without a length."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import count
from typing import Any

from drivetrain.data.batch import BatchInfo, WindowPlan
from drivetrain.data.dispatch import Step, follow, serve
from drivetrain.data.feeds import WORKERS, Context, Feed, Pairs, cut_batch
from drivetrain.data.order import OrderSource, permuted
from drivetrain.data.plan import Layout, Order, Plan, is_built_in, make_plan, remaining_order
from drivetrain.data.random import derive_seed
from drivetrain.data.reader import END, ahead_of
from drivetrain.data.samplers import SamplerStream, items_per_round
from drivetrain.data.seeding import batch_seed
from drivetrain.data.shardings import GlobalShuffle
from drivetrain.errors import CheckpointError, DrivetrainError

__all__ = ["MapFeed", "SamplerFeed"]


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

    def length(self) -> int:
        """Batches of the present epoch on this rank.

        Raises:
            TypeError: If it follows from an order that only rank 0's sampler knows, before the epoch has begun.
        """
        layout = self.context.current_layout()
        key = self._length_key(layout)
        if self._lengths is None or self._lengths[0] != key:
            self._lengths = (key, make_plan(self._order_to_measure(layout), layout, self.context.sharding).steps)
        return self._lengths[1][self.context.ranks.index]

    def _length_key(self, layout: Layout) -> Any:
        """What lengths follow from."""
        return self.order.length, layout, self.context.progress.epoch if self._measures_order(layout) else None

    def _measures_order(self, layout: Layout) -> bool:
        """Whether lengths follow from the order itself, not from how long it is alone."""
        leaves_out_empty_parts = layout.unit == "batches" and layout.split and layout.even == "none"
        return leaves_out_empty_parts or not is_built_in(self.context.sharding)

    def _order_to_measure(self, layout: Layout) -> Order:
        if not self._measures_order(layout):
            stand_in: Order = range(self.order.length)
            return [list(range(self.context.ranks.size)) for _ in stand_in] if layout.unit == "batches" else stand_in
        if self.order.is_drawn_by_first and self.context.ranks.size > 1:
            raise TypeError(
                "How many batches this rank gets follows from the order that rank 0's sampler draws: the loader has a length once its epoch has "
                "begun. Use even_batches=True, or a strategy of core, for a length before that."
            )
        return self.order.draw(self.context.progress.seed, self.context.progress.epoch, self.context.ranks)

    def samples(self) -> int | None:  # noqa: D102
        return self.order.length if self.context.layout.unit == "samples" else None

    def window(self, info: BatchInfo, size: int) -> WindowPlan | None:  # noqa: D102
        if self._plan is None or self.context.reads_items:
            return None
        return self._plan.window(info.index, size)

    def samples_of(self, info: BatchInfo) -> list[Any] | None:  # noqa: D102
        if self._plan is None:
            return None
        indices = self._plan.indices(info.index, self.context.ranks.index)
        return [
            int(i) if hasattr(i, "__index__") else i for i in (indices if hasattr(indices, "__iter__") else [indices])
        ]

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
            self._lengths = (self._length_key(plan.layout), plan.steps)
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
        reader, rank, world = self.context.reader, self.context.ranks.index, plan.layout.world
        steps = range(start, max(start, plan.steps[rank]))
        seed = self._epoch_seed()
        workers_seed = derive_seed(seed, WORKERS, rank)
        if not (reader.has_workers or reader.may_thread or self.context.reads_items):
            return self._local_here(plan, steps, seed, workers_seed)
        requests = ((plan.indices(step, rank), batch_seed(seed, step * world + rank)) for step in steps)
        return self._described(plan, steps, reader.read(requests, workers_seed))

    def _local_here(self, plan: Plan, steps: range, seed: int, workers_seed: int) -> Pairs:
        """The usual case, with as few layers as can be: what happens here happens in the training process for each batch."""
        rank, world = self.context.ranks.index, plan.layout.world
        put, fetch = self.context.reader.open_here(workers_seed)
        seeder, indices, info = self.context.reader.seeder, plan.indices, plan.info
        for step in steps:
            put(indices(step, rank))
            seeder.reads += 1
            try:
                if seeder.reads < seeder.attends_from:
                    batch = fetch()
                else:
                    batch = seeder.attend(fetch, batch_seed(seed, step * world + rank))
            except StopIteration:
                raise self._ended_early(step) from None
            yield batch, info(step, rank)

    def _described(self, plan: Plan, steps: range, batches: Iterator[Any]) -> Pairs:
        rank = self.context.ranks.index
        for step in steps:
            batch = next(batches, END)
            if batch is END:
                raise self._ended_early(step)
            yield batch, self.describe(batch, plan.info(step, rank))

    def _ended_early(self, step: int) -> DrivetrainError:
        return DrivetrainError(
            f"{type(self.context.dataset).__name__} raised StopIteration at batch {step}: an item of a map-style data set can't end it."
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
            return self.deliver(follow(context.channel), start)
        steps = self._whole_steps(plan, start) if context.slice_fn is not None else self._steps(plan, start)
        return self.deliver(serve(context.channel, steps, ahead=ahead), start)

    def _steps(self, plan: Plan, start: int) -> Iterator[Step]:
        """All ranks' batches, read one by one."""
        world = plan.layout.world
        seed = self._epoch_seed()
        places = [(step, r) for step in range(start, max(plan.steps)) for r in range(world) if step < plan.steps[r]]
        requests = ((plan.indices(step, r), batch_seed(seed, step * world + r)) for step, r in places)
        batches = self.context.reader.read(requests, derive_seed(seed, WORKERS, 0))
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
        batches = self.context.reader.read(requests, derive_seed(seed, WORKERS, 0))
        for step, batch in zip(range(start, max(plan.steps)), batches, strict=False):
            cut = plan.round_at(step)
            yield Step(cut_batch(batch, cut.received, self.context.slice_fn), cut)


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
        batches = context.reader.read(requests, derive_seed(seed, WORKERS, rank))
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
