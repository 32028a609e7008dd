"""Options of the Neptune tracker."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.config import Options

__all__ = ["NeptuneOptions"]


@dataclass
class NeptuneOptions(Options):
    """What ``init_kwargs={"neptune": {...}}``, the file's section ``[neptune]`` and the variables ``DRIVETRAIN_NEPTUNE_...`` set.

    ``init_kwargs`` may have any other keyword of ``neptune_scale.Run`` besides.

    Args:
        mode: "offline", or "disabled". Neptune's hosted service has ended: any other is refused.
        workspace: The first part of the project's full name.
        run_name: Name of the experiment as it is shown.
        tags: Tags of the run.
        group: A tag by which runs are grouped.
        description: A longer text about the run.

    Example:
        >>> NeptuneOptions().mode
        'offline'
    """

    mode: str = "offline"
    workspace: str = "local"
    run_name: str | None = None
    tags: tuple[str, ...] = ()
    group: str | None = None
    description: str | None = None
