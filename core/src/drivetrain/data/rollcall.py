"""Ranks that read streams tell each other, batch by batch, whether they have another one.

How long a stream is shows only when it ends. A rank whose stream ended early would leave the others waiting in their next collective for ever;
so each rank's word about its next batch travels while the present one is computed on, on a group of its own that no device waits for.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.data.ranks import Ranks
from drivetrain.errors import DistributedOperationError
from drivetrain.parallel._groups import describe_failure

__all__ = ["FAILED", "RollCall"]

#: The word of a rank that can't read its next batch.
FAILED = -1


class RollCall:
    """One question at a time: how many samples has each rank's next batch?

    Args:
        ranks: All ranks.
        group: A gloo group of them.
        loader: Number of the loader, equal on all ranks.
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup, loader: int) -> None:
        self._ranks = ranks
        self._group = group
        self._loader = loader
        self._place: tuple[int, int] = (0, 0)
        self._answers = torch.empty(0, dtype=torch.int64)
        self._work: Any = None

    def ask(self, epoch: int, batch: int, samples: int) -> None:
        """Say what this rank has next, and begin to hear the others.

        Args:
            epoch: The loader's.
            batch: The batch's place in it.
            samples: 0 if there is none, `FAILED` if it can't be read.
        """
        self._place = (epoch, batch)
        words = torch.tensor([self._loader, epoch, batch, samples])
        self._answers = words.new_empty(self._ranks.size, 4)
        parts = list(self._answers.unbind())
        try:
            self._work = dist.all_gather(parts, words, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from error

    def answers(self) -> list[int]:
        """Every rank's samples, by rank.

        Raises:
            DistributedOperationError: If a rank is gone, or reads something else.
        """
        work, self._work = self._work, None
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        words = self._answers.tolist()
        mine = [self._loader, *self._place]
        for rank, (*place, _) in enumerate(words):
            if place != mine:
                raise DistributedOperationError(
                    f"Rank {rank} reads batch {place[2]} of epoch {place[1]} of loader {place[0]}, and rank {self._ranks.index} batch {mine[2]} of "
                    f"epoch {mine[1]} of loader {mine[0]}. All ranks must iterate over the same loaders in the same order, and leave a loop together."
                )
        return [samples for *_, samples in words]

    def finish(self) -> None:
        """Hear what was still asked, when a loop is left."""
        if self._work is not None:
            with contextlib.suppress(DistributedOperationError):
                self.answers()

    def _lost(self, error: RuntimeError) -> DistributedOperationError:
        return DistributedOperationError(describe_failure("Reading the next batch", self._group, error))
