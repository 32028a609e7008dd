"""The files of a checkpoint as files of this machine."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from drivetrain.checkpoint.location import Location, RemotePath
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.errors import CheckpointError

__all__ = ["Mirror"]


class Mirror:
    """Gives paths to read from: the checkpoint's own where it is a directory, else copies, made and checked when first asked for.

    A context manager that removes the copies.

    Args:
        directory: The checkpoint.
        manifest: Its manifest.
    """

    def __init__(self, directory: Location, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest
        self._copies: Path | None = None

    def __enter__(self) -> Mirror:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def path(self, name: str) -> Path:
        """Path of one of the manifest's files.

        Raises:
            CheckpointError: If it can't be copied, or isn't what was written.
        """
        if not isinstance(self.directory, RemotePath):
            return self.directory / name
        if self._copies is None:
            self._copies = Path(tempfile.mkdtemp(prefix="drivetrain-checkpoint-"))
        copy = self._copies / name
        if not copy.exists():
            self._fetch(self.directory / name, name, copy)
        return copy

    def folder(self) -> Path:
        """A directory with the files that hooks wrote, for hooks that read them."""
        if not isinstance(self.directory, RemotePath):
            return self.directory
        for name in self.manifest.holding("other"):
            self.path(name)
        return self.path(self.manifest.holding("state")[0]).parent  # beside which they were written

    def close(self) -> None:
        """Remove the copies. Idempotent."""
        if self._copies is not None:
            shutil.rmtree(self._copies, ignore_errors=True)
            self._copies = None

    def _fetch(self, source: RemotePath, name: str, copy: Path) -> None:
        copy.parent.mkdir(parents=True, exist_ok=True)
        partial = copy.with_name(copy.name + ".part")
        try:
            checksum = source.download(partial)
        except OSError as error:
            raise CheckpointError(f"{source} can't be read: {error.strerror}") from error
        expected = self.manifest.files[name].checksum
        if checksum != expected:
            raise CheckpointError(f"{source} is damaged: its checksum is {checksum}, the manifest says {expected}")
        partial.rename(copy)
