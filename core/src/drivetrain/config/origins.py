"""Where a value came from."""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["DEFAULT", "EXPLICIT", "Origin", "Source"]


class Source(enum.IntEnum):
    """Kinds of sources, in order of precedence: the higher one wins.

    Example:
        >>> Source.EXPLICIT > Source.ENVIRONMENT > Source.FILE > Source.DEFAULT
        True
    """

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    EXPLICIT = 3


class Origin(NamedTuple):
    """Where a value came from.

    Args:
        source: The kind of source.
        detail: The variable, or the file and line, or the argument; empty where there is nothing to add.

    Example:
        >>> str(Origin(Source.ENVIRONMENT, "DRIVETRAIN_CPU")), str(Origin(Source.DEFAULT))
        ('DRIVETRAIN_CPU', 'default')
    """

    source: Source
    detail: str = ""

    def __str__(self) -> str:
        if self.detail:
            return self.detail
        return "argument" if self.source is Source.EXPLICIT else self.source.name.lower()


DEFAULT = Origin(Source.DEFAULT)
EXPLICIT = Origin(Source.EXPLICIT)
