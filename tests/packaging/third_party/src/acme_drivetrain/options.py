"""Settings of the backend."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.config import Options


@dataclass
class AcmeOptions(Options):
    """How gradients are averaged.

    Args:
        dtype: Name of the dtype that gradients travel in.
    """

    dtype: str = "float32"
