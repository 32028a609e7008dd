"""Small facts about tensors that all of the checkpoint code shares: names of dtypes, raw bytes, identity, shards."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from drivetrain.errors import CheckpointError
from drivetrain.interfaces.shards import Block, Shards

__all__ = [
    "dtype_from_name",
    "dtype_name",
    "is_dtensor",
    "is_sharded",
    "like_dtensor",
    "local_blocks",
    "local_region",
    "raw_view",
    "tensor_from_bytes",
    "tensor_identity",
    "to_bytes",
]

_DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)}


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype without its module.

    Example:
        >>> dtype_name(torch.bfloat16)
        'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype of a name that `dtype_name` gave.

    Raises:
        CheckpointError: If this torch has no such dtype.

    Example:
        >>> dtype_from_name("bfloat16")
        torch.bfloat16
    """
    try:
        return _DTYPES[name]
    except (KeyError, TypeError):
        raise CheckpointError(f"torch {torch.__version__} has no dtype {name!r}; a newer one may") from None


def is_dtensor(value: object) -> bool:
    """Whether a value is a DTensor, without importing torch.distributed.tensor.

    Example:
        >>> is_dtensor(torch.zeros(1))
        False
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_sharded(value: object) -> bool:
    """Whether this rank holds only a part of a value.

    Example:
        >>> is_sharded(torch.zeros(1))
        False
    """
    return isinstance(value, Shards) or is_dtensor(value)


def local_blocks(value: Any) -> tuple[Block, ...]:
    """What this rank holds of a sharded value.

    Example:
        >>> [block.offsets for block in local_blocks(Shards.of_range(torch.ones(2), start=1, shape=(2, 2)))]
        [(0, 1), (1, 0)]
    """
    if isinstance(value, Shards):
        return value.blocks
    return (Block(local_region(value)[0], value.to_local()),)


def local_region(value: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes, per dimension, of what this rank holds of a DTensor.

    Raises:
        CheckpointError: For a tensor that is a pending sum, or whose local part is not one block.
    """
    try:
        (chunk,) = value.__create_chunk_list__()
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"a DTensor with placements {value.placements} can't be stored by its shards: {error}"
        ) from error
    return tuple(chunk.offsets), tuple(chunk.sizes)


def like_dtensor(local: torch.Tensor, template: Any) -> Any:
    """A DTensor laid out as ``template`` is, of this rank's part of it."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local.to(template.to_local().device),
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )


def raw_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, row-major and little-endian, without copying."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous()
    if sys.byteorder != "little":
        raise CheckpointError("checkpoints are little-endian, this machine is not")
    if tensor.numel() == 0:
        return memoryview(b"")
    flat = tensor.detach().reshape(-1)
    # One element cut out of a row counts as contiguous and keeps the row's stride, with which it can't be seen as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


def to_bytes(tensor: torch.Tensor) -> bytes:
    r"""The bytes of any dense tensor, row-major.

    Example:
        >>> to_bytes(torch.tensor([1, 2], dtype=torch.int16))
        b'\x01\x00\x02\x00'
    """
    return bytes(raw_view(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()))


def tensor_from_bytes(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    r"""A CPU tensor with memory of its own, from what `to_bytes` gave.

    Raises:
        CheckpointError: If the number of bytes doesn't fit.

    Example:
        >>> tensor_from_bytes(b"\x01\x00", torch.int16, [1])
        tensor([1], dtype=torch.int16)
    """
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise CheckpointError(f"a tensor of shape {list(shape)} and {dtype} has {expected} bytes, not {len(data)}")
    if not data:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(tuple(shape))


def tensor_identity(tensor: Any) -> tuple[Any, ...]:
    """Equal for two tensors that are the same values in the same memory (tied weights), while both live."""
    if isinstance(tensor, Shards):
        return ("object", id(tensor))
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    if local.numel() == 0:
        return ("object", id(tensor))
    bits = (local.is_conj(), local.is_neg())
    return (local.device, local.data_ptr(), tuple(tensor.shape), local.stride(), local.dtype, bits)
