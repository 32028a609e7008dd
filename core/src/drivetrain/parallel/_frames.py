"""The one message that every collective of this package starts with.

Ranks that enter different collectives, or the same one with different tensors, hang or read each other's bytes as their own. So each
operation first sends a *frame*: a record of one fixed size, which no disagreement can make unequal. It holds a fingerprint of the operation and of
what it is applied to, the sizes that may differ between ranks, and, if it is small, the payload itself. Every rank reads all frames, so all
of them reach the same verdict: they go on together, or all raise the same error. Where the payload fits, the frame is the only collective.

Layout, in 64-bit words: fingerprint, length of the description, bytes of payload, flag, `SIZES` sizes, then `INLINE` bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from drivetrain._marks import marks
from drivetrain.errors import DistributedOperationError
from drivetrain.parallel._groups import call, caller, control_device, global_ranks, members

__all__ = ["INLINE", "AgreedError", "Frames", "all_gather", "as_bytes", "exchange", "tell_failure"]

#: Bytes of a frame, words of its header, sizes that have a place in it, and bytes of payload that it carries.
FRAME = 1024
HEADER = 4
SIZES = 28
INLINE = FRAME - 8 * (HEADER + SIZES)

_FAILED = -1
# Renamed in torch 2.13; the old name warns there.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class AgreedError(DistributedOperationError):
    """Raised by all ranks of ``group`` together, so that none has to tell the others."""

    def __init__(self, message: str, group: dist.ProcessGroup | None) -> None:
        super().__init__(message)
        self.group = group


class Frames(NamedTuple):
    """What all ranks sent, by rank in the group.

    Args:
        sizes: The sizes given by each rank.
        payload_bytes: The length of each rank's payload.
        flags: Each rank's flag.
        inline: uint8 ``[world, INLINE]`` on the CPU: payloads that fit, each from the start of its row.
    """

    sizes: list[tuple[int, ...]]
    payload_bytes: list[int]
    flags: list[int]
    inline: torch.Tensor

    @property
    def fits(self) -> bool:
        """Whether every rank's payload is in its frame."""
        return max(self.payload_bytes) <= INLINE


