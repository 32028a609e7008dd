"""Checking that a checkpoint on disk is what was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from drivetrain.checkpoint._checksum import checksum_file
from drivetrain.checkpoint._files import MANIFEST
from drivetrain.checkpoint.location import Directory, Location, RemotePath, locate
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.mirror import Mirror
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


def verify(directory: Directory, *, progress: Callable[[int], None] | None = None) -> Verification:
    """Check every file of a checkpoint against its manifest.

    Args:
        directory: The checkpoint.
        progress: Called with the number of bytes of each file that was checked.

    Raises:
        CheckpointError: If there is no readable manifest.
    """
    path = locate(directory)
    manifest = Manifest.read(path)
    damage = tuple(find_damage(Mirror(path, manifest), manifest.files, progress=progress, keep=False))
    return Verification(manifest, damage, tuple(_foreign_files(path, manifest)))


def find_damage(
    files: Mirror, names: Iterable[str], *, progress: Callable[[int], None] | None = None, keep: bool = True
) -> Iterable[str]:
    """Yield a clause for each of these files that differs from the manifest, reading their content.

    Args:
        files: The checkpoint's.
        names: Which of them.
        progress: Called with the number of bytes of each file that was checked.
        keep: Whether remote files are copied here, to be read afterwards.
    """
    for name in names:
        entry = files.manifest.files[name]
        path = files.directory / name
        try:
            checksum = _checksum(files, name, keep)
        except CheckpointError as error:
            yield str(error)
        except OSError as error:
            yield f"{path} can't be read: {error.strerror}"
        else:
            if checksum != entry.checksum:
                yield f"{path} is damaged: its checksum is {checksum}, the manifest says {entry.checksum}"
        if progress is not None:
            progress(entry.size)


def _checksum(files: Mirror, name: str, keep: bool) -> str:
    if isinstance(files.directory, RemotePath):
        if keep:
            files.path(name)  # compares checksums itself
            return files.manifest.files[name].checksum
        return (files.directory / name).checksum()
    Manifest(files={name: files.manifest.files[name]}, format="", world_size=1).check_files(files.directory)
    return checksum_file(files.directory / name)


def _foreign_files(directory: Location, manifest: Manifest) -> Iterable[str]:
    known = {*manifest.files, MANIFEST}
    if isinstance(directory, RemotePath):
        yield from sorted(set(directory.sizes()) - known)
        return
    for folder, _, names in os.walk(directory):
        for name in sorted(names):
            path = (Path(folder) / name).relative_to(directory).as_posix()
            if path not in known:
                yield path
