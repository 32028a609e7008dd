"""Lines of JSON that keep every value: NaN and infinities as tagged strings, any name, integers of any size.

JSON has no NaN. A float that it lacks is written as the string ``"@float:nan"``, ``"@float:inf"`` or ``"@float:-inf"``; a text that happens to
start with ``@float:`` or ``@text:`` is written with ``@text:`` before it. `decode` undoes both, so what is read equals what was written.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

__all__ = ["decode", "encode", "path_inside", "read_lines", "repair", "safe_name", "tag", "unique_path", "untag"]

_FLOATS = {"@float:nan": math.nan, "@float:inf": math.inf, "@float:-inf": -math.inf}
_encoder = msgspec.json.Encoder()


def tag(value: Any) -> Any:
    """Replace the floats that JSON lacks, at any depth of dicts, lists and tuples.

    Example:
        >>> tag({"loss": float("nan"), "note": "@float:nan"})
        {'loss': '@float:nan', 'note': '@text:@float:nan'}
    """
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else f"@float:{value}"
    if kind is str:
        return "@text:" + value if value.startswith(("@float:", "@text:")) else value
    if kind is dict:
        return {k: tag(v) for k, v in value.items()}
    if kind in (list, tuple):
        return [tag(v) for v in value]
    return value


def untag(value: Any) -> Any:
    """The inverse of `tag` (tuples come back as lists).

    Example:
        >>> untag({"a": "@float:-inf", "b": "@text:@float:nan"})
        {'a': -inf, 'b': '@float:nan'}
    """
    kind = type(value)
    if kind is str and value.startswith("@"):
        if value in _FLOATS:
            return _FLOATS[value]
        return value[6:] if value.startswith("@text:") else value
    if kind is dict:
        return {k: untag(v) for k, v in value.items()}
    if kind is list:
        return [untag(v) for v in value]
    return value


def encode(value: Any) -> bytes:
    r"""One line of JSON, without the newline.

    Example:
        >>> encode({"step": 3, "values": {"a\nb": float("inf")}})
        b'{"step":3,"values":{"a\\nb":"@float:inf"}}'
    """
    value = tag(value)
    try:
        return _encoder.encode(value)
    except (OverflowError, UnicodeEncodeError, TypeError):
        # Integers beyond 64 bits and lone surrogates (undecodable file names): the standard library escapes them.
        return json.dumps(value, separators=(",", ":")).encode("ascii")


def decode(line: bytes | str) -> Any:
    """The inverse of `encode`.

    Example:
        >>> decode(encode({"x": float("-inf"), "big": 2**70})) == {"x": float("-inf"), "big": 2**70}
        True
    """
    return untag(json.loads(line))


def read_lines(path: Path, offset: int = 0) -> Iterator[tuple[Any, int]]:
    r"""Yield each line's value with the offset of the line after it; a torn last line (a killed writer's) ends the iteration.

    Args:
        path: A file of lines as `encode` makes them.
        offset: Byte at which to start.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "rows.jsonl")
        >>> _ = path.write_bytes(b'{"a":1}\n{"a":2}\n{"a":')
        >>> [value for value, _ in read_lines(path)]
        [{'a': 1}, {'a': 2}]
    """
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            yield decode(line), offset


def repair(path: Path) -> int:
    r"""Cut off a torn last line, so that appending goes on with a whole one.

    Returns:
        The number of bytes cut off.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "rows.jsonl")
        >>> _ = path.write_bytes(b'{"a":1}\n{"a":')
        >>> repair(path), path.read_bytes()
        (5, b'{"a":1}\n')
    """
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        end = size
        while end:
            start = max(0, end - 65536)
            file.seek(start)
            position = file.read(end - start).rfind(b"\n")
            if position >= 0:
                end = start + position + 1
                break
            end = start
        if end < size:
            file.truncate(end)
    return size - end


def safe_name(name: str) -> str:
    """A file name for any text: never a path, never hidden, at most 120 characters. Different texts have different names.

    Example:
        >>> safe_name("../../etc/passwd"), safe_name("train loss"), safe_name("")
        ('%2E.%2F..%2Fetc%2Fpasswd', 'train%20loss', '%')
    """
    import hashlib

    data = name.encode("utf-8", "surrogatepass")
    text = re.sub(rb"[^A-Za-z0-9_.\-]", lambda m: b"%%%02X" % m[0][0], data).decode("ascii")
    if text.startswith("."):
        text = "%2E" + text[1:]
    if len(text) > 120:
        text = f"{text[:90]}%{hashlib.sha256(data).hexdigest()[:24]}"
    return text or "%"


def path_inside(root: Path, name: str) -> Path:
    """A path that is not taken, for a file of that name (with ``/`` for folders) below ``root``, and nowhere else.

    Example:
        >>> path_inside(Path("run"), "../model/weights.bin").as_posix()
        'run/%2E./model/weights.bin'
    """
    return unique_path(root.joinpath(*(safe_name(part) for part in name.split("/") if part)))


def unique_path(path: Path) -> Path:
    """The path itself, or with a number before its suffix if it is taken.

    Example:
        >>> unique_path(Path("/nowhere/a.png")).name
        'a.png'
    """
    candidate, count = path, 1
    while candidate.exists():
        candidate = path.with_name(f"{path.stem}~{count}{path.suffix}")
        count += 1
    return candidate
