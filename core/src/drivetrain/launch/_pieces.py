"""Whole lines of each rank, from a stream in which pieces of lines of all ranks stand, each after a mark."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["PATTERN", "Pieces"]

#: What Hydra writes before each piece; it puts in the rank.
PATTERN = "@drivetrain:%r|"
_MARK = re.compile(rb"@drivetrain:(\d+)\|")
_OPENING = PATTERN.partition("%r")[0].encode()


class Pieces:
    r"""Puts lines together again.

    Example:
        >>> pieces = Pieces()
        >>> list(pieces.feed(b"@drivetrain:1|a@drivetrain:0|b\n@drivetrain:1|c\n@driv"))
        [(0, b'b\n'), (1, b'ac\n')]
        >>> list(pieces.feed(b"etrain:0|rest")), list(pieces.end())
        ([], [(0, b'rest\n')])
    """

    def __init__(self) -> None:
        self._held = b""
        self._rank: int | None = None
        self._parts: dict[int | None, bytes] = {}

    def feed(self, data: bytes) -> Iterator[tuple[int | None, bytes]]:
        """The lines that are whole now, each with its rank; None for what the launcher itself says."""
        data, self._held = self._whole(self._held + data)
        start = 0
        for mark in [*_MARK.finditer(data), None]:
            yield from self._add(data[start : mark.start() if mark else len(data)])
            if mark:
                self._rank, start = int(mark[1]), mark.end()

    def end(self) -> Iterator[tuple[int | None, bytes]]:
        """Lines that no newline has ended."""
        yield from self._add(self._held)
        for rank, rest in self._parts.items():
            if rest:
                yield rank, rest + b"\n"

    def _add(self, piece: bytes) -> Iterator[tuple[int | None, bytes]]:
        *lines, rest = piece.split(b"\n")
        for line in lines:
            yield self._rank, self._parts.pop(self._rank, b"") + line + b"\n"
        self._parts[self._rank] = self._parts.get(self._rank, b"") + rest
        if lines and not rest:
            self._rank = None  # each line of a rank has a mark of its own

    @staticmethod
    def _whole(data: bytes) -> tuple[bytes, bytes]:
        """What surely ends in no half of a mark, and the rest."""
        at = data.rfind(b"@")
        tail = data[at:] if at >= 0 else b""
        if tail and (_OPENING.startswith(tail) or re.fullmatch(rb"@drivetrain:\d*", tail)):
            return data[:at], tail
        return data, b""
