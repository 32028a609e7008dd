"""Where a loader is: epoch, batches that the training loop received, and how parts of the epoch were cut before a resize.

Contiguous and custom strategies leave no prefix of the order behind, and a second resize needs the history of the first: the position
is a list of segments (layout, steps taken), from which the unseen samples follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.errors import CheckpointError

__all__ = ["FORMAT", "Progress"]

#: Version of the plain data that `Progress.to_dict` makes.
FORMAT = 1


class Progress:
    """The position of a loader, shared by the views that `skip_first_batches` makes of it.

    Args:
        seed: Seed of order and augmentation.

    Example:
        >>> progress = Progress(seed=1)
        >>> run = progress.begin(); progress.taken = 3; progress.epoch, progress.taken
        (0, 3)
        >>> progress.finish(run); progress.epoch, progress.taken
        (1, 0)
    """

    __slots__ = (
        "_started",
        "epoch",
        "epoch_is_given",
        "fingerprint",
        "layout",
        "run",
        "seed",
        "segments",
        "streams",
        "taken",
    )

    def __init__(self, seed: int) -> None:
        self.seed = seed
        #: The epoch being read, or read next.
        self.epoch = 0
        #: Batches of it that this rank's loop received since the last segment.
        self.taken = 0
        #: Parts of the epoch read at other world sizes: `Layout` fields and "taken".
        self.segments: list[dict[str, Any]] = []
        #: How the epoch is cut now; None before the first batch.
        self.layout: dict[str, Any] | None = None
        #: Number and fingerprint of the order's samples, to notice another data set or sampler on resume.
        self.fingerprint: list[int | None] | None = None
        #: Position of each worker's stream (iterable data sets): rounds and rows read, and the data set's own state.
        self.streams: dict[str, dict[str, Any]] = {}
        #: Whether the user asked for this epoch.
        self.epoch_is_given = False
        self._started = False
        #: Number of the newest iteration: one that was overtaken by a newer one leaves the position alone.
        self.run = 0

    @property
    def resumes(self) -> bool:
        """Whether the next iteration starts inside an epoch."""
        return not self._started and bool(self.taken or self.segments or self.streams)

    def begin(self) -> int:
        """A new iteration: the next epoch, or the one that a state was loaded for. Returns its number."""
        if self._started:
            self.next_epoch()
        self._started = True
        self.run += 1
        return self.run

    def next_epoch(self) -> None:
        """Forget the position in this epoch."""
        self.restart(self.epoch + 1)

    def restart(self, epoch: int) -> None:
        """To the start of an epoch."""
        self.epoch = epoch
        self.taken = 0
        self.segments = []
        self.streams = {}
        self.layout = None
        self.fingerprint = None
        self.epoch_is_given = False

    def finish(self, run: int) -> None:
        """The iteration was exhausted: the next one is a new epoch."""
        if run == self.run:
            self.next_epoch()
            self._started = False

    def set_epoch(self, epoch: int) -> None:
        """The next iteration reads this epoch: from its start, unless a position inside of it was loaded."""
        if self._started or epoch != self.epoch:
            self.restart(epoch)
        self.run += 1
        self._started = False
        self.epoch_is_given = True

    def to_dict(self) -> dict[str, Any]:
        """Plain data for `load`."""
        return {
            "format": FORMAT,
            "seed": self.seed,
            "epoch": self.epoch,
            "taken": self.taken,
            "layout": self.layout,
            "segments": [dict(s) for s in self.segments],
            "fingerprint": self.fingerprint if self.taken or self.segments else None,
            "streams": {k: dict(v) for k, v in self.streams.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a state.

        Raises:
            CheckpointError: If it isn't one, or of a newer format.
        """
        if state.get("format") != FORMAT:
            raise CheckpointError(
                f"This loader state has the format {state.get('format')!r}, and this version reads {FORMAT}. "
                "It was saved by another kind of loader or a newer version."
            )
        self.restart(int(state["epoch"]))
        self.seed = int(state["seed"])
        self.taken = int(state["taken"])
        self.layout = None if state["layout"] is None else dict(state["layout"])
        self.segments = [dict(s) for s in state["segments"]]
        self.fingerprint = None if state["fingerprint"] is None else list(state["fingerprint"])
        self.streams = {str(k): dict(v) for k, v in state["streams"].items()}
        self._started = False
        self.run += 1

    def skip_to(self, skip: int | None) -> int | None:
        """Prepare for leaving out the first batches of the epoch.

        Returns:
            None if nothing is to be done: not asked for, or just the position that a loaded state has already (scripts do both).
        """
        if skip is None or skip == self.taken + sum(s["taken"] for s in self.segments):
            return None
        self.taken, self.segments, self.streams, self.layout = 0, [], {}, None
        return skip

    def resize(self, layout: Mapping[str, Any]) -> bool:
        """The epoch goes on with this layout: if it is another one, what was taken so far becomes a segment.

        Returns:
            Whether it is another one.
        """
        new = dict(layout)
        changed = self.taken > 0 and self.layout is not None and self.layout != new
        if changed:
            assert self.layout is not None
            self.segments.append({**self.layout, "taken": self.taken})
            self.taken = 0
        self.layout = new
        return changed
