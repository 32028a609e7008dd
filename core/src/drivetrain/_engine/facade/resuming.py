"""Checkpoints that a training loop makes by itself, and a run that goes on from them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain._engine.facade.checkpointing import CheckpointFacade
from drivetrain._engine.facade.timing import TimingFacade
from drivetrain._engine.facade.tracking import TrackingFacade
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.checkpoint import Keep

__all__ = ["ResumeFacade"]


class ResumeFacade(CheckpointFacade, TimingFacade, TrackingFacade):
    """Numbered checkpoints at step boundaries, the last one before a stop, and going on from the newest."""

    _resume_from: str | None
    #: The step of the newest checkpoint that `checkpoint` made or a load read.
    _saved_step: int = 0
    #: What the script last gave to `checkpoint`.
    _keep: Keep | None = None
    _makes_checkpoints: bool = False

    def checkpoint(
        self,
        every: int | None = None,
        keep: int | Keep | None = None,
        *,
        metrics: Mapping[str, Any] | None = None,
        blocking: bool = False,
    ) -> str | None:
        """Save ``<project_dir>/checkpoints/checkpoint_<n>`` if it is time. Call it on all processes at the end of each step; it costs next to nothing when it isn't.

        It is time at the first step boundary after ``every`` optimizer steps, and when training is asked to stop (`should_stop`): that last save
        is complete when the call returns. Inside an accumulation window nothing is saved. The end of `epochs` saves what isn't yet, so that a run
        that is over and is started again finds nothing left to do.

        Args:
            every: Optimizer steps from one save to the next; None saves at each call after a new step, as at the end of an epoch.
            keep: How many of the newest to keep, or a `drivetrain.checkpoint.Keep` (the best by a metric, every n-th); default: the
                project's ``total_limit``.
            metrics: Values to keep with the checkpoint, such as the one that ``Keep(best=...)`` looks at.
            blocking: Wait until it is written; by default training goes on meanwhile.

        Returns:
            The checkpoint's path if one is made, else None.

        Raises:
            CheckpointError: If this save or the one before in the background failed: on every process, at the same step.

        Example:
            >>> import tempfile, torch
            >>> from drivetrain import Accelerator
            >>> accelerator = Accelerator(cpu=True, project_dir=tempfile.mkdtemp())
            >>> model = torch.nn.Linear(1, 1)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> for x in torch.ones(5, 1, 1):
            ...     accelerator.backward(model(x).mean())
            ...     optimizer.step()
            ...     if (path := accelerator.checkpoint(every=2, keep=3)) is not None:
            ...         print(accelerator.step, path.rpartition("/")[2])
            2 checkpoint_0
            4 checkpoint_1
            >>> accelerator.end_training()
        """
        if every is not None and every < 1:
            raise ConfigurationError(f"checkpoint(every=...) is a number of optimizer steps, at least 1; it is {every}")
        if not self._makes_checkpoints or keep is not None:
            self._take_rule(keep)
        manager = self._checkpoints
        if manager.failed:  # processes notice at different times: they agree on a step to raise at
            self.request_stop("a checkpoint in the background failed")
        stops = self.should_stop
        if stops:
            manager.wait()
        step = self.step
        self._saved_step = min(self._saved_step, step)  # `free_memory` counts anew
        due = step > self._saved_step and (stops or every is None or step // every > self._saved_step // every)
        if not due or self.gradient_state.is_open:
            return None
        path = self._save_or_defer(None, blocking=blocking or stops, metadata=metrics, numbered=True, keep=self._keep)
        self._saved_step = step
        return path

    def _take_rule(self, keep: int | Keep | None) -> None:
        if self.project_dir is None:
            raise ConfigurationError(
                "checkpoint() needs a place: give Accelerator(project_dir=...), or use save_state(directory)."
            )
        from drivetrain.checkpoint import Keep

        self._keep = Keep(last=keep) if isinstance(keep, int) else keep
        self._makes_checkpoints = True

    def resume(self) -> str | None:
        """Load what ``Accelerator(resume=...)`` says; collective, once everything is prepared. `epochs` calls it, and the second call does nothing.

        Returns:
            The checkpoint's path, or None if there is none to go on from.

        Raises:
            CheckpointError: If it can't be loaded. With "auto", damaged checkpoints are skipped with a warning.

        Example:
            >>> import tempfile
            >>> from drivetrain import Accelerator
            >>> Accelerator(cpu=True, project_dir=tempfile.mkdtemp(), resume="auto").resume() is None
            True
        """
        wanted = self._resume_from
        if wanted is None:
            return None
        if wanted == "auto":
            found = self._checkpoints.load_newest()
            path = None if found is None else str(found)
        else:
            path = self.load_state(wanted)
        self._loaded()
        if path is not None and self._parts.control.is_main_process:
            sys.stderr.write(f"Going on from {path}: step {self.step}, epoch {self.epoch}.\n")
        return path

    # -- where the other facades ask ---------------------------------------------------------------------------------------

    def _loaded(self) -> None:
        super()._loaded()
        self._resume_from = None
        self._saved_step = self.step

    def _before_training(self) -> None:
        self.resume()

    def _after_training(self) -> None:
        if self._makes_checkpoints:
            self.checkpoint()

    def _runs_to_go_on_with(self) -> tuple[Mapping[str, str] | None, int]:
        if self._resume_from is None or not self._parts.control.is_main_process:
            return super()._runs_to_go_on_with()
        found = self._checkpoints.peek(None if self._resume_from == "auto" else self._resume_from)
        if found is None:
            return None, 0
        manifest, run_ids = found
        return run_ids, int(manifest.counters.get("step", 0))
