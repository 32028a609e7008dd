"""Which rank writes which tensor into which file.

Every rank describes the pieces of tensors that it holds. A piece that several ranks hold (replicated weights, hybrid shards) is
written by one of them, so that all write about as much. Model weights are laid out as other tools read them: whole tensors in one file, or in
several with an index; everything else is stored by its shards, each with its place in the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.checkpoint.tensors import dtype_from_name, dtype_name, is_sharded, local_blocks
from drivetrain.errors import UnsupportedError

__all__ = ["Piece", "Plan", "Shard", "describe", "make_plan", "piece_key", "shard_file", "shard_names"]

#: A rank is given something to write only for every so many bytes that there are, so that small states make few files.
_BYTES_PER_WRITER = 64 * 10**6
_MIN_SHARD = 256 * 10**6
_MAX_SHARD = 5 * 10**9


@dataclass(frozen=True, slots=True)
class Piece:
    """A block of a tensor that a rank holds.

    Args:
        content: What the tensor is part of: "model", "optimizer_1".
        name: The tensor's name there.
        dtype: Name of its dtype.
        shape: Shape of the whole tensor.
        offsets: Where the block starts, per dimension; None for the whole tensor.
        sizes: Shape of the block.
        alias_of: Name of the tensor that this one is another name of, or "".
    """

    content: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None
    sizes: tuple[int, ...]
    alias_of: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of the block."""
        return math.prod(self.sizes) * dtype_from_name(self.dtype).itemsize

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * dtype_from_name(self.dtype).itemsize

    def to_json(self) -> list[Any]:
        """As JSON holds it."""
        return [self.content, self.name, self.dtype, self.shape, self.offsets, self.sizes, self.alias_of]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Piece:
        """Undo `to_json`."""
        content, name, dtype, shape, offsets, sizes, alias_of = data
        at = None if offsets is None else tuple(offsets)
        return cls(content, name, dtype, tuple(shape), at, tuple(sizes), alias_of)


def describe(content: str, name: str, tensor: Any, alias_of: str = "") -> list[Piece]:
    """The pieces of a tensor that this rank holds; an empty one if it holds none.

    Example:
        >>> import torch
        >>> [piece.sizes for piece in describe("model", "w", torch.zeros(2, 3))]
        [(2, 3)]
    """
    shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
    if not is_sharded(tensor):
        return [Piece(content, name, dtype, shape, None, shape, alias_of)]
    none = (0,) * len(shape)
    regions = [(b.offsets, tuple(b.values.shape)) for b in local_blocks(tensor)] or [(none, none)] * bool(shape)
    return [Piece(content, name, dtype, shape, offsets, sizes, alias_of) for offsets, sizes in regions]


