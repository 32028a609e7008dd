"""Where the output of the ranks goes: labelled lines on the terminal, files, or straight through."""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

__all__ = ["LineWriter", "OutputRouter", "Sink", "Source"]

#: Seconds after which an unfinished line (a prompt, a progress bar) is shown as it stands.
FLUSH_SECONDS = 0.2

_CHUNK = 1 << 16
_TURN = 16  # chunks that one rank may have read before it is another's turn
_REST = 1 << 12  # and at the end, when what still writes can only be a left-over process
_SEGMENT = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)")
_ERASE = b"\r\x1b[K"


class Sink:
    """A stream of the launcher's own: a file descriptor where it has one, else what stands for it (a notebook, a test).

    Args:
        stream: The stream.
        direct: Whether its file descriptor leads where it leads: in a notebook it does not.

    Example:
        >>> import io
        >>> stream = io.StringIO()
        >>> Sink(stream).write(b"text")
        >>> stream.getvalue()
        'text'
    """

    def __init__(self, stream: Any, *, direct: bool = True) -> None:
        self._stream = stream
        self.broken = False
        self.fd: int | None = None
        if direct:
            with contextlib.suppress(AttributeError, OSError, ValueError):
                self.fd = stream.fileno()
        self.is_terminal = self.fd is not None and os.isatty(self.fd)

    @property
    def identity(self) -> object:
        """Equal for two sinks that end in the same place."""
        if self.fd is None:
            return id(self._stream)
        status = os.fstat(self.fd)
        return (status.st_dev, status.st_ino)

    def write(self, data: bytes) -> None:
        """Write everything; a reader that is gone makes the sink ``broken``."""
        if self.broken:
            return
        try:
            if self.fd is None:
                self._stream.write(data.decode("utf-8", "replace"))
                self._stream.flush()
                return
            self._stream.flush()
            view = memoryview(data)
            while view:
                try:
                    view = view[os.write(self.fd, view) :]
                except BlockingIOError:  # some other program has set the terminal or pipe so
                    select.select([], [self.fd], [])
        except (OSError, ValueError):
            self.broken = True


@dataclass(slots=True, eq=False)
class Source:
    """One stream of one rank.

    Args:
        label: What stands before each line; empty for output that passes through as it is.
        writer: Where it is shown, or None.
        log: File that it goes to as well, or None.
        copy: Another source that gets the same, or None: with another label, for another writer.
    """

    label: bytes = b""
    writer: LineWriter | None = None
    log: IO[bytes] | None = None
    copy: Source | None = None
    pending: bytes = field(default=b"", init=False)
    needs_label: bool = field(default=True, init=False)
    last: float = field(default=0.0, init=False)

    def feed(self, data: bytes, now: float) -> None:
        """Take in what the rank wrote."""
        if self.log is not None and not self.log.closed:
            self.log.write(data)
        if self.writer is not None:
            self.writer.feed(self, data, now)
        self.last = now
        if self.copy is not None:
            self.copy.feed(data, now)

    def flush(self, *, before: float = float("inf")) -> None:
        """Write an unfinished line that has been waiting since ``before``."""
        if self.writer is not None:
            self.writer.flush(self, before=before)
        if self.copy is not None:
            self.copy.flush(before=before)

    @property
    def waiting(self) -> bool:
        """Whether an unfinished line is held back."""
        return bool(self.pending) or (self.copy is not None and self.copy.waiting)

    def writers(self) -> list[LineWriter]:
        """All writers that it feeds."""
        own = [] if self.writer is None else [self.writer]
        return own + ([] if self.copy is None else self.copy.writers())


