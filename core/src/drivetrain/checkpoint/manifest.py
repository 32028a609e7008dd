"""The manifest: the last file of a checkpoint to be written, and the proof that all the others are there.

It lists every file with its size and checksum, and says what wrote them. A directory without a manifest is no checkpoint.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from drivetrain.checkpoint._files import MANIFEST, FileRecord, write_file
from drivetrain.checkpoint.location import Location, RemotePath
from drivetrain.errors import CheckpointError

__all__ = ["FORMAT_VERSION", "MANIFEST", "FileEntry", "Manifest"]

#: Version of the directory's layout. A reader reads its own version and all earlier ones.
FORMAT_VERSION = 1
_KIND = "drivetrain-checkpoint"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a checkpoint.

    Args:
        size: Bytes.
        checksum: As `drivetrain.checkpoint.checksum_file` gives it.
        content: What it holds: "tensors:model", "state", "rank:3", "index:model", or "other" for what a hook wrote.
    """

    size: int
    checksum: str
    content: str = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of.

    Args:
        files: Entries by path, relative to the checkpoint, with ``/``.
        format: Name of the checkpoint format of its tensor files.
        world_size: Number of processes that saved it.
        ranks: The ranks whose state it holds: all, or those of one machine.
        run: Identifies the run; a run that goes on from a checkpoint keeps its id.
        created: Time in UTC, ISO 8601.
        counters: Steps, epochs and the like.
        facts: Backend, precision, versions.
        metadata: The user's own.
        version: Of the directory's layout.

    Example:
        >>> manifest = Manifest(files={"state.json": FileEntry(2, "crc32:00000000", "state")}, format="safetensors", world_size=1)
        >>> Manifest.parse(manifest.to_bytes()) == manifest
        True
    """

    files: Mapping[str, FileEntry]
    format: str
    world_size: int
    ranks: tuple[int, ...] = (0,)
    run: str = ""
    created: str = ""
    counters: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    version: int = FORMAT_VERSION

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files.values())

    def holding(self, content: str) -> list[str]:
        """Paths of the files with this content.

        Example:
            >>> files = {"a": FileEntry(0, "", "tensors:model"), "b": FileEntry(0, "", "state")}
            >>> Manifest(files=files, format="safetensors", world_size=1).holding("tensors:model")
            ['a']
        """
        return sorted(name for name, entry in self.files.items() if entry.content == content)

    def to_bytes(self) -> bytes:
        """As JSON; its last line is the checksum of the rest."""
        body = {
            "kind": _KIND,
            "version": self.version,
            "created": self.created,
            "run": self.run,
            "format": self.format,
            "world_size": self.world_size,
            "ranks": list(self.ranks),
            "counters": dict(self.counters),
            "metadata": dict(self.metadata),
            "facts": dict(self.facts),
            "files": {
                name: {"size": e.size, "checksum": e.checksum, "content": e.content}
                for name, e in sorted(self.files.items())
            },
        }
        text = json.dumps(body, indent=1, allow_nan=False)
        assert text.endswith("\n}")
        return f'{text[:-2]},\n "manifest_checksum": "{_self_checksum(text)}"\n}}'.encode()

    @classmethod
    def parse(cls, data: bytes) -> Manifest:
        """Read what `to_bytes` wrote.

        Raises:
            CheckpointError: If it is damaged, of a later version, not a checkpoint's, or names a file outside.
        """
        try:
            body = json.loads(data)
            if not isinstance(body, dict) or body.get("kind") != _KIND:
                raise CheckpointError(f"{MANIFEST} isn't that of a checkpoint")
            version = body["version"]
            if not isinstance(version, int) or version > FORMAT_VERSION:
                raise CheckpointError(
                    f"it has format version {version}, this drivetrain reads up to {FORMAT_VERSION}: install a newer one"
                )
            checksum = body.pop("manifest_checksum")
            if checksum != _self_checksum(json.dumps(body, indent=1)):
                raise CheckpointError(f"{MANIFEST} is damaged: its checksum differs")
            files = {_checked(name): FileEntry(**entry) for name, entry in body["files"].items()}
            return cls(
                files=files,
                ranks=tuple(body["ranks"]),
                version=version,
                **{
                    key: body[key]
                    for key in ("format", "world_size", "run", "created", "counters", "facts", "metadata")
                },
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{MANIFEST} is damaged: {error}") from error

    @classmethod
    def read(cls, directory: Location) -> Manifest:
        """The manifest of a checkpoint.

        Raises:
            CheckpointError: If there is none, or it is damaged.
        """
        try:
            data = (directory / MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{directory} is no whole checkpoint: {_why_none(directory)}") from None
        except OSError as error:
            raise CheckpointError(f"{directory / MANIFEST} can't be read: {error.strerror}") from error
        try:
            return cls.parse(data)
        except CheckpointError as error:
            raise CheckpointError(f"{directory} is no whole checkpoint: {error}") from error

    def write(self, directory: Path) -> FileRecord:
        """Write it, fsynced."""
        return write_file(directory / MANIFEST, self.to_bytes())

    def check_files(self, directory: Location) -> None:
        """Check that each file is there, regular, and of the right size. Reads no content.

        Raises:
            CheckpointError: Naming the first that isn't.
        """
        if isinstance(directory, RemotePath):
            self._check_sizes(directory)
            return
        for name, entry in self.files.items():
            path = directory / name
            try:
                facts = os.lstat(path)
            except OSError as error:
                raise CheckpointError(f"{path} is missing or can't be read: {error.strerror}") from error
            if not stat.S_ISREG(facts.st_mode) or any(p.is_symlink() for p in _between(directory, path)):
                raise CheckpointError(f"{path} is no regular file")
            if facts.st_size != entry.size:
                raise CheckpointError(f"{path} has {facts.st_size} bytes, the manifest says {entry.size}")

    def _check_sizes(self, directory: RemotePath) -> None:
        try:
            sizes = directory.sizes()
        except OSError as error:
            raise CheckpointError(f"{directory} can't be read: {error.strerror}") from error
        for name, entry in self.files.items():
            if name not in sizes:
                raise CheckpointError(f"{directory / name} is missing")
            if sizes[name] != entry.size:
                raise CheckpointError(f"{directory / name} has {sizes[name]} bytes, the manifest says {entry.size}")


def _between(directory: Path, path: Path) -> list[Path]:
    """The folders inside ``directory`` that lead to ``path``."""
    return [parent for parent in path.parents if directory in parent.parents]


def _why_none(directory: Location) -> str:
    if not directory.exists():
        return "it doesn't exist"
    if not directory.is_dir():
        return "it is not a directory"
    return (
        f"it has no {MANIFEST} (the save didn't finish, or another program wrote it: then "
        "`drivetrain checkpoint convert` makes a checkpoint of it)"
    )


def _self_checksum(text: str) -> str:
    return f"crc32:{zlib.crc32(text.encode()):08x}"


def _checked(name: str) -> str:
    """A path that stays inside the checkpoint."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\\" in name or name[1:2] == ":" or ".." in parts or "\0" in name:
        raise CheckpointError(f"{MANIFEST} names a file outside of the checkpoint: {name!r}")
    return name
