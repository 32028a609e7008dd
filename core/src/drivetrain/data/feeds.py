"""One epoch of a loader, as pairs of a batch and what is known about it.

A *feed* reads: from a map-style data set by a plan, from a sampler without an end, from an iterable data set in rounds; here, or on rank 0 for
all. It keeps the position up to date with what it hands out. Placement, the stack of loaders and the user's view are the loader's job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from drivetrain.data.batch import BatchInfo, WindowPlan
from drivetrain.data.config import DataLoaderConfiguration
from drivetrain.data.dispatch import Channel, Delivery
from drivetrain.data.plan import Layout
from drivetrain.data.ranks import Ranks
from drivetrain.data.reader import SourceReader
from drivetrain.data.rollcall import RollCall
from drivetrain.data.state import Progress
from drivetrain.interfaces.data_sharding import DataSharding
from drivetrain.parallel.structure import ignorant_find_batch_size, slice_tensors

__all__ = ["WORKERS", "Context", "Feed", "Pairs", "cut_batch"]

Pairs = Iterator[tuple[Any, BatchInfo]]

#: The stream of `derive_seed` for workers' base seeds; those of batches start with smaller numbers.
WORKERS = 2**61


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
        roll: Where ranks that read streams tell each other whether they have another batch.
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
    roll: RollCall | None = None

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

    def samples_of(self, info: BatchInfo) -> list[Any] | None:
        """Indices in the data set of this rank's batch; None where they aren't known."""
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


def cut_batch(batch: Any, sizes: tuple[int, ...], slice_fn: Callable[..., Any] | None) -> list[Any]:
    """Cut a collated batch into the ranks' parts of these sizes, with the user's function or by rows."""
    cut = slice_tensors if slice_fn is None else slice_fn
    parts, start = [], 0
    for rank, size in enumerate(sizes):
        rows = slice(start, start + size)
        parts.append(cut(batch, rows, process_index=rank, num_processes=len(sizes)) if size else None)
        start += size
    return parts
