"""Where a checkpoint lies: a directory of this machine, or a place that fsspec reaches, such as ``s3://bucket/run``."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

from drivetrain.errors import CheckpointError

__all__ = ["Directory", "Location", "RemotePath", "is_remote", "locate"]

_BLOCK = 8 << 20
_MANGLED = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A path inside a file system of fsspec's, with the few operations of ``pathlib`` that checkpoints need.

    Nothing is remembered: each call asks the storage. Whatever goes wrong is an `OSError` that names the URL.

    Args:
        fs: The file system.
        path: Inside of it, without a slash at the end.

    Example:
        >>> place = locate("memory://demo/run")
        >>> (place / "a.txt").write_bytes(b"text", new=True)
        >>> str(place / "a.txt"), (place / "a.txt").read_bytes(), place.sizes()
        ('memory://demo/run/a.txt', b'text', {'a.txt': 4})
        >>> place.remove()
        >>> place.exists()
        False
    """

    fs: Any = field(compare=False)
    path: str

    def __str__(self) -> str:
        return str(self.fs.unstrip_protocol(self.path)).replace(":///", "://")

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.fs, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """Without the last part."""
        return RemotePath(self.fs, self.path.rpartition("/")[0])

    def exists(self) -> bool:
        """Whether there is such an object, or any below it."""
        with self._asking():
            return bool(self.fs.exists(self.path))

    def is_dir(self) -> bool:
        """Whether there are objects below it."""
        with self._asking():
            return bool(self.fs.isdir(self.path))

    def is_file(self) -> bool:
        """Whether it is an object."""
        with self._asking():
            return bool(self.fs.isfile(self.path))

    def iterdir(self) -> Iterator[RemotePath]:
        """What lies directly below."""
        with self._asking():
            found = self.fs.ls(self.path, detail=False)
        yield from (RemotePath(self.fs, path.rstrip("/")) for path in found if path.rstrip("/") != self.path)

    def sizes(self) -> dict[str, int]:
        """Bytes of all objects below, by relative path."""
        with self._asking():
            found = self.fs.find(self.path, detail=True)
        return {path[len(self.path) + 1 :]: int(facts["size"]) for path, facts in found.items() if path != self.path}

    def read_bytes(self) -> bytes:
        """The object's content."""
        with self._asking():
            return cast("bytes", self.fs.cat_file(self.path))

    def write_bytes(self, data: bytes, *, new: bool = False) -> None:
        """Make the object, at once.

        Args:
            data: Its content.
            new: Raise `FileExistsError` if there is one already. Where the storage can't do both in one step it is looked for first.
        """
        with self._asking():
            if not new:
                self.fs.pipe_file(self.path, data)
                return
            try:
                self.fs.pipe_file(self.path, data, mode="create")
            except (TypeError, ValueError, NotImplementedError):
                if self.fs.exists(self.path):
                    raise FileExistsError(errno.EEXIST, "exists", str(self)) from None
                self.fs.pipe_file(self.path, data)

    def upload(self, source: Path) -> None:
        """Make the object of a local file, in parallel parts where the storage takes them."""
        with self._asking():
            self.fs.put_file(str(source), self.path)

    def download(self, target: Path) -> str:
        """Copy the object to a local file; its checksum, as manifests hold it."""
        crc = 0
        with target.open("wb") as file:
            for block in self._blocks():
                crc = zlib.crc32(block, crc)
                file.write(block)
        return f"crc32:{crc:08x}"

    def checksum(self) -> str:
        """The content's checksum, as manifests hold it; nothing is kept."""
        crc = 0
        for block in self._blocks():
            crc = zlib.crc32(block, crc)
        return f"crc32:{crc:08x}"

    def remove(self) -> None:
        """Remove the object, or all below it. What isn't there is no error."""
        with self._asking(), contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.path, recursive=True)

    def _blocks(self) -> Iterator[bytes]:
        with self._asking(), self.fs.open(self.path, "rb", block_size=_BLOCK, cache_type="readahead") as file:
            while block := file.read(_BLOCK):
                yield block

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        self.fs.invalidate_cache()
        try:
            yield
        except OSError as error:
            if error.filename is None or error.errno is None:
                code = errno.ENOENT if isinstance(error, FileNotFoundError) else error.errno or errno.EIO
                raise type(error)(code, error.strerror or str(error) or os.strerror(code), str(self)) from error
            raise
        except Exception as error:  # drivers have their own, which know nothing of errno
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", str(self)) from error


Location: TypeAlias = "Path | RemotePath"
#: What callers may give for one; URLs as text.
Directory: TypeAlias = "str | os.PathLike[str] | RemotePath"


def is_remote(where: object) -> bool:
    """Whether a path, or a text that stands for one, is a URL.

    Example:
        >>> is_remote("s3://bucket/run"), is_remote("runs/first"), is_remote("file:///tmp/a")
        (True, False, False)
    """
    return isinstance(where, RemotePath) or (
        isinstance(where, str) and "://" in where and not where.startswith("file://")
    )


def locate(where: Directory) -> Location:
    """The path that a text stands for; a local one is absolute.

    Raises:
        CheckpointError: For a URL that nothing installed understands.

    Example:
        >>> locate("memory://a/b").name, locate("a/b").is_absolute()
        ('b', True)
        >>> locate("nothing://a")
        Traceback (most recent call last):
        ...
        drivetrain.errors.CheckpointError: nothing://a can't be reached: Protocol not known: nothing
    """
    if isinstance(where, RemotePath):
        return where
    text = os.fspath(where)
    if not is_remote(text):
        if isinstance(where, Path) and _MANGLED.match(text):
            raise CheckpointError(
                f"{text} was a URL before it was made a Path, which takes a slash away: give it as text"
            )
        return Path(text.removeprefix("file://")).absolute()
    import fsspec

    try:
        fs, path = fsspec.core.url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"{text} can't be reached: {error}") from error
    return RemotePath(fs, path.rstrip("/"))
