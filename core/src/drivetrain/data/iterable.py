"""Iterable data sets, read in rounds: what one step takes from the stream for all ranks, cut into the ranks' batches before collation.

Cutting samples instead of collated batches works for any structure, and a last round can be divided evenly whatever its size.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from drivetrain.data.batch import Round
from drivetrain.data.plan import Layout, cut_round
from drivetrain.data.seeding import batch_seed, seed_generators

__all__ = [
    "Packet",
    "RoundStream",
    "Resume",
    "StreamPosition",
    "WorkerSetup",
    "has_state",
    "holds_place",
    "round_of",
    "take_payload",
]

#: One round as it leaves the stream: worker, rows read for it, the data set's state after it, and what was made of it. A plain tuple, so that
#: it passes through pinning as it is.
Packet = tuple[int, int, Any, Any]

#: The payload of a worker that only holds its place in the order of workers.
_PLACE_HELD = ("drivetrain: place held",)


@dataclass(slots=True)
class StreamPosition:
    """Where one worker's stream is.

    Args:
        workers: Number of workers, 0 for this process.
        rounds: Rounds that were received from it.
        rows: Samples in them.
        state: The data set's state after them, if it has one.

    Example:
        >>> StreamPosition(workers=0, rounds=2, rows=8).rows
        8
    """

    workers: int
    rounds: int = 0
    rows: int = 0
    state: Any = None


@dataclass(slots=True)
class Resume:
    """How a stream starts inside an epoch.

    Args:
        positions: By worker.
        epoch_seed: What the seeds of the batches skipped came from; None if batches aren't seeded.
        round_rows: Samples of the rounds skipped.
        first_worker: The worker whose turn it is: those before it hold their place.
    """

    positions: dict[int, StreamPosition] = field(default_factory=dict)
    epoch_seed: int | None = None
    round_rows: int = 1
    first_worker: int = 0


def has_state(dataset: Any) -> bool:
    """Whether a data set can tell where it is and go back there.

    Example:
        >>> has_state([1, 2])
        False
    """
    return callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))


def round_of(rows: int, layout: Layout, full: Round) -> Round:
    """What the ranks get of a round with so many rows."""
    return full if rows == layout.round_rows else cut_round(rows, layout)


class RoundStream(IterableDataset[Packet]):
    """The user's iterable data set as a stream of rounds. Lives in the worker, or in this process without workers.

    Args:
        dataset: The user's.
        layout: How rounds are cut.
        rank: Whose batch to make; None for those of all ranks (dispatching).
        collate: The user's ``collate_fn``.
        whole: Collate the round as one batch instead, to be cut later (``slice_fn_for_dispatch``).

    Example:
        >>> layout = Layout(unit="samples", world=2, round_rows=4, even="split")
        >>> stream = RoundStream([0, 1, 2, 3, 4, 5, 6], layout, rank=1, collate=list)
        >>> [(rows, payload) for worker, rows, state, payload in stream]
        [(4, [2, 3]), (3, [6])]
    """

    def __init__(
        self,
        dataset: Any,
        layout: Layout,
        *,
        rank: int | None,
        collate: Callable[[Any], Any],
        whole: bool = False,
    ) -> None:
        self.dataset = dataset
        self._rank = rank
        self._collate = collate
        self._whole = whole
        #: Set before an iteration, used up by it.
        self.resume: Resume | None = None
        #: Set before an iteration: what the random pipes of a DataPipe are seeded with.
        self.epoch_seed = 0
        self._layout = layout
        self._full = Round(layout.shares, layout.shares, layout.shares)

    def set_layout(self, layout: Layout) -> bool:
        """How the next iteration's rounds are cut. Workers that live on from an earlier one don't notice.

        Returns:
            Whether it has changed.
        """
        changed = layout != self._layout
        self._layout = layout
        self._full = Round(layout.shares, layout.shares, layout.shares)
        return changed

    def __iter__(self) -> Iterator[Packet]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        resume, self.resume = self.resume, None
        rows = self._rows(worker, 1 if info is None else info.num_workers, resume)
        if resume is not None and worker < resume.first_worker:
            yield worker, 0, None, _PLACE_HELD
        stateful = has_state(self.dataset)
        first: list[Any] = []
        while chunk := list(islice(rows, self._layout.round_rows)):
            count = len(chunk)
            if count < self._layout.round_rows and self._layout.drop_last:
                return
            first = first or chunk
            payload = self._payload(chunk, first)
            if payload is None:
                return
            state = copy.deepcopy(self.dataset.state_dict()) if stateful else None
            yield worker, count, state, payload[0]

    def _rows(self, worker: int, workers: int, resume: Resume | None) -> Iterator[Any]:
        """The user's samples, from where the stream was left."""
        self._set_up_pipes(worker, workers)
        position = None if resume is None else resume.positions.get(worker)
        if resume is None or position is None:
            return iter(self.dataset)
        if position.state is not None and has_state(self.dataset):
            self.dataset.load_state_dict(position.state)
            return iter(self.dataset)
        rows: Iterator[Any] | None = None
        left = position.rows
        for number in range(position.rounds + 1):  # each round under its own seed, as when it was read
            if resume.epoch_seed is not None:
                seed_generators(batch_seed(resume.epoch_seed, number * workers + worker))
            rows = iter(self.dataset) if rows is None else rows
            skip = min(resume.round_rows, left) if number < position.rounds - 1 else left
            left -= skip
            deque(islice(rows, skip), maxlen=0)
        assert rows is not None
        return rows

    @property
    def is_pipe(self) -> bool:
        """Whether the data set is a DataPipe, which must be told each epoch's seed."""
        return isinstance(self.dataset, IterDataPipe)

    def _set_up_pipes(self, worker: int, workers: int) -> None:
        """What torch's loader does for a DataPipe, except for ranks: these divide its rounds.

        ``sharding_filter`` divides it over workers, and shuffling pipes draw the same order in all of them.
        """
        if self.is_pipe:
            apply_sharding(self.dataset, workers, worker)
            apply_random_seed(self.dataset, torch.Generator().manual_seed(self.epoch_seed))

    def _payload(self, chunk: list[Any], first: list[Any]) -> tuple[Any] | None:
        """What this rank, or all ranks, get of a round; None if the rank whose batch it is gets none."""
        layout = self._layout
        cut = round_of(len(chunk), layout, self._full)
        if self._whole:
            return (self._collate(self._filled(chunk, first, cut)),)
        ranks = range(layout.world) if self._rank is None else [self._rank]
        parts = [self._part(chunk, first, cut, rank) for rank in ranks]
        if self._rank is None:
            return ([self._made(part) for part in parts],)
        return (self._made(parts[0]),) if parts[0] else None

    def _made(self, part: list[Any]) -> Any:
        if not part:
            return None
        return self._collate(part[0] if self._layout.unit == "items" else part)

    def _part(self, chunk: list[Any], first: list[Any], cut: Round, rank: int) -> list[Any]:
        start = sum(cut.new[:rank])
        part = chunk[start : start + cut.new[rank]]
        missing = cut.received[rank] - len(part)
        if missing and self._layout.even == "repeat":
            before = sum(r - n for r, n in zip(cut.received[:rank], cut.new[:rank], strict=True))
            return part + [first[(before + i) % len(first)] for i in range(missing)]
        return part + [chunk[-1]] * missing

    def _filled(self, chunk: list[Any], first: list[Any], cut: Round) -> list[Any]:
        if self._layout.even != "repeat":
            return chunk
        return chunk + [first[i % len(first)] for i in range(sum(cut.received) - len(chunk))]


def take_payload(packets: list[Any]) -> Any:
    """The ``collate_fn`` of a stream's loader: each "batch" is one round that was collated in the stream."""
    return packets[0]


def holds_place(packet: Packet) -> bool:
    """Whether a packet is no data but a worker waiting for its turn."""
    payload = packet[3]
    return isinstance(payload, (tuple, list)) and len(payload) == 1 and payload[0] == _PLACE_HELD[0]


class WorkerSetup:
    """The ``worker_init_fn`` of a stream's loader: ``get_worker_info().dataset`` is the user's data set, then the user's own function runs.

    Args:
        function: The user's, or None.
    """

    def __init__(self, function: Callable[[int], None] | None) -> None:
        self._function = function

    def __call__(self, worker: int) -> None:  # noqa: D102
        from torch.utils.data._utils import worker as module

        info = module._worker_info
        assert info is not None
        stream: Any = info.dataset
        module._worker_info = module.WorkerInfo(
            id=info.id, num_workers=info.num_workers, seed=info.seed, dataset=stream.dataset
        )
        if self._function is not None:
            self._function(worker)
