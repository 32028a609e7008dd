"""Attention over sequences that processes share: they gather keys and values (context parallel), or swap parts for heads (Ulysses)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from drivetrain.errors import UnsupportedError
from drivetrain.parallel.sequences import SharedAttention, gather_parts

__all__ = ["GatheringAttention", "SwappingAttention"]


class GatheringAttention(SharedAttention):
    """Context parallel: queries of this process's part attend to the keys and values of all parts, with the mask of the whole.

    Keys and values are gathered for each attention, and their gradients are summed where they came from; so every mask is exact. Two all-gathers in
    forward, and two reduce-scatters in backward.

    Example:
        >>> GatheringAttention.NAME
        'Context parallel'
    """

    NAME = "Context parallel"

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Of this process's queries to all keys."""
        size, rank = self.size, self.rank
        mine = self.part_length(query, key)
        if is_causal and attn_mask is not None:
            raise UnsupportedError(
                f"{self.NAME}: attn_mask and is_causal=True exclude each other, as in torch. Give one of them."
            )
        mask = None if attn_mask is None else self.whole_columns(attn_mask, mine)
        if mask is not None and mask.shape[-2] == mine * size:
            mask = mask[..., rank * mine : (rank + 1) * mine, :]
        if is_causal:
            rows = torch.arange(rank * mine, (rank + 1) * mine, device=query.device)
            mask = torch.arange(size * mine, device=query.device) <= rows[:, None]
        keys, values = (gather_parts(t, self.group, -2) for t in (key, value))
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, dropout_p=dropout_p, **kwargs)


class SwappingAttention(SharedAttention):
    """Ulysses' sequence parallel: around attention, processes swap their parts of all heads for the whole sequence of some heads.

    Attention itself is torch's, on whole sequences: every mask and ``is_causal`` mean what they mean on one process. Where there are fewer heads of keys
    than processes need, they are repeated. Each attention sends two all-to-alls in forward (queries, keys and values go together) and two in backward.

    Example:
        >>> SwappingAttention.NAME
        'Sequence parallel'
    """

    NAME = "Sequence parallel"

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Of the whole sequence, for this process's heads."""
        mine = self.part_length(query, key)
        heads = self._check_heads(query, key, value, gqa=bool(kwargs.get("enable_gqa")))
        key, value = (_repeat(t, heads, self.size) for t in (key, value))
        parts = [_in_autocast(t) for t in (query, key, value)]
        mask = None if attn_mask is None else self._mask(attn_mask, mine, heads)
        query, key, value = _swap(parts, self.group, to_heads=True)
        kwargs["enable_gqa"] = key.shape[-3] != query.shape[-3]
        result = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, **kwargs
        )
        return _swap([result], self.group, to_heads=False)[0]

    def _check_heads(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, gqa: bool) -> int:
        shapes = [list(t.shape) for t in (query, key, value)]
        if query.dim() < 3 or any(t.shape[:-3] != query.shape[:-3] for t in (key, value)):
            raise UnsupportedError(
                f"{self.NAME}: queries, keys and values of shapes {shapes} must be [..., heads, length, width], with equal dimensions before the heads. "
                "Expand them before attention."
            )
        heads, fewer = query.shape[-3], key.shape[-3]
        if heads % self.size:
            raise UnsupportedError(
                f"{self.NAME}: {self.size} processes can't share {heads} heads of attention evenly. Use an sp_size that divides them"
                " (with tp_size, those of one process), or cp_size, which needs no heads."
            )
        if value.shape[-3] != fewer or (fewer != heads and not (fewer == 1 or (gqa and heads % fewer == 0))):
            raise UnsupportedError(
                f"{self.NAME}: {heads} heads of queries, {fewer} of keys and {value.shape[-3]} of values don't fit together. With fewer heads of keys "
                "and values, their number must divide that of queries, and enable_gqa=True says so."
            )
        return heads

    def _mask(self, mask: torch.Tensor, mine: int, heads: int) -> torch.Tensor:
        """All rows and columns, of this process's heads."""
        if mask.dim() < 2:
            raise UnsupportedError(f"{self.NAME}: a mask of shape {list(mask.shape)} has no rows and columns.")
        mask = self.whole_columns(mask, mine)
        if mask.shape[-2] == mine and mine > 1:
            mask = gather_parts(mask, self.group, -2)
        if mask.dim() > 2 and mask.shape[-3] == heads > 1:
            mask = mask.chunk(self.size, -3)[self.rank]
        return mask


def _in_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """In the dtype that autocast would give it afterwards: less to send, and one dtype for what goes together."""
    kind = tensor.device.type
    if tensor.dtype is torch.float64 or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _repeat(tensor: torch.Tensor, heads: int, size: int) -> torch.Tensor:
    """With so many heads of keys or values that processes can share them; heads of queries keep theirs."""
    fewer = tensor.shape[-3]
    return tensor if fewer % size == 0 else tensor.repeat_interleave(math.lcm(fewer, size) // fewer, dim=-3)


def _swap(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, *, to_heads: bool) -> tuple[torch.Tensor, ...]:
    """Parts of the sequence for parts of the heads, or back. Collective.

    Args:
        tensors: Of shape ``[..., heads, length, width]``: all heads and a part of the sequence, or (back) some heads and the whole sequence.
        group: The processes.
        to_heads: In which direction.
    """
    swapped: tuple[torch.Tensor, ...] = _Swap.apply(group, to_heads, *tensors)  # type: ignore[no-untyped-call]
    return swapped


class _Swap(torch.autograd.Function):
    """One all-to-all for all tensors; its backward is the other direction's."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, to_heads: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange(tensors, group, to_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *_exchange(gradients, ctx.group, not ctx.to_heads)


def _exchange(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, to_heads: bool) -> tuple[torch.Tensor, ...]:
    size = dist.get_world_size(group)
    cut, join = (-3, -2) if to_heads else (-2, -3)
    pieces = [torch.stack(t.chunk(size, cut)) for t in tensors]
    sent = pieces[0].flatten(1) if len(pieces) == 1 else torch.cat([p.flatten(1) for p in pieces], 1)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    parts = received.split([p[0].numel() for p in pieces], 1)
    return tuple(torch.cat([*part.view(piece.shape)], join) for part, piece in zip(parts, pieces, strict=True))
