"""Time in the script: steps, epochs, and when to stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain._engine.stopping import Stopper

__all__ = ["TimingFacade"]


class TimingFacade:
    """Optimizer steps and epochs so far, and a stop that all processes agree on."""

    _stopper: Stopper
    _step: int = 0
    _epoch: int = 0

    @property
    def step(self) -> int:
        """Optimizer steps so far; windows with several optimizers count once, skipped steps don't. Lives in the checkpoint."""
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = value

    @property
    def epoch(self) -> int:
        """Epochs begun before the present one; set by `epochs`. Lives in the checkpoint."""
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch = value

    def epochs(self, num_epochs: int) -> Iterator[int]:
        """Iterate over epochs, going on where a loaded checkpoint stopped, and ending early when training is asked to stop.

        Example:
            >>> from drivetrain import Accelerator
            >>> list(Accelerator(cpu=True).epochs(3))
            [0, 1, 2]
        """
        self._stopper.watch()
        while self._epoch < num_epochs and not self._stopper.should_stop:
            yield self._epoch
            self._epoch += not self._stopper.should_stop  # the epoch that was left early goes on after a resume

    @property
    def should_stop(self) -> bool:
        """Whether all processes have agreed to stop here.

        Requested by SIGTERM or SIGUSR1 (from the first time this is asked), `set_trigger`, `request_stop` or `stop_after` on any process; becomes true
        on all processes after the same optimizer step, with no collective of its own.
        """
        self._stopper.watch()
        return self._stopper.should_stop

    def request_stop(self, reason: str = "requested") -> None:
        """Ask all processes to stop (see `should_stop`)."""
        self._stopper.watch()
        self._stopper.request(reason)

    def stop_after(self, seconds: float) -> None:
        """Ask all processes to stop that many seconds from now (a job's time limit)."""
        self._stopper.watch()
        self._stopper.stop_after(seconds)

    def _optimizer_stepped(self) -> None:
        self._step += 1
        if self._stopper.pending:
            self._stopper.window_ended(self._step)
