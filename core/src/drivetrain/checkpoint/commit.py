"""Writing a checkpoint so that it exists whole or not at all.

It is written to a hidden directory beside its final name, every file fsynced; then the manifest, then one rename. Whoever
finds the final name finds a whole checkpoint. What a killed save leaves behind has a name that nobody reads, and the next save removes it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.checkpoint._agree import Agreement
from drivetrain.checkpoint._checksum import checksum_file
from drivetrain.checkpoint._files import (
    MANIFEST,
    DirectoryLock,
    exchange,
    explain_os_error,
    fsync_directory,
    fsync_file,
    lock_is_held,
    remove_checkpoint,
    rename_new,
    temporary_name,
    write_file,
)
from drivetrain.checkpoint.capture import Snapshot
from drivetrain.checkpoint.location import Location, RemotePath, locate
from drivetrain.checkpoint.manifest import FileEntry, Manifest
from drivetrain.checkpoint.naming import checkpoint_name, next_number
from drivetrain.errors import CheckpointError
from drivetrain.interfaces.checkpoint_format import CheckpointFormat

__all__ = [
    "INTACT",
    "Target",
    "Transaction",
    "clean_leftovers",
    "other_files",
    "recover",
    "remove_old",
    "wait_until_visible",
]

_HOST = re.sub(r"[^A-Za-z0-9]", "", platform.node())[:32] or "host"
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<purpose>opening|saving|replaced)-(?:(?P<host>[A-Za-z0-9]+)-)?[0-9a-f]{12}")
INTACT = "The checkpoint was not made; earlier ones are as they were."


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint is to be.

    Args:
        folder: The directory that it will be in.
        name: Its name there, or None for ``checkpoint_<n>`` with the next free n.
        at_least: The lowest n.
    """

    folder: Location
    name: str | None = None
    at_least: int = 0

    def path(self) -> Location:
        """The final path, as far as is known now."""
        return self.folder / (self.name or checkpoint_name(next_number(self.folder, at_least=self.at_least)))


class Transaction:
    """One save, on every rank. Collective: `begin`, then `write` on each rank, then `commit`, or `abort`.

    Args:
        agreement: Of the ranks.
        target: Where to.
        run: Id of the run that saves.
        visibility_timeout: Seconds until a directory that one rank made must be seen by the others.
    """

    def __init__(
        self, agreement: Agreement, target: Target, *, run: str = "", visibility_timeout: float = 30.0
    ) -> None:
        self._agreement = agreement
        self._target = target
        self._run = run
        self._visibility_timeout = visibility_timeout
        self._lock: DirectoryLock | None = None
        self._directory: Path | None = None

    @property
    def directory(self) -> Path:
        """Where to write; there is none before `begin` and after the end."""
        assert self._directory is not None
        return self._directory

    def begin(self) -> None:
        """Make the temporary directory, and see that every rank sees it."""
        self._directory = Path(self._agreement.lead("making the checkpoint's directory", self._make_directory))
        with self._agreement.together("finding the checkpoint's directory"):
            wait_until_visible(self.directory, self._visibility_timeout, self._agreement.process.rank)

    def write(self, snapshot: Snapshot, format: CheckpointFormat) -> dict[str, FileEntry]:
        """Write this rank's files, fsynced. Not collective."""
        entries = {}
        for stem, file in snapshot.tensors.items():
            name = stem + (format.spec.suffix or ".bin")
            path = self.directory / name
            with explain_os_error(f"{name} can't be written", INTACT):
                checksum = format.write(path, file.tensors, file.metadata) or checksum_file(path)
                entries[name] = FileEntry(path.stat().st_size, checksum, file.content)
        for name, document in snapshot.documents.items():
            with explain_os_error(f"{name} can't be written", INTACT):
                record = write_file(self.directory / name, document.data)
            entries[name] = FileEntry(record.size, record.checksum, document.content)
        return entries

    def commit(self, entries: Mapping[str, FileEntry], about: Mapping[str, Any]) -> Location:
        """Make it a checkpoint, once all ranks have written. Collective.

        Args:
            entries: What this rank wrote.
            about: The other fields of the manifest.

        Returns:
            Its final path.
        """
        answers = self._agreement.exchange({n: [e.size, e.checksum, e.content] for n, e in entries.items()})
        merged = {n: FileEntry(*e) for r in self._agreement.members for n, e in answers[r].items()}
        return locate(self._agreement.lead("committing the checkpoint", lambda: self._commit(merged, about)))

    def abort(self) -> None:
        """Remove what was written. Never raises: there is an error on its way already."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)

    # -- on the leader -----------------------------------------------------------------------------------------------------

    def _make_directory(self) -> str:
        target, folder = self._target, _local(self._target.folder)
        with explain_os_error(f"{target.folder} can't hold a checkpoint", INTACT):
            made = [p for p in (folder, *folder.parents) if not p.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            for path in made:
                fsync_directory(path.parent)
            clean_leftovers(folder)
            if target.name is not None:
                _check_replaceable(_local(target.path()))
            # Locked before it has the name that others look at, so that nobody takes it for a leftover.
            opening = folder / temporary_name(target.path().name, f"opening-{_HOST}")
            opening.mkdir()
            self._lock = DirectoryLock(opening)
            directory = opening.rename(opening.with_name(opening.name.replace(".opening-", ".saving-")))
        self._directory = directory
        return str(directory)

    def _commit(self, entries: dict[str, FileEntry], about: Mapping[str, Any]) -> str:
        with explain_os_error("the checkpoint can't be committed", INTACT):
            try:
                Manifest(files=entries, **about).check_files(self.directory)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{error}. Each process must write to the same directory: use one that all machines share, or "
                    "ProjectConfiguration(save_on_each_node=True)"
                ) from None
            for name, path in other_files(self.directory, entries):
                fsync_file(path)
                entries[name] = FileEntry(path.stat().st_size, checksum_file(path))
            for folder, _, _ in os.walk(self.directory):
                fsync_directory(Path(folder))
            manifest = Manifest(files=entries, **about)
            Manifest.parse(manifest.to_bytes())  # what can't be read must not be written
            manifest.write(self.directory)
            fsync_directory(self.directory)
            final = self._rename()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        return str(final)

    def _rename(self) -> Path:
        if self._target.name is None:
            while True:  # another run may take the number first
                final = _local(self._target.path())
                try:
                    rename_new(self.directory, final)
                    return final
                except FileExistsError:
                    continue
        final = _local(self._target.path())
        try:
            rename_new(self.directory, final)
        except FileExistsError:
            _check_replaceable(final)
            exchange(self.directory, final)
            remove_old(self.directory)  # it now is the one that was replaced
        return final


def _local(path: Location) -> Path:
    assert isinstance(path, Path)
    return path


def other_files(directory: Path, entries: Mapping[str, Any]) -> Iterator[tuple[str, Path]]:
    """Files that hooks wrote."""
    for folder, subfolders, names in os.walk(directory):
        for name in names + [s for s in subfolders if (Path(folder) / s).is_symlink()]:
            path = Path(folder) / name
            relative = path.relative_to(directory).as_posix()
            if relative in entries:
                continue
            if relative == MANIFEST or path.is_symlink() or not path.is_file():
                raise CheckpointError(
                    f"a hook wrote {relative}, which can't be part of a checkpoint: only regular files can"
                )
            yield relative, path


def _check_replaceable(path: Path) -> None:
    """A checkpoint may be replaced; anything else is the user's."""
    if not path.exists():
        return
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file: give the checkpoint another directory")
    if not (path / MANIFEST).is_file() and any(path.iterdir()):
        raise CheckpointError(
            f"{path} holds other files and is no checkpoint. A checkpoint is a directory of its own, which is replaced as a "
            f"whole: use {path / 'checkpoint'}, say, or ProjectConfiguration(automatic_checkpoint_naming=True)"
        )


