"""Images as PNG, by the standard library alone."""

from __future__ import annotations

import struct
import zlib
from typing import Any

__all__ = ["encode_png"]


def encode_png(image: Any) -> bytes:
    r"""Encode a uint8 NumPy array of shape (height, width, 3 or 4) as PNG, without loss.

    Example:
        >>> import numpy as np
        >>> encode_png(np.zeros((2, 3, 3), np.uint8))[:8]
        b'\x89PNG\r\n\x1a\n'
    """
    height, width, channels = image.shape
    if image.dtype.name != "uint8" or channels not in (3, 4) or not height * width:
        raise ValueError(
            f"a PNG needs a non-empty uint8 array of shape (height, width, 3 or 4), not {image.dtype} {image.shape}"
        )
    rows = image.reshape(height, width * channels)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)  # each row starts with its filter, 0: none
    header = struct.pack(">IIBBBBB", width, height, 8, 6 if channels == 4 else 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 6)), (b"IEND", b""))
    body = b"".join(struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body
