"""How tensors and plain data are stored inside a checkpoint directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from drivetrain.specs import CheckpointFormatSpec

__all__ = ["CheckpointFormat"]


class CheckpointFormat:
    """Writes and reads one file of named tensors. Naming, sharding, manifest and commit are core's.

    Args:
        spec: The descriptor.
    """

    def __init__(self, spec: CheckpointFormatSpec) -> None:
        self.spec = spec

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        """Write CPU tensors of any dtype and shape, with a few strings, and fsync the file."""
        raise NotImplementedError

    def read(self, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor, on the CPU. Must run no code that stands in the file."""
        raise NotImplementedError

    def metadata(self, path: Path) -> dict[str, str]:
        """The strings given to `write`."""
        raise NotImplementedError
