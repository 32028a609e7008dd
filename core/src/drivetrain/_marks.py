"""What a rank is doing, written where its launcher can read it at any time, also when the rank is stuck in native code or dead.

`drivetrain launch` lays a file of fixed size beside each rank's error file. The rank maps it and notes there each collective of this package over all
ranks and each backward: when, after how many optimizer steps, at which micro-batch, and at which line of the user's code. A note is one packed write
into memory, about a microsecond; names and places are written once and referred to by number. Without such a file (one process, another
launcher) nothing is noted. Imports no torch.

Layout, little-endian: magic and the number of bytes of text, `SLOTS` notes in a ring, then the texts, each
with its length before it.
"""

from __future__ import annotations

import functools
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from time import time_ns
from types import CodeType
from typing import Any, NamedTuple

from drivetrain._places import is_users

__all__ = ["Mark", "MarkLog", "Marks", "create", "marks", "marks_file", "read"]

SLOTS = 512
_MAGIC = b"DTMARKS1"
_RECORD = struct.Struct("<QQQQHHH")  # time, number, step, when that ended, what, place, micro-batch
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
        number: How many notes came before: equal on all ranks for what they do together.
        step: Optimizer steps so far.
        stepped: When the last of them ended, nanoseconds since the epoch.
        what: "gather", "backward".
        file, line, function: Where in the user's code.
        micro_batch: Place in the accumulation window, or None.
    """

    time: int
    number: int
    step: int
    stepped: int
    what: str
    file: str = ""
    line: int = 0
    function: str = ""
    micro_batch: int | None = None


class MarkLog(NamedTuple):
    """The latest notes of a rank, oldest first.

    Args:
        marks: At most `SLOTS`.
        step: Optimizer steps so far, if there have been more than the last note knows.
        stepped: When the last of them ended.
    """

    marks: tuple[Mark, ...]
    step: int = 0
    stepped: int = 0

    def step_at(self, nanoseconds: int) -> int | None:
        """The number of optimizer steps at a moment; None for one before the oldest note."""
        if not self.marks or nanoseconds < self.marks[0].time:
            return None
        steps = [(mark.stepped, mark.step) for mark in self.marks] + [(self.stepped, self.step)]
        return max((step for when, step in steps if when <= nanoseconds), default=None)

    def before(self, nanoseconds: int) -> Mark | None:
        """The latest note before a moment."""
        return next((mark for mark in reversed(self.marks) if mark.time <= nanoseconds), None)


class Marks:
    """Writes the notes of this process, on the thread that trains.

    Args:
        buffer: Memory of `SIZE` bytes.

    Example:
        >>> memory = bytearray(SIZE)
        >>> notes = Marks(memory)
        >>> notes.mark("gather")
        >>> [(mark.what, mark.number, mark.line) for mark in read(bytes(memory)).marks]
        [('gather', 0, 1)]
    """

    __slots__ = ("_buffer", "_count", "_files", "_ids", "_sites", "_text", "step", "when")

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        self._count = self._text = 0
        #: Optimizer steps so far, and when the last of them ended.
        self.step = self.when = 0
        self._ids: dict[str, int] = {}
        #: By what is noted, where it was called the last time: depth, code and instruction, and their numbers in the notes.
        self._sites: dict[str, tuple[int, CodeType | None, int, int, int]] = {}
        self._files: dict[str, bool] = {}
        buffer[: len(_MAGIC)] = _MAGIC

    def mark(self, what: str, micro_batch: int = NO_MICRO_BATCH) -> None:
        """Note what all ranks are about to do together, and the line of the user's code that calls for it.

        Written for speed: this is what each collective pays. Mostly it is called from where it was the last time, which is seen without a
        look at the frames between.

        Args:
            what: Its name, one of a few.
            micro_batch: Place in the accumulation window.
        """
        try:
            depth, code, instruction, name, place = self._sites[what]
            frame = getframe(depth)
            if frame.f_code is not code or frame.f_lasti != instruction:
                name, place = self._find(what)
        except (KeyError, ValueError):
            name, place = self._find(what)
        count = self._count
        at = _START + count % SLOTS * _RECORD_SIZE
        pack_record(self._buffer, at, time_ns(), count, self.step, self.when, name, place, micro_batch)
        self._count = count + 1

    def stepped(self, step: int) -> None:
        """An optimizer step has ended; now there have been ``step``. The next note says so."""
        self.step = step
        self.when = time_ns()

    def _find(self, what: str) -> tuple[int, int]:
        """The numbers of a name and of the innermost line of the user's code; called by `mark`."""
        frame = getframe(2)
        depth = 1
        while not self._is_users(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
            depth += 1
        code = frame.f_code
        name = self._number(what)
        place = self._number(f"{code.co_filename}\0{frame.f_lineno}\0{code.co_name}")
        self._sites[what] = (depth, code, frame.f_lasti, name, place)
        return name, place

    def _is_users(self, file: str) -> bool:
        known = self._files.get(file)
        if known is None:
            known = self._files[file] = is_users(file)
        return known

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
    import mmap

    try:
        with marks_file(Path(error_file)).open("r+b") as file:
            return Marks(mmap.mmap(file.fileno(), SIZE))
    except (OSError, ValueError):
        return None


def read(data: bytes) -> MarkLog:
    """The notes in a file's bytes; one that is being written at that moment may be left out. Empty if the rank has made none."""
    if len(data) < SIZE or not data.startswith(_MAGIC):
        return MarkLog(())
    (used,) = struct.unpack_from("<I", data, len(_MAGIC))
    texts = ["", *_texts(data[_TEXT : _TEXT + used])]
    found = []
    for slot in range(SLOTS):
        when, number, step, stepped, what, place, micro = _RECORD.unpack_from(data, _START + slot * _RECORD_SIZE)
        if number % SLOTS != slot or not 0 < what < len(texts) or place >= len(texts):
            continue
        file, line, function = texts[place].split("\0") if place else ("", "0", "")
        micro_batch = None if micro == NO_MICRO_BATCH else micro
        found.append(Mark(when, number, step, stepped, texts[what], file, int(line), function, micro_batch))
    found.sort(key=lambda mark: mark.number)
    return MarkLog(tuple(found), *((found[-1].step, found[-1].stepped) if found else ()))


def _texts(data: bytes) -> Iterator[str]:
    at = 0
    while at + 2 <= len(data):
        (size,) = struct.unpack_from("<H", data, at)
        yield data[at + 2 : at + 2 + size].decode("utf-8", "replace")
        at += 2 + size