def piece_key(piece: Piece) -> str:
    """Name of a piece in its file.

    Example:
        >>> piece_key(Piece("optimizer", "w", "float32", (4, 3), (2, 0), (2, 3)))
        'w@2,0'
    """
    return piece.name if piece.offsets is None else f"{piece.name}@{','.join(map(str, piece.offsets))}"


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a model's weights.

    Args:
        file: Its name, without suffix.
        names: The tensors in it.
        owner: The rank that writes it.
        nbytes: Bytes of its tensors.
    """

    file: str
    names: tuple[str, ...]
    owner: int
    nbytes: int


@dataclass(slots=True)
class Plan:
    """Who writes what.

    Args:
        pieces: Per content that is stored by shards, the pieces that this rank writes.
        writers: Per such content, the ranks that write some.
        models: Per model, its files, equal on every rank.
        aliases: Per model, other names of tensors.
    """

    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    writers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    models: dict[str, list[Shard]] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)


def make_plan(held: Mapping[int, Sequence[Piece]], *, rank: int, models: Iterable[str]) -> Plan:
    """Share the writing among ranks. Pure: every rank computes the same.

    Args:
        held: What each rank holds, by rank.
        rank: Whose plan.
        models: Contents that are laid out as whole tensors for other tools.

    Raises:
        UnsupportedError: If parts of a tensor are held by none of these ranks.

    Example:
        >>> weight = Piece("model", "w", "float32", (4,), None, (4,))
        >>> make_plan({0: [weight], 1: [weight]}, rank=0, models=["model"]).models["model"][0].file
        'model'
    """
    models = tuple(models)
    plan = Plan(aliases=_aliases(held, models))
    wholes, blocks = _sort(held, models, plan.aliases)
    total = sum(p.whole_nbytes for names in wholes.values() for p, _ in names.values())
    total += sum(p.nbytes for p, _ in blocks.values())
    ranks = sorted(held)
    count = min(max(total // _BYTES_PER_WRITER, 1), len(ranks))
    chosen = frozenset(ranks[i * len(ranks) // count] for i in range(count))
    load = dict.fromkeys(ranks, 0)
    for content in models:
        plan.models[content] = _model_files(content, wholes.get(content, {}), chosen, load)
    owners: dict[str, set[int]] = {}
    for piece, holders in sorted(
        blocks.values(), key=lambda item: (-item[0].nbytes, item[0].content, piece_key(item[0]))
    ):
        owner = _least_loaded(holders, chosen, load)
        load[owner] += piece.nbytes
        owners.setdefault(piece.content, set()).add(owner)
        if owner == rank:
            plan.pieces.setdefault(piece.content, []).append(piece)
    plan.writers = {content: tuple(sorted(who)) for content, who in owners.items()}
    return plan


_Held = tuple[Piece, list[int]]


def _aliases(held: Mapping[int, Sequence[Piece]], models: Sequence[str]) -> dict[str, dict[str, str]]:
    # A rank whose block is empty can't see that two tensors are one; any other one can.
    aliases: dict[str, dict[str, str]] = {content: {} for content in models}
    for pieces in held.values():
        for p in pieces:
            if p.alias_of and p.content in aliases:
                aliases[p.content].setdefault(p.name, p.alias_of)
    return aliases


def _sort(
    held: Mapping[int, Sequence[Piece]], models: Sequence[str], aliases: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, dict[str, _Held]], dict[tuple[Any, ...], _Held]]:
    """Whole tensors of models by content and name; blocks of all else; each with its holders."""
    wholes: dict[str, dict[str, _Held]] = {}
    blocks: dict[tuple[Any, ...], _Held] = {}
    covered: dict[tuple[str, str], int] = {}
    for rank in sorted(held):
        for p in held[rank]:
            if p.content in models:
                if p.name not in aliases[p.content]:
                    holders = wholes.setdefault(p.content, {}).setdefault(p.name, (p, []))[1]
                    if rank not in holders:
                        holders.append(rank)
                continue
            if 0 in p.sizes and 0 not in p.shape:
                continue  # this rank's block is empty
            key = (p.content, p.name, p.offsets)
            if key not in blocks:
                blocks[key] = (p, [])
                covered[p.content, p.name] = covered.get((p.content, p.name), 0) + math.prod(p.sizes)
            blocks[key][1].append(rank)
    for (content, name, _), (p, _) in blocks.items():
        if covered[content, name] != math.prod(p.shape):
            raise UnsupportedError(
                f"{name} of {content} is sharded over processes of several machines, so that no machine can save all of it "
                "alone: use a directory that all machines share, and save_on_each_node=False"
            )
    return wholes, blocks


def _least_loaded(holders: Sequence[int], chosen: frozenset[int], load: Mapping[int, int]) -> int:
    candidates = [r for r in holders if r in chosen] or list(holders)
    return min(candidates, key=lambda r: (load[r], r))


def _model_files(
    content: str, tensors: Mapping[str, _Held], chosen: frozenset[int], load: dict[int, int]
) -> list[Shard]:
    total = sum(p.whole_nbytes for p, _ in tensors.values())
    limit = min(_MAX_SHARD, max(_MIN_SHARD, math.ceil(total / len(chosen))))
    by_holders: dict[tuple[int, ...], dict[str, int]] = {}
    for name, (piece, ranks) in tensors.items():
        by_holders.setdefault(tuple(ranks), {})[name] = piece.whole_nbytes
    groups = [(h, names) for h, sizes in by_holders.items() for names in shard_names(sizes, limit)]
    shards = []
    for i, (holders, names) in enumerate(groups):
        nbytes = sum(tensors[name][0].whole_nbytes for name in names)
        owner = _least_loaded(holders, chosen, load)
        load[owner] += nbytes
        shards.append(Shard(shard_file(content, i, len(groups)), tuple(names), owner, nbytes))
    if not shards:  # a model without a tensor
        shards.append(Shard(shard_file(content, 0, 1), (), min(load), 0))
    return shards


def shard_names(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Cut names into runs of at most ``limit`` bytes each, in order; a tensor above it stands alone.

    Example:
        >>> shard_names({"a": 3, "b": 3, "c": 9, "d": 1}, 6)
        [['a', 'b'], ['c'], ['d']]
    """
    shards: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not shards or filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def shard_file(content: str, index: int, count: int) -> str:
    """Name, without suffix, of a model's i-th file, as other tools expect it.

    Example:
        >>> shard_file("model", 0, 1), shard_file("model", 1, 3)
        ('model', 'model-00002-of-00003')
    """
    return content if count == 1 else f"{content}-{index + 1:05d}-of-{count:05d}"
