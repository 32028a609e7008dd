"""Where values wait that a tracker couldn't take: a file of JSON lines, in the order in which they were logged.

The first line says whose values these are, each other line is one logged thing::

    {"drivetrain_spool": 1, "tracker": "name", "project": "demo", "run_id": null, "rank": 0}
    {"kind": "row", "name": "", "step": 3, "time": 1.7e9, "payload": {"loss": 0.5}}
    {"kind": "images", "name": "samples", "step": 3, "time": 1.7e9, "payload": {"files": ["0.npy"]}}

Arrays and artifacts lie beside it in ``<file>.files/``. ``<file>.done`` holds the offset up to which the tracker has taken the lines since, ``<file>.run`` the id of
a run that was opened later, and how it ended. What the tracker refuses while it takes everything else is moved to ``<file>.rejected``. Nothing is ever unpickled.
While a process writes to the file, it holds a lock on it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drivetrain.errors import TrackerError
from drivetrain.tracking.encoding import decode, encode, read_lines, safe_name, unique_path
from drivetrain.tracking.media import figure_bytes, figure_image
from drivetrain.tracking.record import Record

__all__ = ["Spool", "read_spool"]


class Spool:
    """A queue on disk. Not safe for several threads: its owner holds a lock.

    Args:
        path: The file; made, with its directory, when the first record comes.
        header: What the first line says besides the version.

    Example:
        >>> import tempfile
        >>> spool = Spool(Path(tempfile.mkdtemp(), "spool", "toy.jsonl"), {"tracker": "toy"})
        >>> spool.append([Record("row", "", {"loss": float("nan")}, 1, 0.0), Record("text", "note", "hi", None, 0.0)])
        >>> [(first, offset), *_] = spool.read(10)
        >>> first.payload
        {'loss': nan}
        >>> spool.commit(1, offset); spool.pending
        1
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        self.header = header
        #: Records that wait.
        self.pending = 0
        #: Records that were refused for good.
        self.rejected = 0
        self._offset = 0
        self._file: Any = None
        self._files = 0

    @classmethod
    def reopen(cls, path: Path) -> Spool:
        """A spool that another process left.

        Raises:
            TrackerError: If it isn't a spool, or a process still writes to it.
        """
        header, start = _read_header(path)
        spool = cls(path, header)
        spool._file = path.open("ab", buffering=0)
        if not _lock(spool._file):
            spool.close()
            raise TrackerError(
                f"A process still writes to {path}: it delivers what is in it itself. Try again when it has ended."
            )
        done = path.with_name(path.name + ".done")
        spool._offset = int(done.read_text()) if done.exists() else start
        spool.pending = sum(1 for _ in read_lines(path, spool._offset))
        if spool._directory.is_dir():
            numbers = [int(p.name.partition(".")[0].partition("-")[0]) for p in spool._directory.iterdir()]
            spool._files = max(numbers, default=0)
        return spool

    def note_run(self, run_id: str | None, status: str) -> None:
        """Remember which run the records belong to."""
        self.header.update(run_id=run_id, status=status)
        if self.pending:
            note = self.path.with_name(self.path.name + ".run")
            note.write_bytes(encode({"run_id": run_id, "status": status}))

    @property
    def rejected_path(self) -> Path:
        """Where refused records are."""
        return self.path.with_name(self.path.name + ".rejected")

    def append(self, records: Iterable[Record]) -> None:
        """Add records at the end; they are in the operating system's hands when this returns.

        Raises:
            OSError: If the disk is full or gone; then none of them was added.
        """
        lines = [self._line(record) for record in records]
        if not lines:
            return
        if self._file is None:
            self._open()
        size = self._file.tell()
        try:
            data = memoryview(b"".join(lines))
            while data:
                data = data[self._file.write(data) :]
        except OSError:
            self.close()
            os.truncate(self.path, size)
            raise
        self.pending += len(lines)

    def read(self, count: int) -> list[tuple[Record, int]]:
        """The next records that wait, each with the offset to commit once it was delivered."""
        records: list[tuple[Record, int]] = []
        if self.pending:
            for data, offset in read_lines(self.path, self._offset):
                records.append((_from_json(data, self._directory), offset))
                if len(records) >= count:
                    break
        return records

    def commit(self, count: int, offset: int) -> None:
        """Note that ``count`` records, up to ``offset``, need not wait any more. A spool without records vanishes."""
        self._offset = offset
        self.pending -= count
        if self.pending:
            note = self.path.with_name(self.path.name + ".done")
            new = note.with_suffix(".new")
            new.write_text(str(offset))
            new.replace(note)
        else:
            self.close()
            for suffix in ("", ".done", ".run"):
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            if not self.rejected:
                shutil.rmtree(self._directory, ignore_errors=True)

    def skip(self, count: int) -> None:
        """Commit the next ``count`` records: they were delivered after all."""
        records = self.read(count)
        self.commit(len(records), records[-1][1])

    def reject(self, record: Record, error: BaseException) -> None:
        """Keep a record apart that was refused for its own sake. It is still the first that waits: commit it afterwards."""
        data = {**self._to_json(record), "error": f"{type(error).__name__}: {error}"}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.rejected_path.open("ab") as file:
            file.write(encode(data) + b"\n")
        self.rejected += 1

    def abandon(self) -> None:
        """Give up what waits, leave the file as it is, and go on in a new one."""
        self.close()
        self.pending, self._offset = 0, 0
        self.path = unique_path(self.path)

    def sync(self) -> None:
        """Make what waits durable."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Appending opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _directory(self) -> Path:
        return self.path.with_name(self.path.name + ".files")

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("ab", buffering=0)
        _lock(self._file)
        if self._file.tell() == 0:
            self._file.write(encode({"drivetrain_spool": 1, **self.header}) + b"\n")
            self._offset = self._file.tell()

    def _line(self, record: Record) -> bytes:
        record.resolve(timeout=10.0)
        try:
            data = self._to_json(record)
        except Exception as error:  # one figure that can't be drawn or artifact that is gone doesn't lose the others
            text = f"<{record.kind} that could not be kept: {type(error).__name__}: {error}>"
            data = {"kind": "text", "name": record.name, "step": record.step, "time": record.time, "payload": text}
        return encode(data) + b"\n"

    def _to_json(self, record: Record) -> dict[str, Any]:
        kind, payload = record.kind, record.payload
        if kind == "figure":
            image = figure_image(payload)
            if image is not None:
                kind, payload = "images", [image]
            else:
                content, suffix = figure_bytes(payload)
                kind, payload = "artifact", {"file": self._store(content, suffix)}
        if kind == "images":
            payload = {"files": [self._store_array(image) for image in payload]}
        elif kind == "histogram":
            payload = {"file": self._store_array(payload)}
        elif kind == "artifact" and not isinstance(payload, dict):
            payload = {"file": self._copy(payload)}
        data = {"kind": kind, "name": record.name, "step": record.step, "time": record.time, "payload": payload}
        options = {k: v for k, v in record.options.items() if type(v) in (int, float, bool, str, type(None))}
        return {**data, "options": options} if options else data

    def _next_file(self, suffix: str) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._files += 1
        return self._directory / f"{self._files}{suffix}"

    def _store(self, content: bytes, suffix: str) -> str:
        path = self._next_file(suffix)
        path.write_bytes(content)
        return path.name

    def _store_array(self, array: Any) -> str:
        import numpy as np

        path = self._next_file(".npy")
        np.save(path, array, allow_pickle=False)
        return path.name

    def _copy(self, source: Path) -> str:
        path = unique_path(self._next_file("-" + safe_name(source.name)))
        shutil.copyfile(source, path)
        return path.name


def _from_json(data: dict[str, Any], directory: Path) -> Record:
    import numpy as np

    kind, payload = data["kind"], data["payload"]

    def inside(name: str) -> Path:
        return directory / Path(name).name  # never a path out of the spool, whatever the file says

    if kind == "images":
        payload = [np.load(inside(name), allow_pickle=False) for name in payload["files"]]
    elif kind == "histogram":
        payload = np.load(inside(payload["file"]), allow_pickle=False)
    elif kind == "artifact":
        payload = inside(payload["file"])
    elif kind == "table":
        payload = tuple(payload)
    return Record(kind, data["name"], payload, data["step"], data["time"], options=data.get("options", {}))


def _lock(file: Any) -> bool:
    """Say that this process uses the file. Returns False if another one does."""
    try:
        import fcntl
    except ImportError:  # systems without
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The first line, with what was noted since, and where the records start."""
    try:
        header, start = next(read_lines(path))
    except (OSError, StopIteration, ValueError) as error:
        raise TrackerError(f"{path} can't be read: {error}") from error
    if not isinstance(header, dict) or "drivetrain_spool" not in header:
        raise TrackerError(f"{path} isn't a spool of a tracker.")
    note = path.with_name(path.name + ".run")
    noted = decode(note.read_bytes()) if note.exists() else {}
    return {k: v for k, v in {**header, **noted}.items() if k != "drivetrain_spool"}, start


def read_spool(path: str | Path) -> tuple[dict[str, Any], list[Record]]:
    """Read a spool file that another process left.

    Args:
        path: The ``.jsonl`` file.

    Returns:
        Its header, and the records that the tracker hasn't taken, in order.

    Raises:
        TrackerError: If it isn't a spool.

    Example:
        >>> import tempfile
        >>> spool = Spool(Path(tempfile.mkdtemp(), "toy.jsonl"), {"tracker": "toy"})
        >>> spool.append([Record("row", "", {"loss": 0.5}, 1, 0.0)])
        >>> header, records = read_spool(spool.path)
        >>> header["tracker"], records[0].payload
        ('toy', {'loss': 0.5})
    """
    path = Path(path)
    header, start = _read_header(path)
    done = path.with_name(path.name + ".done")
    offset = int(done.read_text()) if done.exists() else start
    directory = path.with_name(path.name + ".files")
    return header, [_from_json(data, directory) for data, _ in read_lines(path, offset)]
