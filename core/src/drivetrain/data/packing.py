"""Batches as bytes: the pickled skeleton of any structure, and the bytes of its tensors, which are never pickled."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

__all__ = ["pack", "unpack"]

_ALIGNMENT = 16


class _Pickler(pickle.Pickler):
    """Takes tensors out of the pickle; each leaves its dtype, shape and place among the bytes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self.size = 0
        self._places: dict[int, tuple[torch.dtype, tuple[int, ...], int]] = {}

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return None
        place = self._places.get(id(value))
        if place is None:
            if value.layout is not torch.strided or value.is_quantized or value.requires_grad or value.is_nested:
                return None  # torch's own way of pickling keeps what these have besides values
            self.tensors.append(value)
            place = self._places[id(value)] = (value.dtype, tuple(value.shape), self.size)
            self.size += -(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, data: torch.Tensor) -> None:
        super().__init__(file)
        self._data = data
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, place: tuple[torch.dtype, tuple[int, ...], int]) -> torch.Tensor:
        dtype, shape, offset = place
        size = dtype.itemsize
        for n in shape:
            size *= n
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        if offset not in self._made:
            self._made[offset] = self._data[offset : offset + size].view(dtype).view(shape)
        return self._made[offset]


def pack(value: Any, *, before: int = 0) -> torch.Tensor:
    """Any picklable structure as a uint8 tensor: the skeleton's length, the skeleton, then the tensors' bytes.

    Args:
        value: The structure.
        before: Bytes to leave free before it, a multiple of 16.

    Example:
        >>> batch = {"x": torch.arange(3), "ragged": [torch.ones(2), torch.ones(1)], "name": "a", "none": None}
        >>> unpack(pack(batch))["ragged"]
        [tensor([1., 1.]), tensor([1.])]
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    skeleton = file.getbuffer()
    start = before + -(-(8 + len(skeleton)) // _ALIGNMENT) * _ALIGNMENT
    data = torch.empty(start + pickler.size, dtype=torch.uint8)
    data[before : before + 8] = torch.tensor([len(skeleton)]).view(torch.uint8)
    data[before + 8 : before + 8 + len(skeleton)] = torch.frombuffer(skeleton, dtype=torch.uint8)
    for tensor in pickler.tensors:
        size = tensor.numel() * tensor.element_size()
        if size:
            data[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return data


def unpack(data: torch.Tensor) -> Any:
    """The structure that `pack` was given. Tensors are views of ``data``.

    Args:
        data: uint8, contiguous, on the CPU; from a trusted rank, since it holds a pickle.

    Example:
        >>> unpack(pack(("a", torch.tensor(1.5))))
        ('a', tensor(1.5000))
    """
    length = int(data[:8].view(torch.int64))
    start = -(-(8 + length) // _ALIGNMENT) * _ALIGNMENT
    file = io.BytesIO(data[8 : 8 + length].numpy().tobytes())
    return _Unpickler(file, data[start:]).load()
