"""What a rank is doing, written where its launcher can read it at any time, also when the rank is stuck in native code or dead.

`drivetrain launch` lays a file of fixed size beside each rank's error file. The rank maps it and notes there each collective of this package,
each backward and each optimizer step: when, at which step and micro-batch, and at which line of the user's code. A note is one packed write
into memory, about a microsecond; names and places are written once and referred to by number. Without such a file (one process, another
launcher) nothing is noted. Imports no torch.

Layout, little-endian: magic and the number of bytes of text, `SLOTS` notes in a ring, then the texts, each
with its length before it.
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import sys
from _thread import get_ident
from collections.abc import Iterator
from pathlib import Path
from time import time_ns
from types import FrameType
from typing import Any, NamedTuple

from drivetrain._places import is_users

__all__ = ["Mark", "MarkLog", "Marks", "create", "marks", "marks_file", "read"]

SLOTS = 512
_MAGIC = b"DTMARKS1"
_RECORD = struct.Struct("<QQQQHHHH")  # time, count, number, step, what, place, micro-batch, whether it is numbered
_RECORD_SIZE = _RECORD.size
_START = 64
_TEXT = _START + SLOTS * _RECORD.size
SIZE = 1 << 16
NO_MICRO_BATCH = 0xFFFF

pack_record = _RECORD.pack_into
getframe = sys._getframe


class Mark(NamedTuple):
    """One note of a rank.

    Args:
        time: Nanoseconds since the epoch.
        number: How many numbered notes came before: equal on all ranks for what they do together.
        step: Optimizer steps so far.
        what: "gather", "backward".
        file, line, function: Where in the user's code; "" and 0 where that wasn't looked for.
        micro_batch: Place in the accumulation window, or None.
        numbered: Whether all ranks do this together.
    """

    time: int
    number: int
    step: int
    what: str
    file: str = ""
    line: int = 0
    function: str = ""
    micro_batch: int | None = None
    numbered: bool = True


class MarkLog(NamedTuple):
    """The latest notes of a rank, oldest first.

    Args:
        step: Optimizer steps so far.
        marks: At most `SLOTS`.
    """

    step: int
    marks: tuple[Mark, ...]

    def step_at(self, nanoseconds: int) -> int | None:
        """The number of optimizer steps at a moment; None for one before the oldest note."""
        step = None
        for mark in self.marks:
            if mark.time > nanoseconds:
                break
            step = mark.step
        return step

    def before(self, nanoseconds: int) -> Mark | None:
        """The latest note before a moment that has a place in the user's code."""
        return next((mark for mark in reversed(self.marks) if mark.file and mark.time <= nanoseconds), None)


