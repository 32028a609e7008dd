"""Context parallel: processes that hold parts of the same sequences, and see all of them in attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from drivetrain.errors import ConfigurationError, UnsupportedError

__all__ = ["AttendToAll", "divide_sequences"]


@contextlib.contextmanager
def divide_sequences(
    group: dist.ProcessGroup,
    buffers: Sequence[torch.Tensor],
    dims: Sequence[int],
    keep: set[torch.Tensor],
) -> Iterator[None]:
    """Inside, each tensor holds this process's part of its sequence, in place, and attention sees all parts.

    Args:
        group: Processes that share sequences.
        buffers: Tensors that have a dimension of the sequence: token ids, labels, positions.
        dims: That dimension of each.
        keep: Those that stay divided afterwards.

    Raises:
        ConfigurationError: If lengths differ, or can't be shared evenly.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if len(buffers) != len(dims):
        raise ConfigurationError(
            f"maybe_context_parallel: {len(buffers)} buffers, and {len(dims)} dimensions in buffer_seq_dims. Give one for each."
        )
    lengths = {b.shape[d] for b, d in zip(buffers, dims, strict=True)}
    if len(lengths) > 1 or any(n % size for n in lengths):
        raise ConfigurationError(
            f"maybe_context_parallel: sequences of length {sorted(lengths)} can't be shared by {size} processes. All buffers must have one length, "
            f"a multiple of {size}: pad them."
        )
    whole = [b.data for b in buffers]
    for buffer, dim in zip(buffers, dims, strict=True):
        buffer.data = buffer.data.chunk(size, dim)[rank].contiguous()
    try:
        with AttendToAll(group):
            yield
    finally:
        for buffer, before in zip(buffers, whole, strict=True):
            if not any(buffer is k for k in keep):
                buffer.data = before


class AttendToAll(TorchFunctionMode):
    """Queries of this process's part attend to the keys and values of all parts, with the mask of the whole.

    Keys and values are gathered for each attention, and their gradients are summed where they came from; so every mask is exact.

    Args:
        group: Processes that share sequences, in the sequence's order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward and kwargs.get("need_weights", True):
            raise UnsupportedError(
                "Context parallel: nn.MultiheadAttention computes its weights itself unless it is called with need_weights=False."
            )
        if getattr(func, "__name__", "") in ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"):
            raise UnsupportedError(
                "Context parallel: torch's fused encoder layer doesn't see other processes' keys. Evaluate with torch.backends.mha.set_fastpath_enabled(False)."
            )
        return func(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        size, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        mine = query.shape[-2]
        if key.shape[-2] != mine:
            raise UnsupportedError(
                f"Context parallel: queries have length {mine} and keys {key.shape[-2]}. Attention to other sequences isn't offered."
            )
        mask = None if attn_mask is None else self._mask(attn_mask, mine, size, rank)
        if is_causal:
            rows = torch.arange(rank * mine, (rank + 1) * mine, device=query.device)
            mask = torch.arange(size * mine, device=query.device) <= rows[:, None]
        keys, values = (_gather(t, self._group) for t in (key, value))
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, dropout_p=dropout_p, **kwargs)

    def _mask(self, mask: torch.Tensor, mine: int, size: int, rank: int) -> torch.Tensor:
        """This process's rows of a mask, over all columns."""
        whole = mine * size
        if mask.shape[-1] == mine and size > 1 and mask.shape[-2] == 1:  # a padding mask, divided like the tokens
            parts = [torch.empty_like(mask, memory_format=torch.contiguous_format) for _ in range(size)]
            dist.all_gather(parts, mask.detach().contiguous(), group=self._group)
            return torch.cat(parts, -1)
        if mask.shape[-1] != whole or mask.shape[-2] not in (1, mine, whole):
            raise UnsupportedError(
                f"Context parallel: a mask of shape {list(mask.shape)} is neither that of the whole sequence ({whole} columns, and {whole} or {mine} "
                f"rows) nor a padding mask ([..., 1, {mine}], divided like the tokens). Build it from the whole sequence, or use is_causal=True."
            )
        return mask if mask.shape[-2] != whole else mask[..., rank * mine : (rank + 1) * mine, :]


def _gather(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole: torch.Tensor = _Gather.apply(part, group)  # type: ignore[no-untyped-call]
    return whole


class _Gather(torch.autograd.Function):
    """All parts of a sequence (dimension -2), in order; backward sums what all processes' queries want of this part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [
            torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, -2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        size = dist.get_world_size(ctx.group)
        parts = [g.contiguous() for g in gradients[0].chunk(size, -2)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=ctx.group)
        return mine, None
