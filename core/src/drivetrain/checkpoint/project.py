"""Where a project keeps its checkpoints and logs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from drivetrain.checkpoint.location import is_remote
from drivetrain.config import Options
from drivetrain.errors import ConfigurationError

__all__ = ["ProjectConfiguration"]


@dataclass
class ProjectConfiguration(Options):
    """Where a project keeps its checkpoints and logs, and how checkpoints are named.

    Args:
        project_dir: The project's directory, or a URL that fsspec understands (``s3://bucket/run``). Numbered checkpoints lie in ``project_dir/checkpoints``.
        logging_dir: Directory of trackers that write files; ``project_dir`` if not given, unless that is a URL.
        automatic_checkpoint_naming: ``save_state()`` without a directory makes ``checkpoints/checkpoint_<n>``, and goes on after the highest n there is.
        total_limit: How many automatically named checkpoints of this run to keep; the oldest are removed, but only once a new one is whole. None keeps all.
        iteration: The lowest n to use next.
        save_on_each_node: Directories are local to each machine: every machine writes a checkpoint that serves its own processes.

    Example:
        >>> ProjectConfiguration(project_dir="run1", automatic_checkpoint_naming=True, total_limit=3).logging_dir
        'run1'
        >>> ProjectConfiguration(total_limit=0)
        Traceback (most recent call last):
        ...
        drivetrain.errors.ConfigurationError: ProjectConfiguration: total_limit must be at least 1, or None to keep all checkpoints; it is 0
    """

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        if self.total_limit is not None and self.total_limit < 1:
            raise ConfigurationError(
                f"ProjectConfiguration: total_limit must be at least 1, or None to keep all checkpoints; it is {self.total_limit}"
            )
        if self.iteration < 0:
            raise ConfigurationError(f"ProjectConfiguration: iteration must not be negative; it is {self.iteration}")
        if self.logging_dir is not None:
            self.logging_dir = os.fspath(self.logging_dir)
            if is_remote(self.logging_dir):
                raise ConfigurationError(
                    f"ProjectConfiguration: trackers write to a directory, and logging_dir={self.logging_dir!r} is a URL: give a path"
                )
        self.set_directories(self.project_dir)

    def explicit(self) -> dict[str, Any]:
        """The fields that were given: a logging directory that only follows the project's isn't one of them."""
        found = super().explicit()
        if "logging_dir" not in self._given and self.logging_dir == self.project_dir:
            found.pop("logging_dir", None)
        return found

    def set_directories(self, project_dir: str | os.PathLike[str] | None = None) -> None:
        """Set the project's directory, and the logging directory where none was given."""
        self.project_dir = None if project_dir is None else os.fspath(project_dir)
        if is_remote(self.project_dir):
            if self.save_on_each_node:
                raise ConfigurationError(
                    "ProjectConfiguration: save_on_each_node=True is for directories that each machine has for itself, and "
                    f"{self.project_dir} is one place for all: leave it out"
                )
        elif self.logging_dir is None:
            self.logging_dir = self.project_dir
