"""Names that a system doesn't take, made legal so that they can be turned back."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

__all__ = ["NameCoder"]

_ESCAPE = re.compile(r"_x([0-9A-F]+)_")
_LOOKALIKE = re.compile(r"_(?=(x[0-9A-F]+))")
_EMPTY = "_x_"


class NameCoder:
    r"""Writes what a system refuses in a name as ``_x2A_`` (the character's number in hexadecimal), and reads it back.

    A name over the longest length is cut and ends in its checksum. Such names can't be read back by themselves: what they stand for is in
    `aliases`, which a tracker stores with the run.

    Args:
        legal: The characters that may stay, as the inside of a regular expression's class.
        longest: The most characters of a name.
        paths: Names are paths to the system: it refuses empty parts and parts of dots, and ``/`` at the ends.
        reserved: Whole names that the system uses itself.

    Example:
        >>> coder = NameCoder(r"\w\-. :/", paths=True)
        >>> coder.legal("loss (train)"), coder.legal("../x"), coder.legal("train/loss")
        ('loss _x28_train_x29_', '_x2E_./x', 'train/loss')
        >>> coder.original("loss _x28_train_x29_")
        'loss (train)'
    """

    def __init__(
        self, legal: str, *, longest: int = 1 << 30, paths: bool = False, reserved: Iterable[str] = ()
    ) -> None:
        self._illegal = re.compile(f"[^{legal}]")
        self._longest = longest
        self._paths = paths
        self._reserved = frozenset(reserved)
        self._known: dict[str, str] = {}
        #: What cut names stand for.
        self.aliases: dict[str, str] = {}

    def legal(self, name: str) -> str:
        """The name under which the system gets it."""
        known = self._known.get(name)
        if known is None:
            known = self._encode(name)
            if len(self._known) < 100_000:  # names with a step in them must not pile up
                self._known[name] = known
        return known

    def original(self, name: str) -> str:
        """The name as it was logged; for cut names, if `aliases` has it."""
        if name in self.aliases:
            return self.aliases[name]
        return "" if name == _EMPTY else _ESCAPE.sub(lambda m: chr(int(m[1], 16)), name)

    def _encode(self, name: str) -> str:
        if not name:
            return _EMPTY
        escaped = {m.start() for m in self._illegal.finditer(name)}
        if name in self._reserved or name == _EMPTY:
            escaped.add(0)
        if self._paths:
            escaped |= _path_faults(name)
        for match in _LOOKALIKE.finditer(name):  # what would read as an escape isn't one
            end = match.end() + len(match[1])
            if end < len(name) and (name[end] == "_" or end in escaped):
                escaped.add(match.start())
        text = "".join(f"_x{ord(c):X}_" if i in escaped else c for i, c in enumerate(name)) if escaped else name
        if len(text) > self._longest:
            digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
            text = f"{text[: self._longest - 17]}_{digest}"
            self.aliases[text] = name
        return text


def _path_faults(name: str) -> set[int]:
    """Positions of what makes a name no plain relative path."""
    faults: set[int] = set()
    start = 0
    for part in name.split("/"):
        if part in (".", ".."):
            faults.add(start)
        elif not part:
            faults.add(start - 1 if start else 0)  # the slash before the empty part
        start += len(part) + 1
    return faults
