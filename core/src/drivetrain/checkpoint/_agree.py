"""Agreement of ranks: what one decides all know, and what fails on one fails on all.

Messages are JSON over a gloo group of our own, so that nothing here unpickles and a background save never meets a collective of the
training in flight.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from drivetrain.errors import CheckpointError, DrivetrainError
from drivetrain.specs import ProcessInfo

__all__ = ["Agreement"]

T = TypeVar("T")
#: Bytes that one round carries; longer messages take a second one.
_SMALL = 2048
_ABSENT: Any = object()


class Agreement:
    """Lets the ranks of a job decide together.

    A *domain* is a set of ranks that write one directory together: all, or (``per_node``) those of one machine. Its first rank
    leads it.

    Args:
        process: Who this process is.
        per_node: One domain per machine.
        timeout: Seconds to wait for the slowest rank.

    Example:
        >>> agreement = Agreement(ProcessInfo())
        >>> agreement.exchange({"free": 1}), agreement.leads
        ([{'free': 1}], True)
    """

    def __init__(self, process: ProcessInfo, *, per_node: bool = False, timeout: float = 3600.0) -> None:
        self.process = process
        self._per_node = per_node
        self._timeout = timeout
        self._group: Any = None
        self._members: tuple[int, ...] | None = None

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of this domain. Collective when first asked for."""
        if self._members is None:
            if self._per_node and self.process.world_size > 1:
                nodes = self.exchange(self.process.node_rank)
                self._members = tuple(r for r, node in enumerate(nodes) if node == self.process.node_rank)
            else:
                self._members = tuple(range(self.process.world_size))
        return self._members

    @property
    def leads(self) -> bool:
        """Whether this rank leads its domain."""
        return self.members[0] == self.process.rank

    def exchange(self, value: Any) -> list[Any]:
        """Give every rank every rank's value (anything JSON holds), by rank. Collective.

        Raises:
            CheckpointError: If a rank doesn't answer.
        """
        if self.process.world_size == 1:
            return [value]
        try:
            return [json.loads(m) for m in self._all_gather(json.dumps(value).encode())]
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.process.rank} lost contact with another rank, which has died or hangs: {error}"
            ) from error

    def lead(self, what: str, function: Callable[[], T]) -> T:
        """Call ``function`` on the leader of each domain; give its result (anything JSON holds) to the domain. Collective.

        Raises:
            CheckpointError: On every rank, if it fails on any leader.
        """
        result: Any = _ABSENT
        with self.together(what):
            if self.leads:
                result = function()
        results = self.exchange(None if result is _ABSENT else result)
        return results[self.members[0]]  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Do something on every rank; if it fails on one, it fails on all. Collective at the block's end.

        The block itself must send no collective that a failing rank would leave the others in.

        Args:
            what: A clause for messages: "writing the checkpoint".

        Raises:
            CheckpointError: On ranks where nothing failed, naming the others' errors. A rank that failed raises its own error.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        try:
            texts = self.exchange(None if failure is None else _describe(failure))
        except CheckpointError:
            if failure is not None:
                raise failure  # noqa: B904 - the cause, not the silence that follows from it
            raise
        if failure is not None:
            raise failure
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        if failed:
            raise CheckpointError(f"{what} failed on {len(failed)} of {len(texts)} ranks. {'; '.join(failed[:4])}")

    def close(self) -> None:
        """Give the process group back. Idempotent."""
        if self._group is not None:
            group, self._group = self._group, None
            if dist.is_initialized():
                dist.destroy_process_group(group)

    # -- bytes -------------------------------------------------------------------------------------------------------------

    def _all_gather(self, data: bytes) -> list[bytes]:
        group = self._own_group()
        first = self._round(len(data).to_bytes(8, "little") + data[: _SMALL - 8], _SMALL, group)
        lengths = [int.from_bytes(m[:8], "little") for m in first]
        heads = [m[8 : 8 + n] for m, n in zip(first, lengths, strict=True)]
        longest = max(lengths) - (_SMALL - 8)
        if longest <= 0:
            return heads
        tails = self._round(data[_SMALL - 8 :], longest, group)
        return [h + t[: max(0, n - len(h))] for h, t, n in zip(heads, tails, lengths, strict=True)]

    def _round(self, data: bytes, size: int, group: Any) -> list[bytes]:
        own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        out = [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(self.process.world_size)]
        dist.all_gather(out, own, group=group)
        return [t.numpy().tobytes() for t in out]

    def _own_group(self) -> Any:
        if self._group is None:
            if not dist.is_available() or not dist.is_initialized():
                raise CheckpointError(
                    f"{self.process.world_size} processes take part, but torch.distributed isn't initialized: "
                    "construct the Accelerator before saving or loading"
                )
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=self._timeout))
        return self._group


def _describe(error: Exception) -> str:
    text = str(error)
    return text if isinstance(error, DrivetrainError) else f"{type(error).__name__}: {text}"
