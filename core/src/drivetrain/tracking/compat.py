"""Accelerate's way to write a tracker: subclass `GeneralTracker` and give an instance, ``log_with=[MyTracker()]``."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from drivetrain._lazy import load_target
from drivetrain.errors import ConfigurationError
from drivetrain.interfaces.tracker import Tracker, TrackerContext
from drivetrain.specs import TrackerSpec

__all__ = ["GeneralTracker", "GeneralTrackerAdapter", "on_main_process"]

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def on_main_process(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
    """Decorate a tracker's method: it runs on the main process alone, and returns None on the others.

    A tracker with ``main_process_only = False`` runs it on every rank. Who is main is read from the environment at each call, so a tracker may be
    made before the Accelerator, and no process group is joined for it.

    Example:
        >>> class Printer:
        ...     @on_main_process
        ...     def log(self, values):
        ...         return sorted(values)
        >>> Printer().log({"b": 1, "a": 2})
        ['a', 'b']
    """

    @functools.wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if getattr(self, "main_process_only", True):
            process = load_target("drivetrain.parallel.process_state:detect_process")(os.environ)
            if process.rank != 0:
                return None
        return method(self, *args, **kwargs)

    return call


class GeneralTracker:
    """Base class of trackers that users write in their script. Its methods are called from a background thread, in order.

    A subclass has the class attributes ``name`` (str) and ``requires_logging_directory`` (bool), the property ``tracker`` (the system's own object), and
    overrides what it needs. ``main_process_only=False`` makes it run on every rank. It may also have ``log_images(values, step)``,
    ``log_figure(name, figure, step)``, ``log_table(name, columns, data, step=)``, ``log_text``, ``log_histogram``, ``log_artifact(path)``.

    Raises:
        ConfigurationError: If a required attribute is missing.

    Example:
        >>> class Memory(GeneralTracker):
        ...     name = "memory"
        ...     requires_logging_directory = False
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.rows = []
        ...     @property
        ...     def tracker(self):
        ...         return self.rows
        ...     def log(self, values, step=None, **kwargs):
        ...         self.rows.append((step, values))
        >>> Memory().name
        'memory'
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True

    def __init__(self, _blank: bool = False) -> None:
        if _blank:
            return
        missing = [a for a in ("name", "requires_logging_directory", "tracker") if not hasattr(type(self), a)]
        missing = [a for a in missing if a not in vars(self)]
        if missing:
            raise ConfigurationError(
                f"The tracker class {type(self).__name__} lacks {', '.join(repr(a) for a in missing)}. Give it the class attributes "
                "'name' and 'requires_logging_directory' and a property 'tracker'."
            )

    def start(self) -> None:
        """Open the run. By default ``__init__`` has done so."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters, nested ones as ``"a/b"``."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Store one row of plain numbers and texts; ``kwargs`` are the ``log_kwargs`` for this tracker."""

    def finish(self) -> None:
        """Close the run."""


class GeneralTrackerAdapter(Tracker):
    """Makes the hub's `Tracker` of a `GeneralTracker`."""

    log_options = frozenset({"*"})

    def __init__(self, spec: TrackerSpec, context: TrackerContext, tracker: Any) -> None:
        super().__init__(spec, context)
        self.wrapped = tracker

    @staticmethod
    def spec_of(tracker: Any) -> TrackerSpec:
        """The descriptor of a user's tracker."""
        return TrackerSpec(
            name=str(tracker.name),
            summary=f"{type(tracker).__module__}.{type(tracker).__qualname__}",
            needs_directory=bool(tracker.requires_logging_directory),
            every_rank=not getattr(tracker, "main_process_only", True),
        )

    @property
    def run(self) -> Any:
        """What the user's tracker wraps."""
        return self.wrapped.tracker

    def start(self) -> None:
        """Open the run."""
        if hasattr(self.wrapped, "start"):
            self.wrapped.start()

    def log_config(self, values: Mapping[str, Any]) -> bool:
        """Store hyperparameters."""
        self.wrapped.store_init_configuration(dict(values))
        return True

    def log_scalars(self, values: Mapping[str, Any], step: int | None) -> None:
        """Store one row."""
        self.wrapped.log(dict(values), step=step, **self.call_options)

    def log_text(self, name: str, text: str, step: int | None) -> bool:
        """Store a text, if the user's tracker can."""
        return self._offer("log_text", name, text, step=step)

    def log_images(self, name: str, images: Sequence[Any], step: int | None) -> bool:
        """Store images, if the user's tracker can."""
        return self._offer("log_images", {name: list(images)}, step=step)

    def log_figure(self, name: str, figure: Any, step: int | None) -> bool:
        """Store a figure, if the user's tracker can."""
        return self._offer("log_figure", name, figure, step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int | None) -> bool:
        """Store a table, if the user's tracker can."""
        return self._offer("log_table", name, list(columns), [list(r) for r in rows], step=step)

    def log_histogram(self, name: str, values: Any, step: int | None) -> bool:
        """Store a histogram, if the user's tracker can."""
        return self._offer("log_histogram", name, values, step=step)

    def log_artifact(self, path: Path, name: str | None, step: int | None) -> bool:
        """Store a file, if the user's tracker can."""
        return self._offer("log_artifact", str(path), name=name, step=step)

    def log_summary(self, values: Mapping[str, Any]) -> bool:
        """Store final values, if the user's tracker can."""
        return self._offer("log_summary", dict(values))

    def finish(self) -> None:
        """Close the run."""
        self.wrapped.finish()

    def _offer(self, method: str, *args: Any, **extras: Any) -> bool:
        """Call a method if the user's tracker has it, with those of the extras that it takes."""
        function = getattr(self.wrapped, method, None)
        if function is None:
            return False
        parameters = inspect.signature(function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        taken = {k: v for k, v in extras.items() if takes_all or k in parameters}
        function(*args, **taken, **self.call_options)
        return True
