"""Files and directories that survive a crash: checksums, fsync, atomic renames, locks, removal in the right order."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import shutil
import sys
import uuid
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "ChecksummedFile",
    "DirectoryLock",
    "FileRecord",
    "exchange",
    "explain_os_error",
    "fsync_directory",
    "fsync_file",
    "lock_is_held",
    "remove_checkpoint",
    "rename_new",
    "temporary_name",
    "write_file",
]

MANIFEST = "manifest.json"
_BLOCK = 8 << 20
_MOST_PENDING = 32
_WRITEBACK = 32 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What the manifest says about a file.

    Args:
        size: Bytes.
        checksum: ``"crc32:"`` and eight hexadecimal digits.
    """

    size: int
    checksum: str


class ChecksummedFile:
    """A new file that is checksummed while it is written, on another thread, and fsynced when closed.

    A context manager; `record` is set when the block ends well. If it doesn't, the file is left as it is: it lies in a temporary
    directory that is removed as a whole.

    Args:
        path: The file; must not exist.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a")
        >>> with ChecksummedFile(path) as file:
        ...     file.write(b"123456789")
        >>> file.record
        FileRecord(size=9, checksum='crc32:cbf43926')
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.record = FileRecord(0, "")
        self._size = 0
        self._started = 0  # bytes that are on their way to the disk
        self._crc = 0
        self._pending: deque[Future[int]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> ChecksummedFile:
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        try:
            if kind is None:
                os.fsync(self._fd)
                self.record = FileRecord(self._size, f"crc32:{self._checksum():08x}")
        finally:
            if self._pool is not None:
                self._pool.shutdown()
            os.close(self._fd)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes. The memory must not change until the file is closed."""
        view = memoryview(data)
        for start in range(0, len(view), _BLOCK):
            block = view[start : start + _BLOCK]
            if len(block) < _BLOCK // 8:
                self._crc = zlib.crc32(block, self._checksum())
            else:  # both release the GIL
                self._pool = self._pool or ThreadPoolExecutor(1, "drivetrain-checksum")
                self._pending.append(self._pool.submit(self._add, block))
                # The thread may fall behind where cores are busy; what it has yet to read stays in memory.
                while len(self._pending) > _MOST_PENDING:
                    self._pending.popleft().result()
            self._size += len(block)
            while block:
                block = block[os.write(self._fd, block) :]
            if self._size - self._started >= _WRITEBACK:
                _start_writeback(self._fd, self._started, self._size - self._started)
                self._started = self._size

    def _add(self, block: memoryview) -> int:
        self._crc = zlib.crc32(block, self._crc)
        return self._crc

    def _checksum(self) -> int:
        while self._pending:
            self._pending.popleft().result()
        return self._crc


def _start_writeback(fd: int, offset: int, count: int) -> None:
    """Have the system begin to write to the disk, so that the fsync at the end finds little left. Where it can't, nothing is lost but time."""
    if sys.platform.startswith("linux"):
        function = getattr(_libc(), "sync_file_range", None)
        if function is not None:
            write = 2  # SYNC_FILE_RANGE_WRITE: start, don't wait
            function(fd, ctypes.c_int64(offset), ctypes.c_int64(count), write)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def write_file(path: Path, data: bytes) -> FileRecord:
    """Write a new file, fsynced.

    Example:
        >>> import tempfile
        >>> write_file(Path(tempfile.mkdtemp(), "a"), b"").size
        0
    """
    with ChecksummedFile(path) as file:
        file.write(data)
    return file.record


def fsync_file(path: Path) -> None:
    """Make a file's content durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_directory(path: Path) -> None:
    """Make a directory's entries durable, where the system can."""
    if sys.platform != "win32":
        fsync_file(path)


def temporary_name(name: str, purpose: str) -> str:
    """A hidden name beside ``name`` that nobody else uses: ``.checkpoint_3.saving-1f0c...``."""
    return f".{name}.{purpose}-{uuid.uuid4().hex[:12]}"


def rename_new(source: Path, target: Path) -> None:
    """Rename a directory to a name that must be free (or an empty directory), and make it durable.

    Raises:
        FileExistsError: If the name is taken.
    """
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) or (
            sys.platform == "win32" and target.exists()
        ):
            raise FileExistsError(errno.EEXIST, "exists", str(target)) from error
        raise
    fsync_directory(target.parent)


def exchange(source: Path, target: Path) -> None:
    """Give ``source`` the name ``target``, and ``target`` the name ``source``, in one step where the system can.

    Elsewhere ``target`` moves aside first; if the process dies between the two renames it is found under its ``.replaced-`` name.
    """
    if not _exchange_at_once(source, target):
        aside = target.parent / temporary_name(target.name, "replaced")
        target.rename(aside)
        source.rename(target)
        aside.rename(source)
    fsync_directory(target.parent)


def _exchange_at_once(source: Path, target: Path) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(_libc(), "renameat2", None)
    if rename is None:
        return False
    at_cwd, exchange_flag = -100, 2
    if rename(at_cwd, os.fsencode(source), at_cwd, os.fsencode(target), exchange_flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # this file system can't
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))


class DirectoryLock:
    """Marks a directory as in use by a live process: the system lets go when the process dies."""

    def __init__(self, path: Path) -> None:
        self._fd: int | None = None
        if fcntl is not None:
            self._fd = os.open(path, os.O_RDONLY)
            with contextlib.suppress(OSError):  # a file system without locks: age decides, see lock_is_held
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Let go. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def lock_is_held(path: Path, *, grace_seconds: float = 24 * 3600.0) -> bool:
    """Whether a live process works in a directory. Without locks: whether it changed within ``grace_seconds``."""
    import time

    if fcntl is not None:
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        except OSError:
            pass
        finally:
            os.close(fd)
    with contextlib.suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime < grace_seconds
    return False


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint so that at no time a part of it looks whole: its manifest goes first."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        (path / MANIFEST).unlink()
        fsync_directory(path)
    while path.exists():
        with contextlib.suppress(FileNotFoundError):  # another process removes it at the same time
            shutil.rmtree(path)


@contextlib.contextmanager
def explain_os_error(what: str, advice: str = "") -> Iterator[None]:
    """Turn the system's errors into a `CheckpointError` that names the file and says what to do."""
    try:
        yield
    except OSError as error:
        name = error.filename2 or error.filename
        where = f" ({os.fsdecode(name)})" if isinstance(name, (str, bytes)) else ""
        raise CheckpointError(f"{what}{where}: {error.strerror or error}.{_advice(error, advice)}") from error


def _advice(error: OSError, advice: str) -> str:
    hints: dict[Any, str] = {
        errno.ENOSPC: " Free some space or save elsewhere.",
        errno.EDQUOT: " The quota is used up: free some space or save elsewhere.",
        errno.EACCES: " Check the permissions.",
        errno.EPERM: " Check the permissions.",
        errno.EROFS: " The file system is read-only: save elsewhere.",
    }
    hint = hints.get(error.errno, "")
    return f"{hint} {advice}".rstrip() if advice else hint
