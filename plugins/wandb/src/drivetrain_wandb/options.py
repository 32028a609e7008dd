"""Options of the Weights & Biases tracker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from drivetrain.config import Options

__all__ = ["WandbOptions"]


@dataclass
class WandbOptions(Options):
    """What ``init_kwargs={"wandb": {...}}``, the file's section ``[wandb]`` and the variables ``DRIVETRAIN_WANDB_...`` set.

    ``init_kwargs`` may have any other keyword of ``wandb.init`` besides.

    Args:
        mode: "online", "offline" (files for ``wandb sync``), "shared" (every rank writes to the one run, with system metrics of its own) or "disabled".
            Default: what wandb itself is set to.
        run_name: Name of the run as it is shown.
        group: Runs of one group are shown together.
        tags: Tags of the run.
        description: A longer text about the run.
        entity: User or team to whom the run belongs.
        init_timeout: Seconds after which a start without an answer counts as failed.

    Example:
        >>> WandbOptions(mode="offline").init_timeout
        20.0
    """

    mode: Literal["online", "offline", "shared", "disabled"] | None = None
    run_name: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    description: str | None = None
    entity: str | None = None
    init_timeout: float = 20.0
