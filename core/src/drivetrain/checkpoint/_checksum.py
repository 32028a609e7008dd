"""Checksums of files, computed by several threads."""

from __future__ import annotations

import functools
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["checksum_file", "combine"]

_BLOCK = 8 << 20
_PART = 64 << 20
#: The polynomial of CRC-32 (ISO 3309), its bits from the lowest power to the highest.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31  # x to the 0th, in this order of bits


def checksum_file(path: Path) -> str:
    """CRC-32 of a file's content, as manifests hold it: it finds damage, not forgery.

    A large file is read in parts, on as many threads as this process has cores (reading and checksums release the GIL).

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a")
        >>> _ = path.write_bytes(b"123456789")
        >>> checksum_file(path)
        'crc32:cbf43926'
    """
    parts: list[tuple[int, int | None]] = [(offset, _PART) for offset in range(0, path.stat().st_size, _PART)]
    if len(parts) < 2:
        return f"crc32:{_read(path, 0, None)[0]:08x}"
    parts[-1] = (parts[-1][0], None)  # to the end, wherever that is by then
    with ThreadPoolExecutor(min(len(parts), _cores()), "drivetrain-checksum") as pool:
        found = list(pool.map(lambda part: _read(path, *part), parts))
    crc = found[0][0]
    for more, length in found[1:]:
        crc = combine(crc, more, length)
    return f"crc32:{crc:08x}"


def combine(first: int, second: int, length: int) -> int:
    """CRC-32 of two pieces put together.

    Args:
        first: That of the first piece.
        second: That of the second.
        length: Bytes of the second piece.

    The CRC of a message is its polynomial's remainder; appending ``length`` bytes multiplies it by x to the ``8 * length``-th.

    Example:
        >>> combine(zlib.crc32(b"1234"), zlib.crc32(b"56789"), 5) == zlib.crc32(b"123456789")
        True
    """
    return _product(_power(8 * length), first) ^ second


@functools.lru_cache(maxsize=16)  # all parts but the last are of one length
def _power(exponent: int) -> int:
    """X to a power, modulo the polynomial."""
    result, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            result = _product(square, result)
        square = _product(square, square)
        exponent >>= 1
    return result


def _product(a: int, b: int) -> int:
    """Product of two polynomials over GF(2), modulo the polynomial."""
    product = 0
    for power in range(31, -1, -1):
        if a >> power & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


def _read(path: Path, offset: int, length: int | None) -> tuple[int, int]:
    """CRC-32 of a part of a file, and how many bytes it had."""
    view = memoryview(bytearray(_BLOCK))
    crc = done = 0
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while count := file.readinto(view if length is None else view[: length - done]):
            crc = zlib.crc32(view[:count], crc)
            done += count
    return crc, done


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
