"""Sequences that processes share: each holds a part, and sees the whole in attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from drivetrain.errors import ConfigurationError, UnsupportedError

__all__ = ["SharedAttention", "divide_sequences", "gather_parts"]


@contextlib.contextmanager
def divide_sequences(
    attention: SharedAttention,
    buffers: Sequence[torch.Tensor],
    dims: Sequence[int],
    keep: set[torch.Tensor],
) -> Iterator[None]:
    """Inside, each tensor holds this process's part of its sequence, in place, and attention sees all parts.

    Args:
        attention: How it does, and which processes share sequences.
        buffers: Tensors that have a dimension of the sequence: token ids, labels, positions.
        dims: That dimension of each.
        keep: Those that stay divided afterwards.

    Raises:
        ConfigurationError: If lengths differ, or can't be shared evenly.
    """
    size, rank = attention.size, attention.rank
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
        with attention:
            yield
    finally:
        for buffer, before in zip(buffers, whole, strict=True):
            if not any(buffer is k for k in keep):
                buffer.data = before


class SharedAttention(TorchFunctionMode):
    """Inside, ``scaled_dot_product_attention`` sees the sequences of all processes of a group, and what it can't see is refused.

    A subclass says how: see `attend`.

    Args:
        group: Processes that share sequences, in the sequence's order.
    """

    #: What this is called in messages.
    NAME: ClassVar[str] = "Shared sequences"

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    @property
    def size(self) -> int:
        """Number of processes that share a sequence."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Which part of a sequence this process holds."""
        return dist.get_rank(self.group)

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
        """Attention of this process's part of the queries to the whole sequence.

        Args:
            query: Of shape ``[..., heads, part, width]``.
            key: This process's part, too.
            value: This process's part, too.
            attn_mask: The whole sequence's, or a part of it.
            dropout_p: As in torch.
            is_causal: As in torch, of the whole sequence.
            **kwargs: ``scale`` and ``enable_gqa``.
        """
        raise NotImplementedError

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch calls it for each function inside."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            raise UnsupportedError(
                f"{self.NAME}: nn.MultiheadAttention (and nn.TransformerEncoderLayer with it) attends inside one function of torch, which sees this process's "
                "part of the sequence only. Compute attention with torch.nn.functional.scaled_dot_product_attention."
            )
        name = getattr(func, "__name__", "")
        if name in ("_native_multi_head_attention", "_transformer_encoder_layer_fwd"):
            raise UnsupportedError(
                f"{self.NAME}: torch's fused encoder layer doesn't see other processes' keys. Compute attention with "
                "torch.nn.functional.scaled_dot_product_attention."
            )
        if name == "flex_attention":
            raise UnsupportedError(
                f"{self.NAME}: flex_attention doesn't see other processes' keys. Use torch.nn.functional.scaled_dot_product_attention, with the mask "
                "as a tensor."
            )
        return func(*args, **kwargs)

    def part_length(self, query: torch.Tensor, key: torch.Tensor) -> int:
        """Length of this process's part of the sequence.

        Raises:
            UnsupportedError: If keys have another: nobody could know whether they are divided.
        """
        mine = query.shape[-2]
        if key.shape[-2] != mine:
            raise UnsupportedError(
                f"{self.NAME}: queries have length {mine} and keys {key.shape[-2]}. Attention to other sequences isn't offered."
            )
        return mine

    def whole_columns(self, mask: torch.Tensor, mine: int) -> torch.Tensor:
        """A mask over all columns, with this process's or all rows: padding masks are divided like the tokens, and gathered.

        Raises:
            UnsupportedError: For a mask of which nobody could know what it is of.
        """
        whole = mine * self.size
        if mask.shape[-1] == mine and self.size > 1 and mask.shape[-2] == 1:
            return gather_parts(mask, self.group, -1)
        if mask.shape[-1] != whole or mask.shape[-2] not in (1, mine, whole):
            raise UnsupportedError(
                f"{self.NAME}: a mask of shape {list(mask.shape)} is neither that of the whole sequence ({whole} columns, and {whole} or {mine} "
                f"rows) nor a padding mask ([..., 1, {mine}], divided like the tokens). Build it from the whole sequence, or use is_causal=True."
            )
        return mask


def gather_parts(part: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """All processes' parts, joined in order along a dimension; backward sums what all processes want of this part. Collective.

    Args:
        part: Of equal shape on all processes.
        group: The processes.
        dim: Along which parts are joined.
    """
    whole: torch.Tensor = _Gather.apply(part, group, dim)  # type: ignore[no-untyped-call]
    return whole


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = group, dim
        parts = [
            torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        size = dist.get_world_size(ctx.group)
        parts = [g.contiguous() for g in gradients[0].chunk(size, ctx.dim)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=ctx.group)
        return mine, None, None
