"""One experiment tracking system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.specs import ProcessInfo, TrackerSpec

__all__ = ["Tracker", "TrackerContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerContext:
    """What a tracker is started with.

    Args:
        project_name: As given to ``init_trackers``.
        directory: Logging directory, or None if the tracker needs none and the user gave none.
        run_id: Id of the run to go on with, from a checkpoint; None for a new run.
        options: ``init_kwargs[name]`` as given by the user, passed on to the system.
        process: Who this process is.

    Example:
        >>> TrackerContext(project_name="demo").run_id is None
        True
    """

    project_name: str
    directory: Path | None = None
    run_id: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    process: ProcessInfo = field(default_factory=ProcessInfo)


class Tracker:
    """I/O for one system. All methods are called from the hub's background thread, in order, on the main process only
    (unless the spec says ``every_rank``). Values arrive as plain Python numbers and strings, never as live tensors.

    A method that the system has no counterpart for keeps the default, which stores nothing and returns False; the hub then
    falls back to the nearest kind and says so once. Raising marks the value as not delivered.

    Args:
        spec: The descriptor.
        context: Where and for what run.
    """

    def __init__(self, spec: TrackerSpec, context: TrackerContext) -> None:
        self.spec = spec
        self.context = context

    @property
    def run(self) -> Any:
        """The system's own run object, for ``get_tracker(name, unwrap=True)``."""
        return None

    @property
    def run_id(self) -> str | None:
        """Id with which the run can be resumed; None where the system has none."""
        return None

    def start(self) -> None:
        """Open the run."""

    def log_config(self, values: Mapping[str, Any]) -> bool:
        """Store hyperparameters: a flat mapping, nested keys joined with ``/``, values int, float, bool, str or None."""
        return False

    def log_scalars(self, values: Mapping[str, float | int | str | bool], step: int | None) -> bool:
        """Store one row of values."""
        raise NotImplementedError

    def log_text(self, name: str, text: str, step: int | None) -> bool:
        """Store a text."""
        return False

    def log_images(self, name: str, images: Sequence[Any], step: int | None) -> bool:
        """Store images: uint8 NumPy arrays of shape (height, width, 3 or 4)."""
        return False

    def log_figure(self, name: str, figure: Any, step: int | None) -> bool:
        """Store a matplotlib or plotly figure."""
        return False

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int | None) -> bool:
        """Store a table."""
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
