"""One experiment tracking system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.specs import ProcessInfo, TrackerSpec

__all__ = ["Row", "Tracker", "TrackerContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerContext:
    """What a tracker is started with.

    Args:
        project_name: As given to ``init_trackers``.
        directory: Logging directory, or None if the tracker needs none and the user gave none.
        run_id: Id of the run to go on with, from a checkpoint; None for a new run.
        resume_step: The last step that the checkpoint holds; rows of later steps that the run has already are void. None if unknown.
        options: ``init_kwargs[name]`` as given by the user, passed on to the system.
        settings: The spec's options object, resolved from file and environment; None if it has none.
        process: Who this process is.

    Example:
        >>> TrackerContext(project_name="demo").run_id is None
        True
    """

    project_name: str
    directory: Path | None = None
    run_id: str | None = None
    resume_step: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Any = None
    process: ProcessInfo = field(default_factory=ProcessInfo)


@dataclass(frozen=True, slots=True)
class Row:
    """The values of one ``log`` call.

    Args:
        values: By name; nested names joined with ``/``.
        step: As given by the user; None if none was given. It may be lower than an earlier one.
        time: When ``log`` was called, seconds since the epoch.

    Example:
        >>> Row({"loss": 0.5}, step=3, time=0.0).values["loss"]
        0.5
    """

    values: Mapping[str, float | int | str | bool]
    step: int | None
    time: float


class Tracker:
    """I/O for one system.

    The constructor runs on the training thread and must be cheap; all other methods are called from one background thread of the hub, in
    order, on the main process only (unless the spec says ``every_rank``). Values arrive as plain Python numbers and strings, never as live
    tensors. Names may be anything (``../x``, ``/abs``, NUL, empty): make them legal reversibly.

    A method that the system has no counterpart for keeps the default, which stores nothing and returns False; the hub then
    falls back to the nearest kind and says so once. Raising marks the value as not delivered: the hub keeps it on disk and offers
    it again later.

    Args:
        spec: The descriptor.
        context: Where and for what run.
    """

    #: Most rows that `log_rows` is given at once. With more than one, `log_rows` must store all of them or raise and store none.
    rows_per_call: int = 1
    #: Names of further keywords of ``log`` (``log_kwargs={name: {...}}``) that it honours; ``"*"`` for any.
    log_options: frozenset[str] = frozenset()

    #: When the value being stored was logged, seconds since the epoch. Set by the hub before each call.
    time: float = 0.0
    #: The ``log_kwargs`` of the call. Set by the hub before each call.
    call_options: Mapping[str, Any] = {}
    #: How the run ends: "finished", "failed" (exception) or "killed" (signal). Set by the hub before `finish`.
    status: str = "running"

    def __init__(self, spec: TrackerSpec, context: TrackerContext) -> None:
        self.spec = spec
        self.context = context

    @classmethod
    def runs_here(cls, context: TrackerContext) -> bool:
        """Whether to run on this rank, which isn't the main one. Asked only if the spec says ``every_rank``."""
        return True

    @property
    def run(self) -> Any:
        """The system's own run object, for ``get_tracker(name, unwrap=True)``."""
        return None

    @property
    def run_id(self) -> str | None:
        """Id with which the run can be resumed; None where the system has none. Read from any thread."""
        return None

    def start(self) -> None:
        """Open the run.

        Raises:
            DrivetrainError, ImportError: The user must do something about it; reaches the user from ``init_trackers``.
            Exception: Any other is the system's trouble: one warning, and values are kept on disk.
        """

    def log_config(self, values: Mapping[str, Any]) -> bool:
        """Store hyperparameters: a flat mapping, nested keys joined with ``/``, values int, float, bool, str or None."""
        return False

    def log_scalars(self, values: Mapping[str, float | int | str | bool], step: int | None) -> bool | None:
        """Store one row of values."""
        raise NotImplementedError

    def log_rows(self, rows: Sequence[Row]) -> None:
        """Store up to `rows_per_call` rows. Rows with ``log_kwargs`` come through `log_scalars`."""
        for row in rows:
            self.time = row.time
            self.log_scalars(row.values, row.step)

    def log_text(self, name: str, text: str, step: int | None) -> bool:
        """Store a text."""
        return False

    def log_images(self, name: str, images: Sequence[Any], step: int | None) -> bool:
        """Store images: uint8 NumPy arrays of shape (height, width, 3 or 4)."""
        return False

    def log_figure(self, name: str, figure: Any, step: int | None) -> bool:
        """Store a matplotlib or plotly figure (a copy, which nobody else draws on)."""
        return False

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int | None) -> bool:
        """Store a table of int, float, bool, str and None."""
        return False

    def log_histogram(self, name: str, values: Any, step: int | None) -> bool:
        """Store the distribution of a 1-d NumPy array."""
        return False

    def log_artifact(self, path: Path, name: str | None, step: int | None) -> bool:
        """Store a file."""
        return False

    def log_summary(self, values: Mapping[str, Any]) -> bool:
        """Store final values of the run."""
        return False

    def flush(self) -> None:
        """Make all that was logged durable."""

    def finish(self) -> None:
        """Close the run."""
