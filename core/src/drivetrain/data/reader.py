"""Reading batches from torch's loader: by workers, or in this process with seeded generators."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from drivetrain.data.samplers import IndexSource
from drivetrain.data.seeding import BatchSeeder, Seeded

__all__ = ["END", "SourceReader", "ahead_of"]

#: What `ahead_of` returns when there is nothing more.
END: Any = object()


class SourceReader:
    """Reads batches from torch's loader by indices and seeds.

    Args:
        source: A plain DataLoader over ``index_source``.
        index_source: Its (batch) sampler.
        seeder: Seeds in this process, where there are no workers.
        seeds_workers: Whether indices carry their batch's seed to the workers.
    """

    def __init__(
        self, source: DataLoader[Any], index_source: IndexSource, seeder: BatchSeeder, *, seeds_workers: bool
    ) -> None:
        self.source = source
        self.seeder = seeder
        self._index_source = index_source
        self._seeds_workers = seeds_workers
        #: Whether the user's own iteration wraps this one, perhaps in a thread of its own.
        self.may_thread = False

    @property
    def has_workers(self) -> bool:
        """Whether batches are read by other processes."""
        return self.source.num_workers > 0

    def read(self, requests: Iterator[tuple[Any, int]], seed: int) -> Iterator[Any]:
        """Yield one batch per request.

        Args:
            requests: Indices and the batch's seed.
            seed: For the workers' base seed.
        """
        if not self.has_workers:
            return self._read_here(requests, seed)
        self._seed_source(seed)
        seeded = self._seeds_workers
        self._index_source.indices = (Seeded(i, s) if seeded else i for i, s in requests)
        return iter(self.source)

    def open_here(self, seed: int) -> tuple[Callable[[Any], None], Callable[[], Any]]:
        """Two functions: one takes a batch's indices, the other then reads it, in this process, with whatever seeds are set."""
        self._seed_source(seed)
        box: list[Any] = []
        self._index_source.indices = iter(box.pop, END)
        self.seeder.start()
        return box.append, iter(self.source).__next__

    def _read_here(self, requests: Iterator[tuple[Any, int]], seed: int) -> Iterator[Any]:
        put, fetch = self.open_here(seed)
        read = self.seeder.read
        home = threading.get_ident() if self.may_thread else None
        for indices, number in requests:
            put(indices)
            try:
                if home is None or home == threading.get_ident():
                    batch = read(fetch, number)
                else:  # generators belong to the process: another thread must not seed them under the training loop
                    batch = fetch()
            except StopIteration:
                return
            yield batch

    def _seed_source(self, seed: int) -> None:
        generator: Any = self.source.generator
        generator.manual_seed(seed)

    def forget_workers(self) -> None:
        """Persistent workers start anew, with what is set now."""
        self.source._iterator = None


def ahead_of(batches: Iterator[Any]) -> tuple[Any, Exception | None]:
    """The next batch, read before the present one is handed out: its failure must not cost the present one."""
    try:
        return next(batches, END), None
    except Exception as error:
        return END, error
