"""The prepared loader: the user's DataLoader, giving each rank its part."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

from drivetrain.data.batch import BatchInfo, WindowPlan
from drivetrain.data.feeds import Context, Feed, Pairs
from drivetrain.data.placement import Placement
from drivetrain.data.random import synchronize_rng_states
from drivetrain.data.reader import END, ahead_of
from drivetrain.data.stack import LoaderStack
from drivetrain.errors import UnsupportedError
from drivetrain.parallel.structure import ignorant_find_batch_size

__all__ = ["LoaderParts", "PreparedDataLoader", "make_prepared", "skip_first_batches"]

T_co = TypeVar("T_co", covariant=True)


@dataclass(slots=True)
class LoaderParts:
    """What a prepared loader is made of.

    Args:
        context: Shared by the feeds.
        feed: Reads epochs.
        placement: Moves batches.
        stack: Where the engine finds the active loader.
        rng_types: Generators made equal on all ranks when an epoch starts.
        group: The processes that these generators are made equal on.
        whole_class: Whether batches come from the user's class, which has an ``__iter__`` of its own.
        state_per_rank: Whether ranks have different states.
    """

    context: Context
    feed: Feed
    placement: Placement
    stack: LoaderStack
    rng_types: tuple[str, ...]
    group: dist.ProcessGroup | None
    whole_class: bool = False
    state_per_rank: bool = False


class PreparedDataLoader(DataLoader[T_co]):
    """A DataLoader that yields this rank's batches, on its device, and knows its position.

    Made by ``prepare()``. It is the user's loader with all of its attributes (``dataset``, ``batch_size``, ``sampler``, ``collate_fn``, ...) and,
    for a subclass of DataLoader, an instance of that subclass too. Each iteration is one epoch: 0, 1, ..., unless `set_epoch` says otherwise.

    Attributes:
        batch: What is known about the batch being processed; None outside of a loop.
        epoch: The epoch being read, or read next.

    Example:
        >>> from drivetrain.data import prepare_data_loader
        >>> loader = prepare_data_loader(DataLoader(range(5), batch_size=2))
        >>> [(batch.tolist(), loader.batch.rows, loader.batch.is_last) for batch in loader]
        [([0, 1], 2, False), ([2, 3], 2, False), ([4], 1, True)]
        >>> len(loader), loader.epoch, loader.batch is None
        (3, 1, True)
    """

    batch: BatchInfo | None = None
    _drivetrain: LoaderParts
    _skip: int | None = None
    _ended = False
    # torch keeps the iterator of persistent workers here; ours is kept by the inner loader, so a subclass's __iter__ must always ask for it.
    _iterator = property(lambda self: None, lambda self, value: None)

    # -- iterating ---------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        parts = self._drivetrain
        stack, progress = parts.stack, parts.context.progress
        attributes = self.__dict__  # DataLoader checks each assignment; this is the hot path
        skip = self._skip
        run = progress.begin()
        parts.context.tell_epoch(progress.epoch)
        self._synchronize()
        feed = self._pairs(skip)
        place = parts.placement.move if parts.placement.device is not None else None
        if parts.placement.is_idle and self.collate_fn is default_collate and not parts.whole_class:
            place = None  # plain tensors, on the CPU; what others make may have a `to` of its own
        if parts.placement.overlaps:
            feed, place = parts.placement.overlapped(feed), None
        attributes["_ended"] = False
        guard = stack.guard if parts.context.config.even_batches is False else None
        try:
            for batch, info in feed:
                if guard is not None and info.absent:
                    guard.watch(self)
                    guard = None
                if place is not None:
                    batch = place(batch)
                attributes["batch"] = info
                if progress.run == run:
                    progress.taken = info.index + 1
                if stack.active is not self:
                    stack.enter(self)
                yield batch
                if stack.after_batch is not None:
                    stack.after_batch()
            progress.finish(run)
            attributes["_ended"] = True
        finally:
            attributes["batch"] = None
            attributes["_skip"] = None
            stack.leave(self)
            if stack.guard is not None:
                stack.guard.release(self)
            feed.close()  # type: ignore[attr-defined]

    def _pairs(self, skip: int | None) -> Pairs:
        parts = self._drivetrain
        if not parts.whole_class:
            return parts.feed.open(skip)
        return self._of_whole_class(skip)

    def _of_whole_class(self, skip: int | None) -> Pairs:
        """Batches of a subclass that makes them itself: how many, and of which size, is known when they come."""
        progress = self._drivetrain.context.progress
        start = progress.taken if skip is None else skip
        progress.taken, progress.segments, progress.streams, progress.layout = 0, [], {}, None
        if start:
            warnings.warn(
                f"{type(self).__name__} makes its batches in an __iter__ of its own: {start} are made and dropped to come back to the position.",
                stacklevel=2,
            )
        batches = iter(super().__iter__())
        for _ in range(start):
            next(batches, END)
        index = start
        batch, failure = ahead_of(batches)
        while batch is not END:
            present = batch
            batch, failure = ahead_of(batches)
            yield (
                present,
                BatchInfo(index, ignorant_find_batch_size(present), None, batch is END and failure is None, None),
            )
            index += 1
        if failure is not None:
            raise failure

    def _get_iterator(self) -> Any:
        """What DataLoader's ``__iter__`` returns: here only reached through a subclass's own ``__iter__``."""
        return (batch for batch, _ in self._drivetrain.feed.open(None))

    def _synchronize(self) -> None:
        parts = self._drivetrain
        kinds = [k for k in parts.rng_types if k != "generator" or isinstance(self.generator, torch.Generator)]
        if kinds:
            synchronize_rng_states(kinds, self.generator, group=parts.group)

    # -- what the engine asks, per batch -----------------------------------------------------------------------------------

    def plan_window(self, size: int) -> WindowPlan | None:
        """The accumulation window that starts with the present batch.

        Args:
            size: Micro-batches of a full window.

        Returns:
            None if the loader's length isn't known up front, or outside of a loop.

        Example:
            >>> from drivetrain.data import prepare_data_loader
            >>> loader = prepare_data_loader(DataLoader(range(5), batch_size=2))
            >>> [loader.plan_window(2) for _ in loader][::2]
            [WindowPlan(size=2, global_rows=4), WindowPlan(size=1, global_rows=1)]
        """
        info = self.batch
        if info is None or self._drivetrain.whole_class:
            return None
        return self._drivetrain.feed.window(info, size)

    def samples_of(self, batch: BatchInfo) -> list[Any] | None:
        """Indices in the data set of a batch of the epoch being read; None where they aren't known.

        Example:
            >>> from drivetrain.data import prepare_data_loader
            >>> loader = prepare_data_loader(DataLoader(range(5), batch_size=2))
            >>> [loader.samples_of(loader.batch) for _ in loader]
            [[0, 1], [2, 3], [4]]
        """
        return None if self._drivetrain.whole_class else self._drivetrain.feed.samples_of(batch)

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the present batch is the last, or the last loop was exhausted."""
        return self._ended if self.batch is None else self.batch.is_last

    @property
    def remainder(self) -> int:
        """Samples of the last global batch if it isn't a full one, 0 if it is, -1 if unknown."""
        parts = self._drivetrain
        if self.batch is not None and self.batch.is_last and self.batch.round is not None:
            new = sum(self.batch.round.new)
            return new % self.total_batch_size if self.total_batch_size else new
        samples = parts.feed.samples()
        if samples is None or not self.total_batch_size:
            return -1
        return 0 if parts.context.layout.drop_last else samples % self.total_batch_size

    # -- size --------------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches that an epoch has on this rank.

        Raises:
            TypeError: If it isn't known before.
        """
        parts = self._drivetrain
        if parts.whole_class and _own_length(type(self)):
            length = super().__len__()
        else:
            length = parts.feed.length()
        return length if self._skip is None else max(length - self._skip, 0)

    @property
    def _index_sampler(self) -> Any:
        """What DataLoader's own ``__len__`` measures, which a subclass may call: this rank's share."""
        return range(self._drivetrain.feed.length())

    @property
    def total_batch_size(self) -> int:
        """Samples of a global batch; 0 if the loader's batches have no one size."""
        return self._drivetrain.context.layout.round_rows

    @property
    def total_dataset_length(self) -> int:
        """Samples of the data set."""
        return len(self.dataset)  # type: ignore[arg-type]

    @property
    def even_batches(self) -> bool | str:
        """As `DataLoaderConfiguration.even_batches`; a new value holds from the next iteration on."""
        return self._drivetrain.context.config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool | str) -> None:
        config = self._drivetrain.context.config
        before, config.even_batches = config.even_batches, value  # type: ignore[assignment]
        try:
            config.validate()
        except BaseException:
            config.even_batches = before
            raise

    # -- position ----------------------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch being read, or read next."""
        return self._drivetrain.context.progress.epoch

    @property
    def resumes(self) -> bool:
        """Whether the next iteration starts at a position inside an epoch that was loaded."""
        return self._drivetrain.context.progress.resumes

    def set_epoch(self, epoch: int) -> None:
        """The next iteration reads this epoch. A position inside it that was loaded is kept.

        Example:
            >>> from drivetrain.data import prepare_data_loader
            >>> loader = prepare_data_loader(DataLoader(range(8), shuffle=True))
            >>> first = [b.item() for b in loader]
            >>> loader.set_epoch(0)
            >>> first == [b.item() for b in loader]
            True
        """
        self._drivetrain.context.progress.set_epoch(epoch)
        inherited = getattr(super(), "set_epoch", None)
        if callable(inherited):
            inherited(epoch)
        self._drivetrain.context.tell_epoch(epoch)

    @property
    def state_per_rank(self) -> bool:
        """Whether each rank's `state_dict` must be saved; else rank 0's is that of all."""
        return self._drivetrain.state_per_rank

    def state_dict(self) -> dict[str, Any]:
        """Position and seed as plain data. Counts what the training loop received, not what was read ahead.

        Example:
            >>> from drivetrain.data import prepare_data_loader
            >>> loader = prepare_data_loader(DataLoader(range(8), batch_size=2))
            >>> for batch in loader:
            ...     if loader.batch.index == 1:
            ...         break
            >>> again = prepare_data_loader(DataLoader(range(8), batch_size=2))
            >>> again.load_state_dict(loader.state_dict())
            >>> [batch.tolist() for batch in again]
            [[4, 5], [6, 7]]
        """
        context = self._drivetrain.context
        state = context.progress.to_dict()
        if state["layout"] is None:
            state["layout"] = context.current_layout().to_dict()
        return {**state, "generators_used": sorted(context.reader.seeder.used)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on where the state was saved, at this or another world size. Reads nothing.

        Raises:
            CheckpointError: If it isn't a loader's state.
        """
        context = self._drivetrain.context
        context.progress.load(state_dict)
        context.reader.seeder.used.update(state_dict.get("generators_used", ()))
        if context.config.keep_global_batch:
            self._keep_global_batch()

    def _keep_global_batch(self) -> None:
        context = self._drivetrain.context
        saved = context.progress.layout
        if saved is None or saved["round_rows"] == context.layout.round_rows:
            return
        if context.layout.unit != "samples" or saved["round_rows"] < context.layout.world:
            raise UnsupportedError(
                f"keep_global_batch=True can't divide global batches of {saved['round_rows'] or 'varying size'} over {context.layout.world} ranks. "
                "Set it to False to keep the size per rank."
            )
        context.layout = context.layout.with_round(saved["round_rows"])

    def __reduce__(self) -> Any:
        raise TypeError(
            "A prepared loader belongs to its process and its process group: pickle the loader that was prepared."
        )


def _own_length(cls: type) -> bool:
    """Whether the user's class measures its length itself."""
    user: Any = cls.__mro__[2]
    return user.__len__ is not DataLoader.__len__


def make_prepared(loader: DataLoader[Any], parts: LoaderParts) -> PreparedDataLoader[Any]:
    """The prepared loader, with the user's attributes and, of a subclass, its methods."""
    cls = type(loader)
    made: Any = PreparedDataLoader
    if cls is not DataLoader:
        made = type(f"Prepared{cls.__name__}", (PreparedDataLoader, cls), {"__module__": cls.__module__})
    prepared: PreparedDataLoader[Any] = object.__new__(made)
    prepared.__dict__.update({k: v for k, v in loader.__dict__.items() if k != "_iterator"})
    prepared.__dict__["_drivetrain"] = parts
    return prepared


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """The loader without the first batches of the epoch that it reads next; afterwards it yields whole epochs again.

    Nothing of what is skipped is read, for map-style data sets. The loader given isn't changed, but shares its position with the one returned.

    Args:
        dataloader: A loader, prepared or not.
        num_batches: Batches of this rank to leave out, counted from the start of the epoch.

    Example:
        >>> loader = skip_first_batches(DataLoader(range(6), batch_size=2), 2)
        >>> [b.tolist() for b in loader], [b.tolist() for b in loader]
        ([[4, 5]], [[0, 1], [2, 3], [4, 5]])
    """
    if not isinstance(dataloader, PreparedDataLoader):
        from drivetrain.data.prepare import prepare_data_loader

        dataloader = prepare_data_loader(dataloader)
    view: PreparedDataLoader[Any] = object.__new__(type(dataloader))
    view.__dict__.update(dataloader.__dict__)
    view.__dict__.update(_skip=num_batches, batch=None)
    return view
