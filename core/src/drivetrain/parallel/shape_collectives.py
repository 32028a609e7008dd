"""Collectives that are about shapes: padding to a common size, and tensors that only one rank has.

They start with the same frame as those of `drivetrain.parallel.collectives`, and disagreement ends in the same way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from drivetrain.errors import DistributedOperationError
from drivetrain.parallel._frames import as_bytes, exchange
from drivetrain.parallel._groups import call, communication_device, global_ranks, members
from drivetrain.parallel._operation import prepare, replace

__all__ = ["copy_tensor_to_devices", "gather_tensor_shape", "pad_across_processes"]


def pad_across_processes(
    tensor: Any,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Pad every tensor along one dimension to the largest size that any rank has. Gradients flow to the values.

    Args:
        tensor: Any nested structure; tensors without that dimension stay as they are. Other dimensions may differ between ranks.
        dim: The dimension; negative counts from the end.
        pad_index: The value to pad with.
        pad_first: Pad before the values instead of after them.
        group: Process group; None for all ranks.

    Raises:
        DistributedOperationError: On every rank, if they disagree (see the module) or one fails.
        TypeError: If ``tensor`` is neither a tensor nor a container.

    Example:
        >>> pad_across_processes(torch.ones(2), dim=0)
        tensor([1., 1.])
    """
    if members(group)[1] == 1:
        return tensor
    leaves = prepare("pad_across_processes", tensor, group)
    has_dim = [-leaf.tensor.ndim <= dim < leaf.tensor.ndim for leaf in leaves]
    layout = ",".join([leaf.describe(shape=f"({leaf.tensor.ndim}-d)") for leaf in leaves])
    sizes = [leaf.tensor.shape[dim] if has else 0 for leaf, has in zip(leaves, has_dim, strict=True)]
    frames = exchange("pad_across_processes", layout=f"dim={dim},{layout}", sizes=sizes, group=group)
    largest = [max(column) for column in zip(*frames.sizes, strict=True)]
    results = [
        _pad(leaf.tensor, dim, size - mine, pad_index, pad_first) if has else leaf.tensor
        for leaf, has, size, mine in zip(leaves, has_dim, largest, sizes, strict=True)
    ]
    return replace(tensor, leaves, results)


def _pad(tensor: torch.Tensor, dim: int, missing: int, value: float, first: bool) -> torch.Tensor:
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = missing
    padding = tensor.new_full(shape, value)
    return torch.cat([padding, tensor] if first else [tensor, padding], dim=dim)


def gather_tensor_shape(tensor: torch.Tensor | None, *, group: dist.ProcessGroup | None = None) -> torch.Size:
    """The shape of a tensor that only one rank has (the others pass None), on every rank. One collective.

    Raises:
        DistributedOperationError: On every rank, if no rank or several have a tensor.

    Example:
        >>> gather_tensor_shape(torch.ones(2, 3))
        torch.Size([2, 3])
    """
    return _owner(tensor, "gather_tensor_shape", group)[1]


def copy_tensor_to_devices(
    tensor: torch.Tensor | None = None, *, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Give every rank a copy of a tensor that only one rank has (the others pass None), on the same type of device. Two collectives.

    Raises:
        DistributedOperationError: On every rank, if no rank or several have a tensor.

    Example:
        >>> copy_tensor_to_devices(torch.ones(2))
        tensor([1., 1.])
    """
    owner, shape, dtype, device = _owner(tensor, "copy_tensor_to_devices", group)
    if members(group)[1] == 1 and tensor is not None:
        return tensor
    result = tensor if tensor is not None else torch.empty(shape, dtype=dtype, device=device)
    wire = communication_device(group, result.device)
    size = result.numel() * result.element_size()
    mine = tensor is not None
    buffer = as_bytes(result).to(wire) if mine else torch.empty(size, dtype=torch.uint8, device=wire)
    if size:
        call("copy_tensor_to_devices", group, dist.broadcast, buffer, group_src=owner)
    return result if mine else result.copy_(buffer.view(dtype).view(shape))


def _owner(
    tensor: torch.Tensor | None, what: str, group: dist.ProcessGroup | None
) -> tuple[int, torch.Size, torch.dtype, str]:
    """The rank that has the tensor, with what the others must know of it. The frame carries all of that."""
    if members(group)[1] == 1:
        if tensor is None:
            raise DistributedOperationError(f"{what}: no rank has a tensor. One of them must pass it.")
        return 0, tensor.shape, tensor.dtype, tensor.device.type
    text = b""
    if tensor is not None:
        leaf = prepare(what, tensor, group)[0].tensor
        text = f"{str(leaf.dtype)[6:]} {leaf.device.type} {' '.join(map(str, leaf.shape))}".encode()
    payload = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else None
    frames = exchange(what, payload=payload, group=group)
    owners = [r for r, n in enumerate(frames.payload_bytes) if n]
    if len(owners) != 1:
        ranks = global_ranks(group)
        have = "no rank has" if not owners else f"ranks {', '.join(str(ranks[r]) for r in owners)} have"
        raise DistributedOperationError(f"{what}: {have} a tensor. Exactly one rank must pass it, the others None.")
    row = frames.inline[owners[0], : frames.payload_bytes[owners[0]]]
    dtype, device, *shape = bytes(row.tolist()).decode().split()
    return owners[0], torch.Size(map(int, shape)), getattr(torch, dtype), device
