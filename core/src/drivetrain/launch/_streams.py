"""Which streams of which ranks are written to files, and which are shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from drivetrain.errors import ConfigurationError

__all__ = ["Destinations", "parse_streams"]

_BITS = {"0": 0, "1": 1, "2": 2, "3": 3}


def parse_streams(text: str, *, said_by: str) -> tuple[int, Mapping[int, int]]:
    """Read torchrun's words for streams: bit 1 is stdout, bit 2 stderr, for all ranks or by local rank.

    Returns:
        The bits of ranks that aren't named, and those of ranks that are.

    Raises:
        ConfigurationError: If the text says something else.

    Example:
        >>> parse_streams("3", said_by="tee"), parse_streams("0:1,2:3", said_by="tee")
        ((3, {}), (0, {0: 1, 2: 3}))
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if len(words) == 1 and words[0] in _BITS:
        return _BITS[words[0]], {}
    named: dict[int, int] = {}
    for word in words:
        match = re.fullmatch(r"(\d+):([0-3])", word)
        if match is None or int(match[1]) in named:
            break
        named[int(match[1])] = _BITS[match[2]]
    else:
        if named:
            return 0, named
    raise ConfigurationError(
        f"{said_by}={text!r}: give 0 (none), 1 (stdout), 2 (stderr) or 3 (both), for all ranks or by local rank, as in 0:3,1:2."
    )


@dataclass(frozen=True, slots=True)
class Destinations:
    """What becomes of each stream when there is a log directory.

    Args:
        tee: Streams that are both shown and written, as of `LocalOptions.tee`.
        redirects: Streams that are written alone.

    Example:
        >>> Destinations().of(local_rank=0, rank=0, bit=1), Destinations().of(local_rank=1, rank=1, bit=1)
        ((True, True), (True, False))
        >>> Destinations(tee="1:1").of(local_rank=1, rank=1, bit=1), Destinations(tee="1:1").of(local_rank=1, rank=1, bit=2)
        ((True, True), (False, True))
    """

    tee: str | None = None
    redirects: str | None = None

    def of(self, *, local_rank: int, rank: int, bit: int) -> tuple[bool, bool]:
        """Whether a stream is written, and whether it is shown.

        Args:
            local_rank: The rank on this machine.
            rank: The rank in all.
            bit: 1 for stdout, 2 for stderr.
        """
        if self.tee is None and self.redirects is None:
            return True, rank == 0
        teed = bool(_bits(self.tee, "tee", local_rank) & bit)
        written = teed or bool(_bits(self.redirects, "redirects", local_rank) & bit)
        return written, teed or not written

    def check(self, local_world_size: int) -> None:
        """Find mistakes before anything is started.

        Raises:
            ConfigurationError: For words that can't be read, and ranks that don't exist here.
        """
        for name, text in (("tee", self.tee), ("redirects", self.redirects)):
            if text is None:
                continue
            absent = [r for r in parse_streams(text, said_by=name)[1] if r >= local_world_size]
            if absent:
                raise ConfigurationError(
                    f"{name}={text!r}: there is no local rank {absent[0]} among {local_world_size} processes on this machine."
                )


def _bits(text: str | None, name: str, local_rank: int) -> int:
    if text is None:
        return 0
    default, named = parse_streams(text, said_by=name)
    return named.get(local_rank, default)
