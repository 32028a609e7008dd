"""Settings of the DeepSpeed prototype."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.config import Options


@dataclass
class ZeROOptions(Options):
    """What is sharded.

    Args:
        stage: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
    """

    stage: int = 2