class LineWriter:
    r"""Writes lines of several sources to one sink so that no line is mixed with another's.

    A line that ends in a carriage return (a progress bar) keeps that ending, and gets its label each time.

    Args:
        sink: Where to write.
        erase: Wipe the terminal's present line before a labelled one: another program shares the terminal and may have an unfinished
            line there, most often a progress bar that it will draw anew.

    Example:
        >>> import io
        >>> stream = io.StringIO()
        >>> writer = LineWriter(Sink(stream))
        >>> first, second = Source(label=b"[rank 0] "), Source(label=b"[rank 1] ")
        >>> writer.feed(first, b"to be ", 0.0)
        >>> writer.feed(second, b"hello\n", 0.0)
        >>> writer.feed(first, b"continued\n", 0.0)
        >>> stream.getvalue()
        '[rank 1] hello\n[rank 0] to be continued\n'
    """

    def __init__(self, sink: Sink, *, erase: bool = False) -> None:
        self.sink = sink
        self._erase = erase
        self._unfinished: Source | None = None  # whose line stands open on the sink

    def feed(self, source: Source, data: bytes, now: float) -> None:
        """Write the lines that are whole, keep the rest."""
        source.last = now
        if not source.label:
            self.sink.write(data)
            return
        data = source.pending + data
        out = bytearray()
        end = 0
        for match in _SEGMENT.finditer(data):
            end = match.end()
            self._add(out, source, match.group())
        source.pending = data[end:]
        if len(source.pending) > _CHUNK:
            self._add(out, source, source.pending)
            source.pending = b""
        if out:
            self.sink.write(bytes(out))

    def flush(self, source: Source, *, before: float = float("inf")) -> None:
        """Write an unfinished line that has been waiting since ``before``."""
        if source.pending and source.last <= before:
            out = bytearray()
            self._add(out, source, source.pending)
            source.pending = b""
            self.sink.write(bytes(out))

    def finish(self) -> None:
        """End the line that stands open."""
        if self._unfinished is not None:
            self.sink.write(b"\n")
            self._unfinished = None

    def _add(self, out: bytearray, source: Source, segment: bytes) -> None:
        text = segment.rstrip(b"\r\n")
        ending = segment[len(text) :]
        if self._unfinished not in (None, source):
            out += b"\n"
            self._unfinished.needs_label = True
        if source.needs_label and (text or ending != b"\r"):
            out += (_ERASE if self._erase and self._unfinished is not source else b"") + source.label
        out += text + ending
        source.needs_label = bool(ending)
        self._unfinished = None if ending.endswith(b"\n") else source


class OutputRouter:
    r"""A thread that reads the ranks' pipes, and tells when watched descriptors become ready.

    Example:
        >>> import io, os
        >>> stream = io.StringIO()
        >>> router = OutputRouter()
        >>> reading, writing = os.pipe()
        >>> router.add(reading, Source(label=b"[rank 0] ", writer=LineWriter(Sink(stream))))
        >>> _ = os.write(writing, b"hello\n")
        >>> os.close(writing)
        >>> router.close()
        >>> stream.getvalue()
        '[rank 0] hello\n'
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._lock = threading.Lock()
        self._sources: dict[int, Source] = {}
        self._writers: list[LineWriter] = []
        self._closing = False
        #: When anything was last read, by `time.monotonic`.
        self.last_read = time.monotonic()
        self._thread: threading.Thread | None = None

    def add(self, fd: int, source: Source) -> None:
        """Read ``fd`` (which becomes the router's own) until its end."""
        os.set_blocking(fd, False)
        with self._lock:
            self._sources[fd] = source
            self._writers += [w for w in source.writers() if w not in self._writers]
            self._selector.register(fd, selectors.EVENT_READ, source)
        self._start()

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the router's thread once ``fd`` (which becomes the router's own) is ready."""
        with self._lock:
            self._selector.register(fd, selectors.EVENT_READ, callback)
        self._start()

    def drain(self) -> None:
        """Read what the ranks have written up to now and write out unfinished lines."""
        with self._lock:
            for fd in list(self._sources):
                self._read(fd, _REST)
            for source in self._sources.values():
                source.flush()
            for writer in self._writers:
                writer.finish()

    def close(self) -> None:
        """Drain, end the thread and close all descriptors."""
        self._closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join()
        self.drain()
        with self._lock:
            for key in list(self._selector.get_map().values()):
                self._selector.unregister(key.fd)
                os.close(key.fd)
            self._selector.close()
            self._sources.clear()
        os.close(self._wake_writer)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="drivetrain-output", daemon=True)
            self._thread.start()
        else:
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_writer, b"\0")

    def _run(self) -> None:
        while not self._closing:
            waiting = any(source.waiting for source in list(self._sources.values()))
            ready = self._selector.select(FLUSH_SECONDS if waiting else None)
            with self._lock:
                for key, _ in ready:
                    self._handle(key)
                before = time.monotonic() - FLUSH_SECONDS
                for source in self._sources.values():
                    source.flush(before=before)

    def _handle(self, key: selectors.SelectorKey) -> None:
        if key.fd == self._wake_reader:
            os.read(key.fd, 512)
        elif isinstance(key.data, Source):
            self._read(key.fd, _TURN)
        elif key.fd in self._selector.get_map():
            self._selector.unregister(key.fd)
            os.close(key.fd)
            key.data()

    def _read(self, fd: int, chunks: int) -> None:
        source = self._sources.get(fd)
        if source is None:
            return
        for _ in range(chunks):
            try:
                data = os.read(fd, _CHUNK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if data:
                self.last_read = time.monotonic()
                source.feed(data, self.last_read)
            gone = (
                source.log is None and source.copy is None and source.writer is not None and source.writer.sink.broken
            )
            if not data or gone:  # a reader that is gone is gone for the rank too, as if it wrote there itself
                self._selector.unregister(fd)
                os.close(fd)
                del self._sources[fd]
                source.flush()
                return
