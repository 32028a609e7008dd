"""Reading tensors, or blocks of them, from the files of a checkpoint that hold them by pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.checkpoint.layout import Piece, piece_key
from drivetrain.checkpoint.tensors import is_dtensor, like_dtensor, local_region
from drivetrain.errors import CheckpointError
from drivetrain.interfaces.checkpoint_format import TensorReader
from drivetrain.interfaces.shards import Shards

__all__ = ["TensorStore", "pieces_metadata"]

_PIECES_KEY = "drivetrain.pieces"


def pieces_metadata(pieces: Iterable[Piece]) -> dict[str, str]:
    """What a file's metadata says about the blocks in it: name and shape of the whole, and offsets, by key.

    Example:
        >>> pieces_metadata([Piece("optimizer", "w", "float32", (4,), (2,), (2,))])
        {'drivetrain.pieces': '{"w@2": ["w", [4], [2]]}'}
    """
    table = {piece_key(p): [p.name, p.shape, p.offsets] for p in pieces if p.offsets is not None}
    return {_PIECES_KEY: json.dumps(table)} if table else {}


@dataclass(frozen=True, slots=True)
class _Block:
    reader: TensorReader
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class TensorStore:
    """The tensors of one content, however they are spread over files.

    Args:
        readers: Open files.
        aliases: Other names of tensors.

    Raises:
        CheckpointError: If the files contradict each other.

    Example:
        >>> meta = pieces_metadata([Piece("optimizer", "w", "float32", (4,), (2,), (2,))])
        >>> files = [TensorReader({"w@2": torch.tensor([2.0, 3.0])}, meta)]
        >>> files += [TensorReader({"w@0": torch.tensor([0.0, 1.0])}, {"drivetrain.pieces": '{"w@0": ["w", [4], [0]]}'})]
        >>> TensorStore(files).read("w"), TensorStore(files).read("w", (1,), (2,))
        (tensor([0., 1., 2., 3.]), tensor([1., 2.]))
    """

    def __init__(self, readers: Sequence[TensorReader], aliases: Mapping[str, str] | None = None) -> None:
        self._aliases = dict(aliases or {})
        self._blocks: dict[str, list[_Block]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for reader in readers:
            table = _pieces_of(reader)
            for key in reader.names():
                sizes = reader.shape(key)
                name, shape, offsets = table.get(key, (key, sizes, (0,) * len(sizes)))
                if self._shapes.setdefault(name, shape) != shape or len(offsets) != len(sizes):
                    raise CheckpointError(f"{name} has shape {self._shapes[name]} in one file and {shape} in another")
                self._blocks.setdefault(name, []).append(_Block(reader, key, offsets, sizes))

    def names(self) -> list[str]:
        """Names of the tensors, without other names of the same."""
        return list(self._blocks)

    def __contains__(self, name: str) -> bool:
        return self._aliases.get(name, name) in self._blocks

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._shapes[self._real(name)]

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of the tensor."""
        block = self._blocks[self._real(name)][0]
        return block.reader.dtype(block.key)

    def read(
        self,
        name: str,
        offsets: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        *,
        shared: bool = False,
    ) -> torch.Tensor:
        """A tensor, or a block of it, on the CPU.

        Args:
            name: The tensor, by any of its names.
            offsets: Where the block starts, per dimension.
            sizes: The block's shape.
            shared: The memory may be shared with the file: to be copied from at once, and not to be kept.

        Raises:
            CheckpointError: If there is no such tensor, or parts of it are missing.
        """
        real = self._real(name)
        shape = self._shapes[real]
        start = tuple(offsets) if offsets is not None else (0,) * len(shape)
        size = tuple(sizes) if sizes is not None else shape
        blocks = self._blocks[real]
        for block in blocks:
            inside = _overlap(start, size, block)
            if inside is not None and all(s.stop - s.start == n for s, n in zip(inside, size, strict=True)):
                region = None if size == block.sizes else inside
                return block.reader.view(block.key, region) if shared else block.reader.read(block.key, region)
        return self._assemble(real, start, size)

    def read_like(self, name: str, template: Any, *, shared: bool = False) -> Any:
        """What this rank holds of a tensor that is to be laid out like ``template``, on the template's device.

        Args:
            name: The tensor.
            template: A DTensor: only this rank's block is read, and the result has its mesh and placements. `Shards`: its blocks are read.
                Else the whole is read.
            shared: As for `read`; it holds for plain templates on the CPU.
        """
        if isinstance(template, Shards):
            return template.like(lambda offsets, sizes: self.read(name, offsets, sizes))
        if not is_dtensor(template):
            return self.read(name, shared=shared)
        return like_dtensor(self.read(name, *local_region(template)), template)

    def _real(self, name: str) -> str:
        real = self._aliases.get(name, name)
        if real not in self._blocks:
            raise CheckpointError(f"the checkpoint holds no tensor {name!r}")
        return real

    def _assemble(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        out = torch.empty(size, dtype=self.dtype(name), device="cpu")
        covered = 0
        for block in self._blocks[name]:
            inside = _overlap(start, size, block)
            if inside is None:
                continue
            target = tuple(
                slice(s.start + o - a, s.stop + o - a) for s, o, a in zip(inside, block.offsets, start, strict=True)
            )
            part = block.reader.view(block.key, inside)
            out[target].copy_(part)
            covered += part.numel()
        if covered != out.numel():
            raise CheckpointError(f"parts of {name} are not in the checkpoint: {covered} of {out.numel()} values found")
        return out


def _overlap(start: Sequence[int], size: Sequence[int], block: _Block) -> tuple[slice, ...] | None:
    """What a block has of a region, in the block's own coordinates; None if nothing."""
    slices = []
    for a, n, o, m in zip(start, size, block.offsets, block.sizes, strict=True):
        low, high = max(a, o), min(a + n, o + m)
        if low > high or (low == high and n > 0):
            return None
        slices.append(slice(low - o, high - o))
    return tuple(slices)


def _pieces_of(reader: TensorReader) -> dict[str, tuple[str, tuple[int, ...], tuple[int, ...]]]:
    text = reader.metadata.get(_PIECES_KEY, "{}")
    try:
        return {k: (str(n), tuple(map(int, s)), tuple(map(int, o))) for k, (n, s, o) in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"a tensor file's table of pieces is damaged: {error}") from error