class Marks:
    """Writes the notes of this process.

    Args:
        buffer: Memory of `SIZE` bytes.

    Example:
        >>> memory = bytearray(SIZE)
        >>> notes = Marks(memory)
        >>> notes.mark("gather")
        >>> [(mark.what, mark.number, mark.line) for mark in read(bytes(memory)).marks]
        [('gather', 0, 1)]
    """

    __slots__ = ("_buffer", "_count", "_depths", "_files", "_ids", "_numbered", "_owner", "_text", "step")

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self._owner = get_ident()
        self._count = self._numbered = self._text = 0
        #: Optimizer steps so far.
        self.step = 0
        self._ids: dict[str, int] = {}
        self._depths: dict[str, int] = {}
        #: By file: the numbers of its lines that were noted, or None if it isn't the user's.
        self._files: dict[str, dict[int, int] | None] = {Marks.mark.__code__.co_filename: None}
        buffer[: len(_MAGIC)] = _MAGIC

    def mark(self, what: str, micro_batch: int = NO_MICRO_BATCH, numbered: bool = True) -> None:
        """Note what is about to begin, and the line of the user's code that calls for it. Other threads' work isn't noted.

        Written for speed: this is what each collective pays.

        Args:
            what: Its name, one of a few.
            micro_batch: Place in the accumulation window.
            numbered: Whether all ranks do this together, in the same order.
        """
        if get_ident() != self._owner:
            return
        files = self._files
        try:  # as deep as the last time, mostly: each frame that is looked at costs
            depth = self._depths[what]
            frame = getframe(depth)
            lines = files[frame.f_code.co_filename]
            if lines is None or files[getframe(depth - 1).f_code.co_filename] is not None:
                frame, lines = self._find(what)
        except (KeyError, ValueError):
            frame, lines = self._find(what)
        line = frame.f_lineno
        place = lines.get(line)
        if place is None:
            place = lines[line] = self._number(f"{frame.f_code.co_filename}\0{line}\0{frame.f_code.co_name}")
        count = self._count
        pack_record(
            self._buffer,
            _START + count % SLOTS * _RECORD_SIZE,
            time_ns(),
            count,
            self._numbered,
            self.step,
            self._ids.get(what) or self._number(what),
            place,
            micro_batch,
            numbered,
        )
        self._count = count + 1
        if numbered:
            self._numbered += 1

    def stepped(self, step: int) -> None:
        """An optimizer step has ended; now there have been ``step``."""
        self.step = step
        if get_ident() != self._owner:
            return
        count = self._count
        at = _START + count % SLOTS * _RECORD_SIZE
        name = self._ids.get("step") or self._number("step")
        pack_record(self._buffer, at, time_ns(), count, self._numbered, step, name, 0, NO_MICRO_BATCH, False)
        self._count = count + 1

    def _find(self, what: str) -> tuple[FrameType, dict[int, int]]:
        """The innermost frame of the user's code, or the outermost frame where none is, and the lines of its file; called by `mark`."""
        frame = getframe(2)
        depth = 1
        while True:
            file = frame.f_code.co_filename
            if file not in self._files:
                self._files[file] = {} if is_users(file) else None
            lines = self._files[file]
            if lines is not None or frame.f_back is None:
                break
            frame = frame.f_back
            depth += 1
        if lines is None:
            return frame, {}
        self._depths[what] = depth
        return frame, lines

    def _number(self, text: str) -> int:
        """The number of a text, which is written down at its first use; 0 when there is no room left."""
        known = self._ids.get(text)
        if known is not None:
            return known
        data = text.encode("utf-8", "replace")[:4000]
        end = self._text + 2 + len(data)
        if _TEXT + end > SIZE:
            return 0
        struct.pack_into(f"<H{len(data)}s", self._buffer, _TEXT + self._text, len(data), data)
        self._text = end
        struct.pack_into("<I", self._buffer, len(_MAGIC), end)
        number = self._ids[text] = len(self._ids) + 1
        return number


def marks_file(error_file: Path) -> Path:
    """The file of a rank's notes, beside that of its exception. It is there if a launcher wants them."""
    return error_file.with_name(f"{error_file.name}.marks")


def create(file: Path) -> None:
    """Lay an empty file for a rank's notes."""
    file.write_bytes(bytes(SIZE))


@functools.cache
def marks() -> Marks | None:
    """Where this process notes what it does; None if nobody would read it."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return None
    try:
        with marks_file(Path(error_file)).open("r+b") as file:
            return Marks(mmap.mmap(file.fileno(), SIZE))
    except (OSError, ValueError):
        return None


def read(data: bytes) -> MarkLog:
    """The notes in a file's bytes; one that is being written at that moment may be left out. Empty if the rank has made none."""
    if len(data) < SIZE or not data.startswith(_MAGIC):
        return MarkLog(0, ())
    (used,) = struct.unpack_from("<I", data, len(_MAGIC))
    texts = ["", *_texts(data[_TEXT : _TEXT + used])]
    found = []
    for slot in range(SLOTS):
        when, count, number, step, what, place, micro, numbered = _RECORD.unpack_from(
            data, _START + slot * _RECORD.size
        )
        if count % SLOTS != slot or not 0 < what < len(texts) or place >= len(texts):
            continue
        file, line, function = texts[place].split("\0") if place else ("", "0", "")
        micro_batch = None if micro == NO_MICRO_BATCH else micro
        mark = Mark(when, number, step, texts[what], file, int(line), function, micro_batch, bool(numbered))
        found.append((count, mark))
    notes = tuple(mark for _, mark in sorted(found))
    return MarkLog(notes[-1].step if notes else 0, notes)


def _texts(data: bytes) -> Iterator[str]:
    at = 0
    while at + 2 <= len(data):
        (size,) = struct.unpack_from("<H", data, at)
        yield data[at + 2 : at + 2 + size].decode("utf-8", "replace")
        at += 2 + size
