"""Ranks that read streams tell each other, batch by batch, whether they have another one.

How long a stream is shows only when it ends. A rank whose stream ended early would leave the others waiting in their next collective for ever;
so each rank's word about its next batch travels while the present one is computed on, on a group of its own that no device waits for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from drivetrain.data.ranks import Ranks
from drivetrain.errors import DistributedOperationError
from drivetrain.parallel._groups import describe_failure

__all__ = ["FAILED", "Question", "RollCall"]

#: The word of a rank that can't read its next batch.
FAILED = -1


class RollCall:
    """Where a loader's ranks ask each other.

    Args:
        ranks: All ranks.
        group: A gloo group of them.
        loader: Number of the loader, equal on all ranks.
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup, loader: int) -> None:
        self._ranks = ranks
        self._group = group
        self._loader = loader
        #: What went wrong when a loop was left, where nobody could hear of it.
        self.failure: DistributedOperationError | None = None

    def ask(self, epoch: int, batch: int, samples: int) -> Question:
        """Say what this rank has next, and begin to hear the others.

        Args:
            epoch: The loader's.
            batch: The batch's place in it.
            samples: How many it has; 0 if there is none, `FAILED` if it can't be read.
        """
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        return Question(self._ranks, self._group, (self._loader, epoch, batch), samples)


class Question:
    """How many samples has each rank's next batch?

    Args:
        ranks: All ranks.
        group: A gloo group of them.
        place: Loader, epoch and batch.
        samples: This rank's answer.
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup, place: tuple[int, int, int], samples: int) -> None:
        self._rank = ranks.index
        self._group = group
        self._place = place
        words = torch.tensor([*place, samples])
        self._answers = words.new_empty(ranks.size, 4)
        try:
            self._work: Any = dist.all_gather(list(self._answers.unbind()), words, group=group, async_op=True)
        except RuntimeError as error:
            raise self._lost(error) from error

    def answers(self) -> list[int]:
        """Every rank's samples, by rank.

        Raises:
            DistributedOperationError: If a rank is gone, or reads something else.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error
        words = self._answers.tolist()
        for rank, (*place, _) in enumerate(words):
            if tuple(place) != self._place:
                raise DistributedOperationError(
                    f"Rank {rank} reads batch {place[2]} of epoch {place[1]} of loader {place[0]}, and rank {self._rank} batch {self._place[2]} of "
                    f"epoch {self._place[1]} of loader {self._place[0]}. All ranks must iterate over the same loaders in the same order, and leave "
                    "a loop together."
                )
        return [samples for *_, samples in words]

    def _lost(self, error: RuntimeError) -> DistributedOperationError:
        return DistributedOperationError(describe_failure("Reading the next batch", self._group, error))
