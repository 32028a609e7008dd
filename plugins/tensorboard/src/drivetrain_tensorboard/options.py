"""Options of the TensorBoard tracker."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.config import Options

__all__ = ["TensorBoardOptions"]


@dataclass
class TensorBoardOptions(Options):
    """What ``init_kwargs={"tensorboard": {...}}``, the file's section ``[tensorboard]`` and the variables ``DRIVETRAIN_TENSORBOARD_...`` set.

    Args:
        run_name: Name of the run's directory; a number is added if there is such a run already. Default: made of the time.
        log_dir: The run's directory itself, instead of one below the logging directory.
        max_queue: Events that may wait to be written.
        flush_secs: Seconds after which events are written to disk at the latest, where TensorFlow is installed; TensorBoard's own files are written
            at once. Both always are at a flush (each checkpoint, the end).
        filename_suffix: Added to the names of event files.
        purge_step: Events of an earlier process in this run with this step or a later one are void. Default: the step after the one that
            the run is resumed from.

    Example:
        >>> TensorBoardOptions(flush_secs=30).max_queue
        10
    """

    run_name: str | None = None
    log_dir: str | None = None
    max_queue: int = 10
    flush_secs: int = 120
    filename_suffix: str = ""
    purge_step: int | None = None
