"""Time in the script: steps, epochs, and when to stop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from drivetrain._engine.accumulation import Accumulator
    from drivetrain._engine.prepare import PreparedObjects
    from drivetrain._engine.schedule_length import ScheduleCheck
    from drivetrain._engine.stopping import Stopper
    from drivetrain.data.stack import LoaderStack

__all__ = ["TimingFacade"]


class _Begun(NamedTuple):
    """How things stood when an epoch began.

    Args:
        step: Optimizer steps.
        resumed: Whether it goes on with an epoch that was left.
        loaders: The epoch of each loader, by ``id``.
    """

    step: int
    resumed: bool
    loaders: dict[int, int]


class TimingFacade:
    """Optimizer steps and epochs so far, and a stop that all processes agree on."""

    _stopper: Stopper
    _hub: Any  # the tracking part's
    _local_gradients: int
    _objects: PreparedObjects
    _loader_stack: LoaderStack
    _begun: _Begun | None = None
    _watching: bool = False
    _schedules: ScheduleCheck | None = None
    gradient_state: Accumulator
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

        Loads first what ``Accelerator(resume=...)`` says; where the script calls `checkpoint`, the end is saved, too.

        Example:
            >>> from drivetrain import Accelerator
            >>> list(Accelerator(cpu=True).epochs(3))
            [0, 1, 2]
        """
        self._watch()
        self._before_training()
        if self._schedules is not None:
            self._schedules.planned(num_epochs, self._objects.by_kind["loader"], self.gradient_state.num_steps)
        resumed = [loader for loader in self._objects.by_kind["loader"] if loader.resumes]
        for loader in resumed:
            loader.set_epoch(loader.epoch)  # this epoch and no other, even where all its batches were taken
        while self._epoch < num_epochs and not self._stopper.should_stop:
            self._begun = _Begun(
                self._step, bool(resumed), {id(loader): loader.epoch for loader in self._objects.by_kind["loader"]}
            )
            resumed = []
            yield self._epoch
            if not self._stopper.should_stop:  # the epoch that was left early goes on after a resume
                self._epoch += 1
                self._begun = None
        self._after_training()
        if self._stopper.should_stop and self._epoch_to_go_on_with >= num_epochs:
            self._stopper.finished()

    def _before_training(self) -> None:
        """Load what ``Accelerator(resume=...)`` says."""

    def _after_training(self) -> None:
        """Save what isn't yet, in a script that makes checkpoints."""

    def _watch(self) -> None:
        """Hear of requests to stop: from now on a SIGTERM is one, and kills nobody. Idempotent."""
        self._stopper.watch()
        self._hub.outlive_signal()
        self._watching = True

    @property
    def _epoch_to_go_on_with(self) -> int:
        """The epoch in which a run resumes that is saved now: the next one, once the training loop of this one has ended."""
        begun = self._begun
        if begun is None or self._loader_stack.active is not None or not (self._step > begun.step or begun.resumed):
            return self._epoch
        ended = any(
            loader.epoch > begun.loaders.get(id(loader), loader.epoch) for loader in self._objects.by_kind["loader"]
        )
        return self._epoch + ended

    @property
    def should_stop(self) -> bool:
        """Whether all processes have agreed to stop here.

        Requested by SIGTERM or SIGUSR1 (from the first time this is asked), `set_trigger`, `request_stop` or `stop_after` on any process; becomes true
        on all processes after the same optimizer step, with no collective of its own.
        """
        if not self._watching:  # a loop asks at each step
            self._watch()
        return self._stopper.should_stop

    def request_stop(self, reason: str = "requested") -> None:
        """Ask all processes to stop (see `should_stop`)."""
        self._watch()
        self._stopper.request(reason)

    def stop_after(self, seconds: float) -> None:
        """Ask all processes to stop that many seconds from now (a job's time limit)."""
        self._watch()
        self._stopper.stop_after(seconds)

    def _optimizer_stepped(self) -> None:
        self._step += 1
        if self.gradient_state.notes is not None:
            self.gradient_state.notes.stepped(self._step)
        if "_hub" in self.__dict__ and not self._local_gradients:
            self._hub.met()
        if self._stopper.pending:
            self._stopper.window_ended(self._step)
