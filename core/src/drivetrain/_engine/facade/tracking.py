"""Experiment tracking."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain._engine.assemble import Parts
    from drivetrain._engine.training_values import TrainingValues
    from drivetrain.accelerator import Accelerator
    from drivetrain.tracking import TrackerHub

__all__ = ["TrackingFacade"]


class TrackingFacade:
    """Logging to all trackers chosen with ``log_with``, from the main process."""

    _parts: Parts
    _step: int
    #: Runs of the checkpoint that was loaded, by tracker.
    _run_ids: Mapping[str, str] | None = None
    _training_values: TrainingValues | None = None

    @cached_property
    def _hub(self) -> TrackerHub:
        """Made when it is first used: scripts that log nothing don't pay for importing it."""
        return self._parts.make_hub()

    def _met(self, count: int = 1) -> None:
        """All processes have met (an optimizer step; two for a barrier or gather): reductions of what is logged go by that."""
        if "_hub" in vars(self):
            self._hub.met(count)

    def _finish_trackers(self) -> None:
        if (
            "_hub" in vars(self) or self._parts.plan.process.is_distributed
        ):  # others may wait to hear that nothing more comes
            self._hub.end()

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
        if self._logs_facts:
            from drivetrain._engine.run_facts import log_run_facts

            log_run_facts(self._accelerator)

    def _runs_to_go_on_with(self) -> tuple[Mapping[str, str] | None, int]:
        return self._run_ids, self._step

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Any] | None = None,
        *,
        reduce: str | None = None,
        weight: Any = None,
    ) -> None:
        """Log numbers, 0-d tensors and strings. Returns within microseconds: values are snapshotted, a thread does the rest.

        Args:
            values: By name; nested names are joined with ``/``.
            step: Position on the x axis.
            log_kwargs: By tracker name, what goes to that system's own call.
            reduce: None: the main process's values are stored, and on others the call does nothing. "mean", "sum", "max", "min": those of all processes,
                which must all call it. That is done by a thread, on a process group of its own: nobody waits, nothing comes between training's collectives.
            weight: In a mean, the number of items that this process's values stand for: a number, a 0-d tensor, or a mapping by name.

        Raises:
            DistributedOperationError: If a process didn't take part in an earlier call with ``reduce``, naming the call.

        Example:
            >>> import tempfile
            >>> from drivetrain import Accelerator
            >>> accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tempfile.mkdtemp())
            >>> accelerator.init_trackers("demo")
            >>> accelerator.log({"loss": 0.5}, step=1, reduce="mean", weight=32)
            >>> accelerator.end_training()
        """
        self._hub.log(values, step, log_kwargs, reduce=reduce, weight=weight)

    def log_training(
        self,
        values: Mapping[str, Any] | None = None,
        step: int | None = None,
        *,
        items: float | None = None,
        log_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Log how training goes, and the given values.

        That is ``lr`` (``lr/0``, ``lr/1``, ... with several groups), ``grad_norm`` of the last `clip_grad_norm_`, ``loss_scale`` (fp16), and since the last
        call ``steps_per_second`` and ``items_per_second``.

        Args:
            values: Further values, which win over these.
            step: Position on the x axis; default: `step`, the optimizer steps so far.
            items: Samples or tokens that all processes together have trained on since the last call.
            log_kwargs: By tracker name, what goes to that system's own call.

        Example:
            >>> import tempfile
            >>> from drivetrain import Accelerator
            >>> accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tempfile.mkdtemp())
            >>> accelerator.init_trackers("demo")
            >>> accelerator.log_training({"loss": 0.5}, items=32)
            >>> accelerator.end_training()
        """
        if not self._hub.trackers:
            return
        if self._training_values is None:
            from drivetrain._engine.training_values import TrainingValues

            self._training_values = TrainingValues()
        row = self._training_values.collect(self._accelerator, items)
        if self._logs_facts:
            from drivetrain._engine.run_facts import memory_facts

            row.update(memory_facts(self._accelerator))
        self._hub.log({**row, **(values or {})}, self._step if step is None else step, log_kwargs)

    def _log_memory(self) -> None:
        """Log memory as it is at a checkpoint, if facts of the run are logged."""
        if self._logs_facts and self._hub.trackers:
            from drivetrain._engine.run_facts import memory_facts

            self._hub.log(memory_facts(self._accelerator), self._step)

    @property
    def _logs_facts(self) -> bool:
        return self._hub.options.run_facts and self._hub.process.rank == 0

    @property
    def _accelerator(self) -> Accelerator:
        return self  # type: ignore[return-value]  # the Accelerator, of which this is a part

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        *,
        dataformats: str | None = None,
        log_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Log images by name: a PIL image, array or tensor, or several; ``dataformats`` says the order of dimensions where it isn't clear."""
        self._hub.log_images(values, step, dataformats=dataformats, log_kwargs=log_kwargs)

    def log_figure(
        self, name: str, figure: Any, step: int | None = None, *, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Log a matplotlib or plotly figure."""
        self._hub.log_figure(name, figure, step, log_kwargs=log_kwargs)

    def log_table(
        self,
        name: str,
        columns: Any = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        *,
        log_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Log a table: columns and rows, or rows that are mappings, or a dataframe."""
        self._hub.log_table(name, columns, data, dataframe, step, log_kwargs=log_kwargs)

    def log_histogram(
        self, name: str, values: Any, step: int | None = None, *, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Log the distribution of a tensor's values."""
        self._hub.log_histogram(name, values, step, log_kwargs=log_kwargs)

    def log_text(
        self, name: str, text: str, step: int | None = None, *, log_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Log a text."""
        self._hub.log_text(name, text, step, log_kwargs=log_kwargs)

    def log_artifact(
        self,
        path: Any,
        name: str | None = None,
        step: int | None = None,
        *,
        log_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Log a file. It must stay as it is until the next checkpoint or `end_training`."""
        self._hub.log_artifact(path, name, step, log_kwargs=log_kwargs)

    def log_artifacts(
        self,
        directory: Any,
        name: str | None = None,
        step: int | None = None,
        *,
        log_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Log all files below a directory, named by their path from there, after ``name/`` if given."""
        self._hub.log_artifacts(directory, name, step, log_kwargs=log_kwargs)

    def log_config(self, values: Mapping[str, Any]) -> None:
        """Log further hyperparameters, besides those given to `init_trackers`."""
        self._hub.log_config(values)

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
