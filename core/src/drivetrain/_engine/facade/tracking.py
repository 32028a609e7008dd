"""Experiment tracking."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain._engine.assemble import Parts
    from drivetrain.tracking import TrackerHub

__all__ = ["TrackingFacade"]


class TrackingFacade:
    """Logging to all trackers chosen with ``log_with``, from the main process."""

    _parts: Parts
    _step: int
    #: Runs of the checkpoint that was loaded, by tracker.
    _run_ids: Mapping[str, str] | None = None

    @cached_property
    def _hub(self) -> TrackerHub:
        """Made when it is first used: scripts that log nothing don't pay for importing it."""
        return self._parts.make_hub()

    def _finish_trackers(self) -> None:
        if "_hub" in vars(self):
            self._hub.finish()

    @property
    def trackers(self) -> list[Any]:
        """The running trackers."""
        return list(self._hub.trackers)

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start a run in each tracker; after `load_state`, and where ``resume`` will load a checkpoint, go on with the checkpoint's runs.

        Args:
            project_name: Name of the project in all systems.
            config: Hyperparameters; nested ones are joined with ``/``.
            init_kwargs: By tracker name, what goes to that system's own start.

        Example:
            >>> import tempfile
            >>> from drivetrain import Accelerator
            >>> accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tempfile.mkdtemp())
            >>> accelerator.init_trackers("demo", config={"lr": 0.1})
            >>> accelerator.log({"loss": 0.5}, step=1)
            >>> accelerator.end_training()
        """
        run_ids, step = self._runs_to_go_on_with()
        self._hub.start(
            project_name,
            config=config,
            init_kwargs=init_kwargs,
            run_ids=run_ids,
            resume_step=step if run_ids else None,
        )

    def _runs_to_go_on_with(self) -> tuple[Mapping[str, str] | None, int]:
        return self._run_ids, self._step

    def log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Log numbers, 0-d tensors and strings. Returns within microseconds: values are snapshotted, a thread does the rest.

        Args:
            values: By name; nested names are joined with ``/``.
            step: Position on the x axis.
            log_kwargs: By tracker name, what goes to that system's own call.
        """
        self._hub.log(values, step=step, log_kwargs=log_kwargs)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images by name: arrays of shape (images, height, width, channels)."""
        self._hub.log_images(values, step=step, **kwargs)

    def log_figure(self, name: str, figure: Any, step: int | None = None) -> None:
        """Log a matplotlib or plotly figure."""
        self._hub.log_figure(name, figure, step=step)

    def log_table(self, name: str, columns: Any = None, data: Any = None, step: int | None = None) -> None:
        """Log a table."""
        self._hub.log_table(name, columns=columns, data=data, step=step)

    def log_histogram(self, name: str, values: Any, step: int | None = None) -> None:
        """Log the distribution of a tensor's values."""
        self._hub.log_histogram(name, values, step=step)

    def log_text(self, name: str, text: str, step: int | None = None) -> None:
        """Log a text."""
        self._hub.log_text(name, text, step=step)

    def log_artifact(self, path: Any, name: str | None = None, step: int | None = None) -> None:
        """Log a file."""
        self._hub.log_artifact(path, name=name, step=step)

    def log_summary(self, values: Mapping[str, Any]) -> None:
        """Log final values of the run."""
        self._hub.log_summary(values)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """One tracker; on processes that don't log, an inert object that takes any call.

        Args:
            name: As given in ``log_with``.
            unwrap: Return the system's own run object.
        """
        return self._hub.get(name, unwrap=unwrap)
