"""Feeds of iterable data sets: each rank reads the whole stream and keeps its part, or its own shards of it, or rank 0 reads for all."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import count
from typing import Any

from drivetrain.data.batch import BatchInfo, Round
from drivetrain.data.dispatch import Step, follow, serve
from drivetrain.data.feeds import WORKERS, Context, Feed, Pairs, cut_batch
from drivetrain.data.iterable import Packet, Resume, RoundStream, StreamPosition, has_state, holds_place, round_of
from drivetrain.data.plan import Layout, cut_round
from drivetrain.data.random import derive_seed
from drivetrain.data.reader import END, ahead_of
from drivetrain.data.rollcall import FAILED, Question
from drivetrain.data.seeding import batch_seed
from drivetrain.errors import CheckpointError, DistributedOperationError

__all__ = ["ShardedStreamFeed", "StreamFeed"]


class StreamFeed(Feed):
    """One stream that all ranks share. Every rank reads it, or rank 0 alone when dispatching.

    Args:
        context: What it reads with; the reader's source is a loader of ``stream``.
        stream: The rounds.
    """

    #: Whether ranks draw the same numbers while reading: they must see the same stream.
    common_seed = True

    def __init__(self, context: Context, stream: RoundStream) -> None:
        super().__init__(context)
        self._stream = stream
        self._warned = False

    def length(self) -> int:
        """Batches of an epoch, if the data set says how long it is. With several workers an estimate, as torch's: who reads what is their matter."""
        rows = self.samples()
        if rows is None:
            return super().length()
        layout = self.context.current_layout()
        full, rest = divmod(rows, layout.round_rows)
        if not rest or layout.drop_last:
            return full
        return full + (cut_round(rest, layout).received[self._place] > 0)

    def samples(self) -> int | None:  # noqa: D102
        try:
            return len(self.context.dataset)
        except (TypeError, NotImplementedError):
            return None

    @property
    def _place(self) -> int:
        return self.context.ranks.index

    def open(self, skip: int | None) -> Pairs:  # noqa: D102
        context, progress = self.context, self.context.progress
        layout = context.current_layout()
        skip = progress.skip_to(skip)
        if self._stream.set_layout(self._stream_layout(layout)):
            context.reader.forget_workers()
        if skip is not None:
            progress.taken = skip
            progress.streams = self._positions_of_skip(skip, layout)
        before = progress.layout or layout.to_dict()
        self._check(before, layout)
        progress.resize(layout.to_dict())
        start = progress.taken
        if context.channel is not None and context.ranks.index > 0:
            return self.deliver(follow(context.channel), start)
        packets = self._packets(self._resume(before))
        if context.channel is not None:
            steps = self._steps(packets, layout)
            return self.deliver(serve(context.channel, steps, ahead=bool(context.config.prefetch)), start)
        return self._local(packets, layout, start)

    def _stream_layout(self, layout: Layout) -> Layout:
        """How this rank's stream is cut."""
        return layout

    def _check(self, before: dict[str, Any], layout: Layout) -> None:
        """A position inside a stream is one of so many workers."""
        workers = self._workers()
        for position in self.context.progress.streams.values():
            if position["workers"] != workers:
                raise CheckpointError(
                    f"The loader over {type(self.context.dataset).__name__} was saved inside an epoch with num_workers="
                    f"{position['workers']}, and now has {workers}: its workers' streams differ. Resume with the same number, or call set_epoch()."
                )

    def _workers(self) -> int:
        return self.context.reader.source.num_workers

    # -- reading -----------------------------------------------------------------------------------------------------------

    def _seed(self) -> int:
        progress = self.context.progress
        seed = derive_seed(progress.seed, progress.epoch)
        return seed if self.common_seed else derive_seed(seed, WORKERS + self.context.ranks.index)

    def _positions_of_skip(self, skip: int, layout: Layout) -> dict[str, dict[str, Any]]:
        """Where workers are after so many rounds, if none has ended by then."""
        workers = max(self._workers(), 1)
        rounds = [skip // workers + (w < skip % workers) for w in range(workers)]
        size = self._stream_layout(layout).round_rows
        return {str(w): asdict(StreamPosition(self._workers(), n, n * size)) for w, n in enumerate(rounds) if n}

    def _resume(self, before: dict[str, Any]) -> Resume | None:
        context, progress = self.context, self.context.progress
        if not progress.streams:
            return None
        positions = {int(w): StreamPosition(**p) for w, p in progress.streams.items()}
        rounds = sum(p.rounds for p in positions.values())
        workers = max(self._workers(), 1)
        by_state = has_state(context.dataset) and all(p.state is not None for p in positions.values())
        if not by_state and not self._warned and (context.ranks.index == 0 or not self.common_seed):
            self._warned = True
            warnings.warn(
                f"{type(context.dataset).__name__} has no state_dict() and load_state_dict(): {sum(p.rows for p in positions.values())} samples are "
                "read and dropped to come back to the position. Give it both methods to resume at once.",
                stacklevel=2,
            )
        seeded = context.config.seed_batches is not False
        return Resume(
            positions,
            self._seed() if seeded else None,
            self._stream_layout(Layout(**before)).round_rows,
            rounds % workers if workers > 1 else 0,
        )

    def _packets(self, resume: Resume | None) -> Iterator[Packet]:
        """The stream's rounds, from where it was left."""
        reader = self.context.reader
        seed = self._seed()
        first = 0
        if resume is not None or self._stream.is_pipe:
            reader.forget_workers()  # persistent ones wouldn't see where to begin, or the epoch's seed
        if resume is not None:
            first = sum(p.rounds for p in resume.positions.values()) - resume.first_worker
        self._stream.resume = resume
        self._stream.epoch_seed = seed
        requests = (([0], batch_seed(seed, number)) for number in count(first))
        packets = reader.read(requests, derive_seed(seed, WORKERS))
        for packet in packets:
            self._stream.resume = None  # by now it was used, or copied to the workers
            if not holds_place(packet):
                yield packet
        self._stream.resume = None

    def note(self, note: Any) -> None:
        """Take down a round that was handed out."""
        if note is None:
            return
        worker, rows, state = note
        streams = self.context.progress.streams
        position = streams.get(str(worker))
        if position is None:
            position = streams[str(worker)] = asdict(StreamPosition(self._workers()))
        position["rounds"] += 1
        position["rows"] += rows
        position["state"] = state

    # -- handing out -------------------------------------------------------------------------------------------------------

    def _local(self, packets: Iterator[Packet], layout: Layout, index: int) -> Pairs:
        full = Round(layout.shares, layout.shares, layout.shares)
        rank = self.context.ranks.index
        roll = _Roll(self.context, index, until_one_ends=True)
        try:
            packet, failure = ahead_of(packets)
            roll.ask(packet, failure)
            while packet is not END:
                counts = roll.answers()
                roll.require_all()
                ended = self._ended(counts, packet[1], layout)
                worker, rows, state, payload = packet
                packet, failure = ahead_of(packets)
                roll.ask(packet, failure)
                cut = _without(round_of(rows, layout, full), ended)
                self.note((worker, rows, state))
                is_last = packet is END and failure is None
                yield payload, self.describe(payload, BatchInfo(index, cut.rows[rank], cut.rows, is_last, cut))
                index += 1
            if failure is not None:
                raise failure
            counts = roll.answers()
            roll.require_all()
            self._ended(counts, 0, layout)
        finally:
            roll.finish()

    def _ended(self, counts: Sequence[int], mine: int, layout: Layout) -> tuple[int, ...]:
        """The ranks whose streams have ended, by each rank's samples of the present round.

        Raises:
            DistributedOperationError: If streams differ that must not.
        """
        if layout.even != "none" and any(count != mine for count in counts):
            rank = next(rank for rank, count in enumerate(counts) if count != mine)
            raise DistributedOperationError(
                f"Ranks read different streams of {type(self.context.dataset).__name__}: where rank {self.context.ranks.index} has {mine} more "
                f"samples, rank {rank} has {counts[rank]}. Every rank must read the same stream, of which it keeps its part; dispatch_batches=True "
                "lets rank 0 read for all."
            )
        return tuple(rank for rank, count in enumerate(counts) if count == 0)

    def _steps(self, packets: Iterator[Packet], layout: Layout) -> Iterator[Step]:
        full = Round(layout.shares, layout.shares, layout.shares)
        slice_fn = self.context.slice_fn
        for worker, rows, state, payload in packets:
            cut = round_of(rows, layout, full)
            parts = (
                payload if slice_fn is None or self.context.reads_items else cut_batch(payload, cut.received, slice_fn)
            )
            yield Step(list(parts), cut, (worker, rows, state))


class ShardedStreamFeed(StreamFeed):
    """Each rank has a stream of its own (``dataset.shard(n, rank)``).

    How long the others' streams are is known to nobody, so with ``even_batches`` the ranks exchange one number per batch: a rank whose
    stream has ended gets its last batch again, with no weight, until all have ended.
    """

    common_seed = False

    def length(self) -> int:  # noqa: D102
        return Feed.length(self)

    def samples(self) -> int | None:  # noqa: D102
        return None

    def _local(self, packets: Iterator[Packet], layout: Layout, index: int) -> Pairs:
        if layout.even == "none":
            return self._alone(packets, index)
        return self._together(packets, layout, index)

    def _alone(self, packets: Iterator[Packet], index: int) -> Pairs:
        roll = _Roll(self.context, index, until_one_ends=True)
        try:
            packet, failure = ahead_of(packets)
            roll.ask(packet, failure)
            while packet is not END:
                counts = roll.answers()
                roll.require_all()
                ended = tuple(rank for rank, count in enumerate(counts) if count == 0)
                worker, rows, state, payload = packet
                packet, failure = ahead_of(packets)
                roll.ask(packet, failure)
                self.note((worker, rows, state))
                yield payload, BatchInfo(index, rows, None, packet is END and failure is None, None, ended)
                index += 1
            if failure is not None:
                raise failure
        finally:
            roll.finish()

    def _together(self, packets: Iterator[Packet], layout: Layout, index: int) -> Pairs:
        ranks = self.context.ranks
        ranks.require()
        roll = _Roll(self.context, index, until_one_ends=False)
        last: Any = None
        received = (0,) * ranks.size
        try:
            packet, failure = ahead_of(packets)
            roll.ask(packet, failure)
            counts = roll.answers()
            while max(counts) > 0 and FAILED not in counts:
                received = self._received(counts, received, layout)
                new = tuple(counts)
                if packet is not END:
                    worker, rows, state, last = packet
                    self.note((worker, rows, state))
                    packet, failure = ahead_of(packets)
                roll.ask(packet, failure)
                counts = roll.answers()
                weights = received if layout.even == "repeat" else new
                info = BatchInfo(index, weights[ranks.index], weights, max(counts) == 0, Round(weights, new, received))
                yield last, self.describe(last, info)
                index += 1
            if failure is not None:
                raise failure
            roll.require_all()
        finally:
            roll.finish()

    def _received(self, counts: list[int], before: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        """Samples in each rank's batch: its last one's again, where it has no other."""
        received = tuple(n or old for n, old in zip(counts, before, strict=True))
        if 0 in received:
            raise DistributedOperationError(
                f"The shard of rank {received.index(0)} is empty, so it has no batch for a step that the others make. "
                "Use at least as many shards as ranks, or even_batches=False."
            )
        return layout.shares if layout.even == "repeat" else received

    def _stream_layout(self, layout: Layout) -> Layout:
        return replace(layout, world=1, round_rows=layout.shares[self.context.ranks.index])

    def _check(self, before: dict[str, Any], layout: Layout) -> None:
        super()._check(before, layout)
        if self.context.progress.streams and before["world"] != layout.world:
            raise CheckpointError(
                f"The loader was saved inside an epoch on {before['world']} ranks, each with shards of its own, and now there are {layout.world}. "
                "Resume at the same number, or call set_epoch() to start an epoch; dispatch_batches=True can be resized."
            )


def _without(cut: Round, ended: tuple[int, ...]) -> Round:
    """A round of which some ranks get nothing."""
    if not ended or not any(cut.received[rank] for rank in ended):
        return cut
    rows, new, received = (
        tuple(0 if rank in ended else count for rank, count in enumerate(counts))
        for counts in (cut.rows, cut.new, cut.received)
    )
    return Round(rows, new, received)


class _Roll:
    """An epoch's roll call; nobody is asked where there are no other ranks.

    Args:
        context: Of the loader.
        index: The epoch's next batch.
        until_one_ends: Whether ranks stop asking when the first stream has ended: its rank has left the loop, and the others know.
    """

    def __init__(self, context: Context, index: int, *, until_one_ends: bool) -> None:
        self._roll = context.roll
        self._epoch = context.progress.epoch
        self._next = index
        self._until_one_ends = until_one_ends
        self._counts: list[int] = []
        self._question: Question | None = None

    def ask(self, packet: Any, failure: Exception | None) -> None:
        """Say what this rank has next."""
        if self._roll is not None:
            samples = FAILED if failure is not None else 0 if packet is END else packet[1]
            self._question = self._roll.ask(self._epoch, self._next, samples)
            self._next += 1

    def answers(self) -> list[int]:
        """Every rank's samples, as far as they were asked."""
        question, self._question = self._question, None
        if question is not None:
            self._counts = question.answers()
            if self._until_one_ends and 0 in self._counts:
                self._roll = None
        return self._counts

    def require_all(self) -> None:
        """Raise if one of the others can't read.

        Raises:
            DistributedOperationError: With its rank.
        """
        if FAILED in self._counts:
            raise DistributedOperationError(
                f"Reading data failed on rank {self._counts.index(FAILED)}. Look at that rank's output for the error."
            )

    def finish(self) -> None:
        """The loop is left: hear what was still asked."""
        question, self._question = self._question, None
        if question is not None and self._roll is not None:
            try:
                question.answers()
            except DistributedOperationError as error:
                self._roll.failure = error
