"""Windows whose number of micro-batches the script says, because it cuts a loader's batch itself or fetched several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain._engine.accumulation import Window
from drivetrain.errors import ConfigurationError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from drivetrain._engine.accumulation import Accumulator

__all__ = ["DeclaredWindow", "declared_window"]


class DeclaredWindow(Window):
    """Ends after as many micro-batches as were declared: neither the setting nor the end of the data counts.

    The parts of a batch weigh the same, and those of ranks as the ranks' rows do; parts of different sizes say their own with ``weight=``.

    Args:
        accumulator: Its owner.
        models: Models whose gradients are kept local until the window's end.
    """

    __slots__ = ("_next", "declared")

    def __init__(self, accumulator: Accumulator, models: Sequence[torch.nn.Module]) -> None:
        super().__init__(accumulator, models)
        self._next: int | None = None
        self.declared = False  # whether the running window is such a one

    def declare(self, count: int) -> None:
        """Say how many micro-batches the window has that begins or runs.

        Raises:
            ConfigurationError: For a count below 1, or another one than at the window's start.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigurationError(
                f"accumulate(micro_batches={count!r}): give the number of micro-batches, 1 or more."
            )
        if not self.last and not (self.declared and count == self.size):
            said = f"micro_batches={self.size}" if self.declared else "without micro_batches"
            raise ConfigurationError(
                f"accumulate(micro_batches={count}): the window began {said}, and {self.index + 1} of {self.size} micro-batches are done. "
                "Give the same number in all calls of a window."
            )
        self._next = count

    def __enter__(self) -> Window:
        count, self._next = self._next, None
        if self.last:
            self.declared = count is not None
        if not self.declared:
            return super().__enter__()
        owner = self._owner
        before = owner.num_steps, owner.sync_with_dataloader
        owner.num_steps, owner.sync_with_dataloader = count or self.size, False
        try:
            super().__enter__()
        finally:
            owner.num_steps, owner.sync_with_dataloader = before
        self._scale = self._share_of(self._batch) / self.size
        self._assumed = self._seen = 0.0  # rows were weighed just now: nothing is left to correct
        self._batch = (self._batch, self.index)  # items are counted once per part, and a batch has several
        return self

    def _share_of(self, batch: Any) -> float:
        """What this rank's mean over the batch counts in the mean over all ranks' rows, times their number."""
        if batch is None or batch.rows is None or batch.rank_rows is None or not any(batch.rank_rows):
            return 1.0
        return float(batch.rows * self._owner.data_world_size / sum(batch.rank_rows))


def declared_window(
    windows: dict[tuple[torch.nn.Module, ...], Window],
    owner: Accumulator,
    models: tuple[torch.nn.Module, ...],
    count: int,
) -> DeclaredWindow:
    """The window of these models, told how many micro-batches it has.

    Raises:
        ConfigurationError: Where it can't have so many.
        UnsupportedError: If the backend cuts batches itself.
    """
    if owner.backend.micro_batches_per_call > 1:
        raise UnsupportedError(
            f"accumulate(micro_batches={count}): the backend {owner.backend.spec.name!r} cuts batches itself, "
            f"{owner.backend.micro_batches_per_call} micro-batches in one call of the model. Leave it out, and give the model the whole batch."
        )
    window = windows.get(models)
    if not isinstance(window, DeclaredWindow):
        fresh = DeclaredWindow(owner, models)
        if window is not None and not window.last:
            fresh.last, fresh.index, fresh.size = False, window.index, window.size
            fresh.declare(count)  # refuses
        window = windows[models] = fresh
    window.declare(count)
    return window
