"""The tensors of a structure as one buffer of bytes, so that many small tensors cost one collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from drivetrain.parallel._containers import container_of, walk
from drivetrain.parallel._frames import as_bytes

__all__ = ["PACK_LIMIT", "Leaf", "align", "leaves_of", "pack", "unpack"]

#: Structures of more bytes than this are sent tensor by tensor: a copy would cost more than the latency that it saves.
PACK_LIMIT = 4 << 20
_ALIGNMENT = 16  # of complex128, the widest dtype: every part of a buffer can be viewed as its dtype


class Leaf(msgspec.Struct, frozen=True):
    """A tensor and its place in a structure."""

    path: str
    tensor: torch.Tensor

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row; a 0-d tensor is one row."""
        return tuple(self.tensor.shape[1:])

    @property
    def rows(self) -> int:
        """Number of rows; 1 for a 0-d tensor."""
        return int(self.tensor.shape[0]) if self.tensor.ndim else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        count = self.tensor.element_size()
        for size in self.tensor.shape[1:]:
            count *= size
        return count

    def describe(self, *, shape: str) -> str:
        """What must be equal on all ranks, with ``shape`` for the shape."""
        device = self.tensor.device.type
        place = "" if device == "cpu" else f"@{device}"
        return f"{self.path}:{str(self.tensor.dtype)[6:]}{shape}{place}"


def leaves_of(data: Any) -> list[Leaf]:
    """The tensors of a structure, sorted by path: an order that ranks share even if their dicts were filled in different orders.

    Raises:
        TypeError: For tensors that have no order among ranks (in a set), or whose values aren't one dense block, and for data that
            holds no tensor because it is no structure at all.
    """
    leaves = []
    for path, value, ordered in walk(data):
        if isinstance(value, torch.Tensor):
            _check(value, path, ordered)
            leaves.append(Leaf(path, value))
        elif path == "" and container_of(data) is None:
            raise TypeError(
                f"A {type(data).__name__} isn't a tensor, nor a structure that holds tensors. "
                "Object collectives (`gather_object`, `broadcast_object_list`) take anything that can be pickled."
            )
    if len(leaves) > 1:
        leaves.sort(key=_by_path)
    return leaves


def _by_path(leaf: Leaf) -> str:
    return leaf.path


def _check(tensor: torch.Tensor, path: str, ordered: bool) -> None:
    where = f" at {path}" if path else ""
    if not ordered:
        raise TypeError(
            f"The tensor{where} is in a set or a PackedSequence, which has no rows that ranks could exchange. "
            "Pass a list, or `torch.nn.utils.rnn.pad_packed_sequence` first."
        )
    if hasattr(tensor, "full_tensor"):
        raise TypeError(
            f"The tensor{where} is a DTensor, spread over ranks already: pass its `full_tensor()` or `to_local()`."
        )
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "nested" if tensor.is_nested else str(tensor.layout)[6:]
        raise TypeError(f"The tensor{where} is a {kind} tensor; only dense tensors can be exchanged.")


def align(size: int) -> int:
    """``size`` rounded up to the alignment of parts."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def pack(tensors: Sequence[torch.Tensor], *, size: int, device: torch.device) -> torch.Tensor:
    """The values of ``tensors`` as a uint8 tensor of ``size`` bytes on ``device``, each part aligned; the rest is arbitrary.

    A single contiguous tensor of that size is not copied.
    """
    if len(tensors) == 1:
        flat = as_bytes(tensors[0]).to(device)
        if flat.numel() == size:
            return flat
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    offset = 0
    for tensor in tensors:
        flat = as_bytes(tensor)
        buffer[offset : offset + flat.numel()].copy_(flat)
        offset += align(flat.numel())
    return buffer


def unpack(buffer: torch.Tensor, likes: Sequence[tuple[torch.dtype, tuple[int, ...]]]) -> list[torch.Tensor]:
    """Views of a buffer that `pack` filled, with these dtypes and shapes."""
    views = []
    offset = 0
    for dtype, shape in likes:
        size = dtype.itemsize
        for n in shape:
            size *= n
        views.append(buffer[offset : offset + size].view(dtype).view(shape))
        offset += align(size)
    return views
