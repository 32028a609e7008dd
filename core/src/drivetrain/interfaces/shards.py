"""Values that are spread over processes in a way that no DTensor describes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["Block", "Shards"]


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a tensor.

    Args:
        offsets: Where it starts, per dimension.
        values: What it holds; as many dimensions as the tensor has.
    """

    offsets: tuple[int, ...]
    values: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Shards:
    """What this process holds of a tensor: some rectangles, or none. Checkpoints store and read them where they are.

    For engines that keep parameters and optimizer state in flat buffers and cut these anywhere (`of_range`), or that join several
    matrices in one and shard each. Where a DTensor describes it, use a DTensor.

    Args:
        shape: Shape of the whole tensor.
        dtype: Its dtype.
        device: Where the blocks are.
        blocks: The rectangles; over all processes of ``group`` each element is in exactly one.
        group: Processes that hold the whole together; None for all.

    Example:
        >>> shards = Shards.of_range(torch.arange(2.0, 7.0), start=2, shape=(3, 3))
        >>> [(block.offsets, block.values.tolist()) for block in shards.blocks]
        [((0, 2), [[2.0]]), ((1, 0), [[3.0, 4.0, 5.0]]), ((2, 0), [[6.0]])]
        >>> shards.flat()
        tensor([2., 3., 4., 5., 6.])
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    blocks: tuple[Block, ...]
    group: dist.ProcessGroup | None = None

    @classmethod
    def of_range(
        cls, values: torch.Tensor, *, start: int, shape: Sequence[int], group: dist.ProcessGroup | None = None
    ) -> Shards:
        """Elements ``start`` to ``start + len(values)`` of a tensor, counted row by row.

        Args:
            values: The elements, 1-d; views of it become the blocks. Empty if this process holds none.
            start: Position of the first.
            shape: Shape of the whole tensor.
            group: Processes that hold the whole together.
        """
        blocks, taken = [], 0
        for offsets, sizes in _rectangles(tuple(shape), start, start + values.numel()):
            count = math.prod(sizes)
            blocks.append(Block(offsets, values[taken : taken + count].view(sizes)))
            taken += count
        return cls(shape=tuple(shape), dtype=values.dtype, device=values.device, blocks=tuple(blocks), group=group)

    def flat(self) -> torch.Tensor:
        """The blocks' elements one after the other, 1-d: what `of_range` was given."""
        parts = [block.values.reshape(-1) for block in self.blocks]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype, device=self.device)

    def like(self, read: Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor]) -> Shards:
        """Other values in the same places.

        Args:
            read: Gives the values of a rectangle by offsets and sizes.
        """
        blocks = tuple(
            Block(b.offsets, read(b.offsets, tuple(b.values.shape)).to(self.device, self.dtype)) for b in self.blocks
        )
        return Shards(shape=self.shape, dtype=self.dtype, device=self.device, blocks=blocks, group=self.group)

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, on every process of the group. Collective."""
        whole = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        for block in self.blocks:
            whole[tuple(slice(o, o + n) for o, n in zip(block.offsets, block.values.shape, strict=True))] = block.values
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(whole, group=self.group)
        return whole


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the fewest rectangles that make a range of a tensor's elements, in their order."""
    if start == stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    inner = shape[1:]
    size = math.prod(inner)
    first, head = divmod(start, size)
    last, tail = divmod(stop, size)
    if first == last:
        yield from _inside(first, inner, head, tail)
        return
    if head:
        yield from _inside(first, inner, head, size)
        first += 1
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    yield from _inside(last, inner, 0, tail)


def _inside(
    index: int, shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in _rectangles(shape, start, stop):
        yield (index, *offsets), (1, *sizes)
