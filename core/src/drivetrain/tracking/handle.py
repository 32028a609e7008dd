"""What ``accelerator.get_tracker(name)`` returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.interfaces.tracker import Tracker
    from drivetrain.tracking.hub import TrackerHub

__all__ = ["InertTracker", "TrackerHandle"]


class TrackerHandle:
    """One tracker of a hub: what is logged through it goes to this tracker only, in order with what goes to all.

    Any other attribute is the tracker's own (``handle.writer``, ``handle.run``).

    Args:
        hub: The hub.
        tracker: The tracker.
    """

    def __init__(self, hub: TrackerHub, tracker: Tracker) -> None:
        self._hub = hub
        self._tracker = tracker
        self.name = tracker.spec.name

    @property
    def tracker(self) -> Any:
        """The system's own run object."""
        return self._tracker.run

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store hyperparameters."""
        self._hub.log_config(values, only=self.name)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store one row; ``kwargs`` are options of this tracker."""
        self._hub.log(values, step, {self.name: kwargs} if kwargs else None, only=self.name)

    def log_images(
        self, values: Mapping[str, Any], step: int | None = None, *, dataformats: str | None = None, **kwargs: Any
    ) -> None:
        """Store images, see `TrackerHub.log_images`."""
        self._hub.log_images(values, step, dataformats=dataformats, log_kwargs=self._options(kwargs), only=self.name)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Store a table, see `TrackerHub.log_table`."""
        self._hub.log_table(
            table_name, columns, data, dataframe, step, log_kwargs=self._options(kwargs), only=self.name
        )

    def log_figure(self, name: str, figure: Any, step: int | None = None, **kwargs: Any) -> None:
        """Store a figure, see `TrackerHub.log_figure`."""
        self._hub.log_figure(name, figure, step, log_kwargs=self._options(kwargs), only=self.name)

    def log_histogram(self, name: str, values: Any, step: int | None = None, **kwargs: Any) -> None:
        """Store a distribution, see `TrackerHub.log_histogram`."""
        self._hub.log_histogram(name, values, step, log_kwargs=self._options(kwargs), only=self.name)

    def log_text(self, name: str, text: str, step: int | None = None, **kwargs: Any) -> None:
        """Store a text, see `TrackerHub.log_text`."""
        self._hub.log_text(name, text, step, log_kwargs=self._options(kwargs), only=self.name)

    def log_artifact(self, path: str | Path, name: str | None = None, step: int | None = None, **kwargs: Any) -> None:
        """Store a file, see `TrackerHub.log_artifact`."""
        self._hub.log_artifact(path, name, step, log_kwargs=self._options(kwargs), only=self.name)

    def log_artifacts(
        self, directory: str | Path, name: str | None = None, step: int | None = None, **kwargs: Any
    ) -> None:
        """Store all files below a directory, see `TrackerHub.log_artifacts`."""
        self._hub.log_artifacts(directory, name, step, log_kwargs=self._options(kwargs), only=self.name)

    def log_summary(self, values: Mapping[str, Any]) -> None:
        """Store final values."""
        self._hub.log_summary(values, only=self.name)

    def finish(self) -> None:
        """Make what was logged durable; the run itself is closed by ``end_training``."""
        self._hub.flush()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._tracker, name)

    def __repr__(self) -> str:
        return f"<tracker {self.name!r}>"

    def _options(self, kwargs: dict[str, Any]) -> dict[str, dict[str, Any]] | None:
        return {self.name: kwargs} if kwargs else None


class InertTracker:
    """Stands for a tracker on ranks where none runs: whatever is called, set or entered does nothing.

    Example:
        >>> inert = InertTracker("toy")
        >>> inert.log({"loss": 1}, step=3)
        <tracker 'toy' of another rank>
        >>> inert.run.summary["best"] = 0.5
        >>> with inert as run:
        ...     bool(run), list(run)
        (False, [])
    """

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __getattr__(self, name: str) -> InertTracker:
        if name.startswith("__"):
            raise AttributeError(name)  # not a sequence, not an array, not picklable by accident
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> InertTracker:
        """Do nothing."""
        return self

    def __getitem__(self, key: Any) -> InertTracker:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __enter__(self) -> InertTracker:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return f"<tracker {self.name!r} of another rank>"