def clean_leftovers(folder: Path) -> None:
    """Remove what killed saves left in a folder, and finish replacements that were cut short. Live saves are left alone."""
    for path in sorted(folder.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or not path.is_dir():
            continue
        if match["purpose"] == "replaced":
            if not (folder / match["name"]).exists():
                path.rename(folder / match["name"])
                continue
        elif (match["host"] != _HOST or match["purpose"] == "opening") and _is_young(path):
            continue  # a lock of another machine may be invisible here
        if not lock_is_held(path):
            remove_checkpoint(path)


def _is_young(path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime < 24 * 3600
    except FileNotFoundError:
        return True


def remove_old(path: Location) -> None:
    """Remove a checkpoint that isn't needed any more. A failure is a warning: the new one is whole."""
    try:
        if isinstance(path, RemotePath):
            from drivetrain.checkpoint.remote import remove_remote

            remove_remote(path)
        else:
            remove_checkpoint(path)
    except OSError as error:
        warnings.warn(f"the old checkpoint {path} can't be removed: {error.strerror}", stacklevel=2)


def recover(path: Location) -> None:
    """Put a checkpoint back that was moved aside to be replaced when the process died. Nothing to do where renames can exchange."""
    if isinstance(path, RemotePath) or path.exists() or not path.parent.is_dir():
        return
    for candidate in path.parent.iterdir():
        match = _LEFTOVER.fullmatch(candidate.name)
        if match is not None and match["purpose"] == "replaced" and match["name"] == path.name:
            warnings.warn(f"{path} was being replaced when the process died; the earlier one is put back", stacklevel=2)
            candidate.rename(path)
            return


def wait_until_visible(path: Location, seconds: float, rank: int) -> None:
    """Wait for a path that another process made, on a file system that shows it late.

    Raises:
        CheckpointError: If it doesn't appear.
    """
    deadline = time.monotonic() + seconds
    pause = 0.01
    while not path.exists():
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"rank {rank} doesn't see {path}, which its first rank made {seconds:g} s ago: the directory isn't shared. "
                "Use one that all machines share, or ProjectConfiguration(save_on_each_node=True)"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.5)
        if isinstance(path, Path):
            with contextlib.suppress(OSError):  # a listing makes network file systems look again
                os.listdir(path.parent)  # noqa: PTH208
