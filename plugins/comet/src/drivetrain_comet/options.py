"""Options of the Comet tracker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drivetrain.config import Options

__all__ = ["CometOptions"]


@dataclass
class CometOptions(Options):
    """What ``init_kwargs={"comet": {...}}``, the file's section ``[comet]`` and the variables ``DRIVETRAIN_COMET_...`` set.

    ``init_kwargs`` may have any other keyword of ``comet_ml.Experiment`` besides.

    Args:
        mode: "online", or "offline" (an archive for ``comet upload``).
        workspace: Whose project it is.
        run_name: Name of the experiment as it is shown.
        tags: Tags of the experiment.
        group: Stored beside the experiment, to group by.
        description: A longer text about the experiment, stored beside it.
        offline_directory: Where archives go. Default: the logging directory, or what Comet is set to.

    Example:
        >>> CometOptions(mode="offline").mode
        'offline'
    """

    mode: Literal["online", "offline"] = "online"
    workspace: str | None = None
    run_name: str | None = None
    tags: tuple[str, ...] = ()
    group: str | None = None
    description: str | None = None
    offline_directory: str | None = None
