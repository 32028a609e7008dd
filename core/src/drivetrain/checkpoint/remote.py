"""Writing a checkpoint where nothing can be renamed: to object storage. The manifest comes last, and until then there is no checkpoint.

A save claims its place with a marker that only one can make. Files go straight to their final names; the manifest is one object, which appears at once. To
replace a checkpoint the new files go to a folder inside of it, and the new manifest names those: at every moment there is one that is whole. What a
killed save leaves has a marker and no manifest; a later save of the same run removes it, and any save after a day.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import time
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.checkpoint._checksum import checksum_file
from drivetrain.checkpoint._files import MANIFEST, explain_os_error, write_file
from drivetrain.checkpoint.capture import Snapshot
from drivetrain.checkpoint.commit import INTACT, Transaction, other_files, wait_until_visible
from drivetrain.checkpoint.location import Location, RemotePath, locate
from drivetrain.checkpoint.manifest import FileEntry, Manifest
from drivetrain.checkpoint.naming import checkpoint_name, list_checkpoints, next_number
from drivetrain.errors import CheckpointError
from drivetrain.interfaces.checkpoint_format import CheckpointFormat

__all__ = ["RemoteTransaction", "remove_remote"]

_MARKER = ".saving"
_DAY = 24 * 3600.0


class RemoteTransaction(Transaction):
    """One save to object storage. Every rank writes a file to its own temporary directory, uploads it and removes it."""

    _final: RemotePath | None = None
    #: Where this save's files go, below the final path: "" or a folder.
    _prefix = ""

    def begin(self) -> None:
        """Claim the place, and see that every rank sees it."""
        url, self._prefix = self._agreement.lead("claiming the checkpoint's place", self._claim)
        self._final = final = _remote(locate(url))
        self._uploaded: list[str] = []
        with self._agreement.together("finding the checkpoint's place"):
            self._directory = Path(tempfile.mkdtemp(prefix="drivetrain-checkpoint-"))
            marker = final / f"{self._prefix}{_MARKER}"
            wait_until_visible(marker, self._visibility_timeout, self._agreement.process.rank)

    def write(self, snapshot: Snapshot, format: CheckpointFormat) -> dict[str, FileEntry]:
        """Upload this rank's files. Not collective."""
        entries = {}
        for stem, file in snapshot.tensors.items():
            name = stem + (format.spec.suffix or ".bin")
            path = self.directory / name
            with explain_os_error(f"{name} can't be written", INTACT):
                checksum = format.write(path, file.tensors, file.metadata) or checksum_file(path)
                entry = FileEntry(path.stat().st_size, checksum, file.content)
            entries[self._prefix + name] = self._upload(name, entry)
        for name, document in snapshot.documents.items():
            with explain_os_error(f"{name} can't be written", INTACT):
                record = write_file(self.directory / name, document.data)
            entry = FileEntry(record.size, record.checksum, document.content)
            entries[self._prefix + name] = self._upload(name, entry)
        return entries

    def commit(self, entries: Mapping[str, FileEntry], about: Mapping[str, Any]) -> Location:
        """Upload what hooks wrote, of each name the first rank's; then make it a checkpoint. Collective."""
        with self._agreement.together("looking at what hooks wrote"):
            others = dict(other_files(self.directory, {}))
        answers = self._agreement.exchange(sorted(others))
        before = {name for rank in range(self._agreement.process.rank) for name in answers[rank]}
        entries = dict(entries)
        with self._agreement.together("uploading what hooks wrote"):
            for name in sorted(set(others) - before):
                entry = FileEntry(others[name].stat().st_size, checksum_file(others[name]))
                entries[self._prefix + name] = self._upload(name, entry)
        path = super().commit(entries, about)
        self._remove_directory()
        return path

    def abort(self) -> None:
        """Remove what was written. Never raises: there is an error on its way already."""
        self._remove_directory()
        if self._final is None:
            return
        with contextlib.suppress(OSError):
            for name in self._uploaded:
                (self._final / name).remove()
            if self._agreement.leads:
                (self._final / f"{self._prefix}{_MARKER}").remove()

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _upload(self, name: str, entry: FileEntry) -> FileEntry:
        assert self._final is not None
        path = self.directory / name
        self._uploaded.append(self._prefix + name)
        with explain_os_error(f"{name} can't be uploaded", INTACT):
            (self._final / f"{self._prefix}{name}").upload(path)
        path.unlink()
        return entry

    # -- on the leader -----------------------------------------------------------------------------------------------------

    def _claim(self) -> list[str]:
        folder = _remote(self._target.folder)
        marker = json.dumps({"run": self._run, "time": time.time()}).encode()
        with explain_os_error(f"{folder} can't hold a checkpoint", INTACT):
            if self._target.name is not None:
                return self._claim_named(folder / self._target.name, marker)
            self._clean_leftovers(folder)
            number = next_number(folder, at_least=self._target.at_least)
            while True:  # another run may take the number first
                final = folder / checkpoint_name(number)
                with contextlib.suppress(FileExistsError):
                    (final / _MARKER).write_bytes(marker, new=True)
                    return [str(final), ""]
                number += 1

    def _claim_named(self, final: RemotePath, marker: bytes) -> list[str]:
        if final.is_file():
            raise CheckpointError(f"{final} is a file: give the checkpoint another directory")
        present = final.sizes()
        if present and MANIFEST not in present and not any(_is_marker(name) for name in present):
            raise CheckpointError(
                f"{final} holds other files and is no checkpoint. A checkpoint is a directory of its own: use {final / 'checkpoint'}, say"
            )
        if not present:
            with contextlib.suppress(FileExistsError):
                (final / _MARKER).write_bytes(marker, new=True)
                return [str(final), ""]
        prefix = f"save-{uuid.uuid4().hex[:12]}/"
        (final / f"{prefix}{_MARKER}").write_bytes(marker)
        return [str(final), prefix]

    def _commit(self, entries: dict[str, FileEntry], about: Mapping[str, Any]) -> str:
        final = self._final
        assert final is not None
        with explain_os_error("the checkpoint can't be committed", INTACT):
            manifest = Manifest(files=entries, **about)
            manifest.check_files(final)
            Manifest.parse(manifest.to_bytes())  # what can't be read must not be written
            (final / MANIFEST).write_bytes(manifest.to_bytes())
        self._uploaded = []  # they belong to a checkpoint now
        try:
            (final / f"{self._prefix}{_MARKER}").remove()
            self._remove_replaced(final, entries)
        except OSError as error:
            warnings.warn(f"files that {final} doesn't need any more can't be removed: {error.strerror}", stacklevel=2)
        return str(final)

    def _remove_replaced(self, final: RemotePath, entries: Mapping[str, FileEntry]) -> None:
        """Remove what the manifest doesn't name, but for what another live save is writing."""
        present = final.sizes()
        live = {name.removesuffix(_MARKER) for name in present if _is_marker(name) and not self._is_dead(final / name)}
        for name in present:
            folder = name.partition("/")[0] + "/" if name.startswith("save-") else ""
            if name not in entries and name != MANIFEST and folder not in live:
                (final / name).remove()

    def _clean_leftovers(self, folder: RemotePath) -> None:
        """Remove what killed saves left: places with a marker and no manifest."""
        for found in list_checkpoints(folder):
            path = _remote(found.path)
            if (path / _MARKER).is_file() and not (path / MANIFEST).is_file() and self._is_dead(path / _MARKER):
                path.remove()

    def _is_dead(self, marker: RemotePath) -> bool:
        """Whether whoever made a marker is gone: an earlier process of this run, or one that began a day ago."""
        try:
            facts = json.loads(marker.read_bytes())
            return bool(facts["run"] == self._run or time.time() - float(facts["time"]) > _DAY)
        except FileNotFoundError:
            return False  # it has just been committed
        except (ValueError, KeyError, TypeError):
            return True


def remove_remote(path: RemotePath) -> None:
    """Remove a checkpoint so that at no time a part of it looks whole; if that is cut short, the next save sees it as a leftover."""
    (path / _MARKER).write_bytes(json.dumps({"run": "", "time": 0}).encode())
    (path / MANIFEST).remove()
    path.remove()


def _is_marker(name: str) -> bool:
    return name.rpartition("/")[2] == _MARKER


def _remote(path: Location) -> RemotePath:
    assert isinstance(path, RemotePath)
    return path
