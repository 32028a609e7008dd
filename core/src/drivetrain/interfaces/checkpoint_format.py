"""How tensors are stored inside a checkpoint directory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from drivetrain.specs import CheckpointFormatSpec

__all__ = ["CheckpointFormat", "TensorReader"]


class TensorReader:
    """Random access to the tensors of one file. A context manager; this one holds all tensors in memory.

    Args:
        tensors: The tensors by name.
        metadata: The strings given to `CheckpointFormat.write`.

    Example:
        >>> with TensorReader({"w": torch.arange(4)}, {}) as reader:
        ...     reader.shape("w"), reader.read("w", (slice(1, 3),))
        ((4,), tensor([1, 2]))
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
        self._tensors = tensors
        self.metadata = dict(metadata)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def names(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""
        return self._tensors[name].dtype

    def read(self, name: str, region: tuple[slice, ...] | None = None) -> torch.Tensor:
        """A tensor, or the block of it given by one slice (with start and stop) per dimension, on the CPU in memory of its own."""
        tensor = self._tensors[name]
        return (tensor if region is None else tensor[region]).clone()

    def view(self, name: str, region: tuple[slice, ...] | None = None) -> torch.Tensor:
        """As `read`, but the memory may be shared with the file: to be copied from at once, not to be kept or changed."""
        return self.read(name, region)

    def close(self) -> None:
        """Close the file."""


class CheckpointFormat:
    """Writes and reads one file of named tensors. Naming, sharding, manifest and commit are core's.

    Args:
        spec: The descriptor.
    """

    def __init__(self, spec: CheckpointFormatSpec) -> None:
        self.spec = spec

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str | None:
        """Write dense tensors of any dtype and shape, on any device, with a few strings, to a new file, and fsync it.

        Returns:
            The file's checksum as `drivetrain.checkpoint.checksum_file` gives it, if it was computed on the way; with None core
            reads the file back.
        """
        raise NotImplementedError

    def read(self, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each tensor, on the CPU. Must run no code that stands in the file."""
        raise NotImplementedError

    def metadata(self, path: Path) -> dict[str, str]:
        """The strings given to `write`."""
        raise NotImplementedError

    def open(self, path: Path) -> TensorReader:
        """Open a file for random access. A format that can read parts of a file overrides this; here all of it is read."""
        return TensorReader(dict(self.read(path)), self.metadata(path))