def all_gather(what: str, output: torch.Tensor, data: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Fill ``output`` with every rank's ``data``; all must have the same size."""
    call(what, group, _all_gather, output, data)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor as a flat uint8 tensor: a view if it is contiguous."""
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.detach().contiguous().view(-1)
    # One element cut out of a row counts as contiguous and keeps the row's stride, with which it can't be seen as bytes.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def exchange(
    operation: str,
    *,
    layout: str = "",
    sizes: Sequence[int] = (),
    payload: torch.Tensor | None = None,
    payload_bytes: int | None = None,
    flag: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Frames:
    """Send this rank's frame and read those of all ranks. One collective; two with more than `SIZES` sizes.

    Args:
        operation: Name of the operation, as the user wrote it.
        layout: What must be the same on all ranks.
        sizes: What may differ; as many on each rank.
        payload: uint8 tensor on the CPU; travels in the frame if it has at most `INLINE` bytes.
        payload_bytes: Its length, if it isn't given here.
        flag: A non-negative number.
        group: The process group; must have more than one rank.

    Raises:
        DistributedOperationError: On every rank: if ranks called different operations, with different layouts, or one of them failed.
    """
    description = f"{operation}({layout})".encode()
    if payload_bytes is None:
        payload_bytes = 0 if payload is None else payload.numel()
    digest = int.from_bytes(hashlib.blake2b(description, digest_size=8).digest(), "little", signed=True)
    fitting = sizes[:SIZES]
    inline, headers = _send(operation, (digest, len(description), payload_bytes, flag, *fitting), payload, group)
    failed = [r for r, words in enumerate(headers) if words[3] == _FAILED]
    if failed:
        raise DistributedOperationError(_failure_text(operation, failed, headers, inline, group))
    if any(words[0] != digest for words in headers):
        raise AgreedError(_mismatch_text(operation, description, headers, group), group)
    return Frames(
        sizes=[words[HEADER:] for words in headers] if len(sizes) <= SIZES else _all_sizes(operation, sizes, group),
        payload_bytes=[words[2] for words in headers],
        flags=[words[3] for words in headers],
        inline=inline,
    )


def tell_failure(operation: str, error: BaseException, group: dist.ProcessGroup | None) -> None:
    """Take part in the others' frame with the news that this rank can't go on: they raise instead of waiting for it.

    The caller raises ``error`` next, so that a failure to tell it is of no more interest.
    """
    text = f"{type(error).__name__}: {error}".encode()[:INLINE]
    payload = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    with contextlib.suppress(DistributedOperationError):
        _send(operation, (0, 0, len(text), _FAILED), payload, group)


def _send(
    operation: str, words: tuple[int, ...], payload: torch.Tensor | None, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
    """Exchange frames; return every rank's bytes inline and as many words as were given. Written for speed: this is the cost of each call."""
    notes = marks()
    if notes is not None and group is None:
        notes.mark(operation)
    record = struct.Struct(f"<{len(words)}q")
    data = bytearray(FRAME)
    record.pack_into(data, 0, *words)
    frame = torch.frombuffer(data, dtype=torch.uint8)
    if payload is not None and 0 < payload.numel() <= INLINE:
        # As tensors, so that what is packed into a frame stays unknown where it has no values: in a rehearsal.
        frame[FRAME - INLINE : FRAME - INLINE + payload.numel()].copy_(payload)
    device = control_device(group)
    world = members(group)[1]
    gathered = torch.empty(world * FRAME, dtype=torch.uint8, device=device)
    all_gather(operation, gathered, frame if device.type == "cpu" else frame.to(device), group)
    gathered = gathered.cpu()
    raw = gathered.numpy().data
    headers = [record.unpack_from(raw, rank * FRAME) for rank in range(world)]
    return gathered.view(world, FRAME)[:, FRAME - INLINE :], headers


def _all_sizes(operation: str, sizes: Sequence[int], group: dist.ProcessGroup | None) -> list[tuple[int, ...]]:
    device = control_device(group)
    mine = torch.tensor(list(sizes), dtype=torch.int64, device=device)
    output = torch.empty(members(group)[1] * len(sizes), dtype=torch.int64, device=device)
    all_gather(operation, output, mine, group)
    return [tuple(row) for row in output.view(-1, len(sizes)).tolist()]


def _failure_text(
    operation: str,
    failed: list[int],
    headers: list[tuple[int, ...]],
    inline: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> str:
    ranks = global_ranks(group)
    lines = []
    for r in failed:
        raw = bytes(inline[r, : headers[r][2]].tolist())
        lines.append(f"  rank {ranks[r]}: {raw.decode(errors='replace')}")
    return f"{operation} was given up on every rank, because it failed on\n" + "\n".join(lines)


def _mismatch_text(
    operation: str, description: bytes, headers: list[tuple[int, ...]], group: dist.ProcessGroup | None
) -> str:
    """Every rank's description and the line of the user's code, by one more collective."""
    place = caller().encode()
    descriptions = _texts(operation, description, [words[1] for words in headers], group)
    places = _texts(operation, place.ljust(256)[:256], [256] * len(headers), group)
    ranks = global_ranks(group)
    lines = []
    for r, (text, where) in enumerate(zip(descriptions, places, strict=True)):
        lines.append(f"  rank {ranks[r]}: {_shorten(text)} at {where.strip()}")
    if len({text.partition("(")[0] for text in descriptions}) > 1:
        advice = (
            "Every rank must call the same operations in the same order: look for a branch that only some ranks take."
        )
    else:
        advice = (
            "Structure, dtypes and shapes must be equal on all ranks (in `gather` the number of rows may differ). "
            "`pad_across_processes` makes sizes equal along a dimension; `gather_object` takes anything."
        )
    return f"Ranks disagree in {operation}:\n" + "\n".join(lines) + f"\n{advice}"


def _texts(operation: str, text: bytes, lengths: list[int], group: dist.ProcessGroup | None) -> list[str]:
    device = control_device(group)
    longest = max(lengths)
    mine = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)
    output = torch.empty(longest * len(lengths), dtype=torch.uint8, device=device)
    all_gather(operation, output, mine, group)
    rows = output.cpu().view(-1, longest).tolist()
    return [bytes(row[:length]).decode(errors="replace") for row, length in zip(rows, lengths, strict=True)]


def _shorten(text: str, limit: int = 1000) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
