"""Parts of DTensors: cutting whole tensors, multiplying and measuring what this process holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate

from drivetrain.checkpoint.tensors import local_region

__all__ = ["cut_like", "local", "total_norm"]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor, sharing memory with it.

    Example:
        >>> t = torch.zeros(2)
        >>> local(t) is t
        True
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def cut_like(value: torch.Tensor, template: DTensor) -> DTensor:
    """A whole tensor, the same on every process, laid out like a template: each process cuts its own part."""
    offsets, sizes = local_region(template)
    part = value.detach()[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
    part = part.to(local(template).device, copy=True).contiguous()
    return DTensor.from_local(
        part,
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )


def total_norm(gradients: Iterable[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """The norm over all elements of the whole tensors, the same on every process, a 0-d float32 tensor.

    Each process measures what it holds; powers are summed over the dimensions of the mesh along which tensors are divided, with one all-reduce
    per combination of them. Tensors on different meshes may be mixed.

    Args:
        gradients: Tensors and DTensors.
        norm_type: p of the p-norm; infinity for the largest absolute value.
        device: Where to compute.

    Raises:
        RuntimeError: For a tensor that is a sum still to be made.
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for gradient in gradients:
        by_groups.setdefault(_dividing_groups(gradient), []).append(local(gradient))
    infinite = math.isinf(norm_type)
    total = torch.zeros((), dtype=torch.float32, device=device)
    for groups, parts in by_groups.items():
        value = _local_norm(parts, norm_type, device)
        if not infinite:
            value = value**norm_type
        for group in groups:
            dist.all_reduce(value, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
        total = torch.maximum(total, value) if infinite else total + value
    return total if infinite else total ** (1.0 / norm_type)


def _dividing_groups(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    groups = []
    for dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Partial):
            raise RuntimeError(f"a gradient with placements {tensor.placements} isn't reduced yet")
        if not isinstance(placement, Replicate) and mesh.size(dim) > 1:
            groups.append(mesh.get_group(dim))
    return tuple(groups)


def _local_norm(parts: Sequence[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    parts = [p for p in parts if p.numel()]
    if not parts:
        return torch.zeros((), dtype=torch.float32, device=device)
    norms = torch._foreach_norm(parts, norm_type)
    stacked = torch.stack([n.to(device, torch.float32) for n in norms])
    norm: torch.Tensor = torch.linalg.vector_norm(stacked, norm_type)
    return norm
