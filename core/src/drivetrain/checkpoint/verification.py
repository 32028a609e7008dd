"""Checking that a checkpoint on disk is what was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from drivetrain.checkpoint._files import MANIFEST, checksum_file
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.errors import CheckpointError

__all__ = ["Verification", "find_damage", "verify"]


@dataclass(frozen=True, slots=True)
class Verification:
    """Result of `verify`.

    Args:
        manifest: What the checkpoint should consist of.
        damage: One clause per broken file; empty if all is well.
        foreign: Files that the manifest doesn't know; they are never read.
    """

    manifest: Manifest
    damage: tuple[str, ...]
    foreign: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every file is what was written."""
        return not self.damage


def verify(directory: Path, *, progress: Callable[[int], None] | None = None) -> Verification:
    """Check every file of a checkpoint against its manifest.

    Args:
        directory: The checkpoint.
        progress: Called with the number of bytes of each file that was checked.

    Raises:
        CheckpointError: If there is no readable manifest.
    """
    directory = Path(directory)
    manifest = Manifest.read(directory)
    damage = tuple(find_damage(directory, manifest, manifest.files, progress=progress))
    return Verification(manifest, damage, tuple(_foreign_files(directory, manifest)))


def find_damage(
    directory: Path, manifest: Manifest, names: Iterable[str], *, progress: Callable[[int], None] | None = None
) -> Iterable[str]:
    """Yield a clause for each of these files that differs from the manifest, reading their content."""
    for name in names:
        entry = manifest.files[name]
        path = directory / name
        try:
            Manifest(files={name: entry}, format="", world_size=1).check_files(directory)
            checksum = checksum_file(path)
        except CheckpointError as error:
            yield str(error)
        except OSError as error:
            yield f"{path} can't be read: {error.strerror}"
        else:
            if checksum != entry.checksum:
                yield f"{path} is damaged: its checksum is {checksum}, the manifest says {entry.checksum}"
        if progress is not None:
            progress(entry.size)


def _foreign_files(directory: Path, manifest: Manifest) -> Iterable[str]:
    known = {*manifest.files, MANIFEST}
    for folder, _, names in os.walk(directory):
        for name in sorted(names):
            path = (Path(folder) / name).relative_to(directory).as_posix()
            if path not in known:
                yield path
