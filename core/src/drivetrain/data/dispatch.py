"""Rank 0 reads and sends each rank its own part, and nothing else.

Messages go point to point over a gloo group of their own, so that they neither wait for nor disturb the training group's collectives. A step
is one header (kind, bytes) and one payload: the pickled skeleton of the batch, and the bytes of its tensors. Rank 0 reads one step ahead and
announces it before it hands out the present one: so every rank knows whether the present batch is its last, can have the next one
travel meanwhile, and gets an error of rank 0's data set instead of waiting for ever.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from drivetrain.data.batch import Round
from drivetrain.data.ranks import Ranks
from drivetrain.errors import DistributedOperationError

__all__ = ["Channel", "Delivery", "Step", "follow", "pack", "serve", "unpack"]

_DATA, _END, _ERROR = 0, 1, 2
_ALIGNMENT = 16


class Step(NamedTuple):
    """One step that rank 0 has read.

    Args:
        parts: Each rank's batch; None for a rank that gets none.
        round: What the ranks get.
        note: Anything that rank 0 needs again when it hands its own part out.
    """

    parts: list[Any]
    round: Round
    note: Any = None


class Delivery(NamedTuple):
    """One rank's batch.

    Args:
        batch: The batch.
        round: What the ranks get at this step.
        is_last: Whether this rank gets no other.
        note: As in `Step`, on rank 0.
    """

    batch: Any
    round: Round
    is_last: bool
    note: Any = None


# -- batches as bytes ------------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Takes tensors out of the pickle; each leaves its dtype, shape and place among the bytes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[torch.Tensor] = []
        self.size = 0
        self._places: dict[int, tuple[torch.dtype, tuple[int, ...], int]] = {}

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not torch.Tensor:
            return None
        place = self._places.get(id(value))
        if place is None:
            if value.layout is not torch.strided or value.is_quantized or value.requires_grad or value.is_nested:
                return None  # torch's own way of pickling keeps what these have besides values
            self.tensors.append(value)
            place = self._places[id(value)] = (value.dtype, tuple(value.shape), self.size)
            self.size += -(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, data: torch.Tensor) -> None:
        super().__init__(file)
        self._data = data
        self._made: dict[int, torch.Tensor] = {}

    def persistent_load(self, place: tuple[torch.dtype, tuple[int, ...], int]) -> torch.Tensor:
        dtype, shape, offset = place
        size = dtype.itemsize
        for n in shape:
            size *= n
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        if offset not in self._made:
            self._made[offset] = self._data[offset : offset + size].view(dtype).view(shape)
        return self._made[offset]


def pack(value: Any) -> torch.Tensor:
    """Any picklable structure as a uint8 tensor: the skeleton's length, the skeleton, then the tensors' bytes.

    Example:
        >>> batch = {"x": torch.arange(3), "ragged": [torch.ones(2), torch.ones(1)], "name": "a", "none": None}
        >>> unpack(pack(batch))["ragged"]
        [tensor([1., 1.]), tensor([1.])]
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    skeleton = file.getbuffer()
    start = -(-(8 + len(skeleton)) // _ALIGNMENT) * _ALIGNMENT
    data = torch.zeros(start + pickler.size, dtype=torch.uint8)
    data[:8] = torch.tensor([len(skeleton)]).view(torch.uint8)
    data[8 : 8 + len(skeleton)] = torch.frombuffer(skeleton, dtype=torch.uint8)
    for tensor in pickler.tensors:
        size = tensor.numel() * tensor.element_size()
        if size:
            data[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return data


def unpack(data: torch.Tensor) -> Any:
    """The structure that `pack` was given. Tensors are views of ``data``.

    Args:
        data: uint8, contiguous, on the CPU; from a trusted rank, since it holds a pickle.

    Example:
        >>> unpack(pack(("a", torch.tensor(1.5))))
        ('a', tensor(1.5000))
    """
    length = int(data[:8].view(torch.int64))
    start = -(-(8 + length) // _ALIGNMENT) * _ALIGNMENT
    file = io.BytesIO(data[8 : 8 + length].numpy().tobytes())
    return _Unpickler(file, data[start:]).load()


# -- messages --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Channel:
    """Messages of one loader from rank 0 to the others.

    Args:
        ranks: All ranks.
        group: A gloo group of them.
        tag: Keeps this loader's messages apart from those of others on the group.
        pin: Whether to receive into pinned memory.
    """

    ranks: Ranks
    group: dist.ProcessGroup | None
    tag: int
    pin: bool = False

    @staticmethod
    def make_group(ranks: Ranks) -> dist.ProcessGroup:
        """A gloo group of the ranks. A collective operation of them alone."""
        members = dist.get_process_group_ranks(ranks.group) if ranks.group is not None else None
        group: Any = dist.new_group(members, backend="gloo", use_local_synchronization=members is not None)
        return group  # type: ignore[no-any-return]

    def send(self, rank: int, data: torch.Tensor) -> _Sending:
        """Start sending; the tensor is kept until it has arrived."""
        try:
            work = dist.isend(data, group=self.group, tag=self.tag, group_dst=rank)
        except RuntimeError as error:
            raise self._lost(rank) from error
        return _Sending(self, rank, work, data)

    def receive(self, size: int, dtype: torch.dtype = torch.uint8) -> _Sending:
        """Start receiving from rank 0."""
        data = torch.empty(size, dtype=dtype, pin_memory=self.pin and dtype is torch.uint8)
        try:
            work = dist.irecv(data, group=self.group, tag=self.tag, group_src=0)
        except RuntimeError as error:
            raise self._lost(0) from error
        return _Sending(self, 0, work, data)

    def receive_header(self) -> tuple[int, int]:
        """Kind and bytes of the next step."""
        kind, size = self.receive(2, torch.int64).wait().tolist()
        return kind, size

    def _lost(self, rank: int) -> DistributedOperationError:
        return DistributedOperationError(
            f"Rank {self.ranks.index} of {self.ranks.size} lost the connection to rank {rank} while batches were dispatched: that rank died, "
            "raised, or left its loop early. Look at its output for the first error."
        )


@dataclass(slots=True)
class _Sending:
    """A message under way, and the memory it needs."""

    channel: Channel
    rank: int
    work: Any
    data: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Until it has arrived; to be called once, for a second call would wait for another message."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.channel._lost(self.rank) from error
        return self.data


class _Announcement:
    """Rank 0's messages about one step.

    Everything is packed before anything is sent: a batch that can't be pickled raises here and leaves the others' messages in order.
    """

    def __init__(self, channel: Channel, live: set[int], step: Step | None, failure: Exception | None) -> None:
        self._channel = channel
        messages: list[tuple[int, int, torch.Tensor | None]] = []
        for rank in sorted(live):
            if failure is not None:
                messages.append((rank, _ERROR, pack(f"{type(failure).__name__}: {failure}")))
            elif step is None or step.round.received[rank] == 0:
                messages.append((rank, _END, None))
            else:
                messages.append((rank, _DATA, pack((step.round, step.parts[rank]))))
        self._payloads = [(rank, payload) for rank, _, payload in messages if payload is not None]
        self._sending = []
        for rank, kind, payload in messages:
            self._sending.append(channel.send(rank, torch.tensor([kind, 0 if payload is None else payload.numel()])))
            if kind == _END:
                live.discard(rank)

    def send(self) -> None:
        """Start the payloads."""
        for rank, payload in self._payloads:
            self._sending.append(self._channel.send(rank, payload))
        self._payloads = []

    def wait(self) -> None:
        """Until every rank has its own."""
        for message in self._sending:
            message.wait()
        self._sending = []


def serve(channel: Channel, steps: Iterator[Step], *, ahead: bool) -> Iterator[Delivery]:
    """Rank 0's side: send the others their parts of each step, yield its own.

    Args:
        channel: To the others.
        steps: What rank 0 reads.
        ahead: Whether the next step travels before the present one is handed out.

    Raises:
        Exception: What ``steps`` raises, after the steps before it were handed out; the other ranks are told.
    """
    live = set(range(1, channel.ranks.size))

    def read() -> tuple[Step | None, Exception | None, _Announcement]:
        step, failure = None, None
        try:
            step = next(steps, None)
            news = _Announcement(channel, live, step, None)  # a batch that can't be pickled fails here
        except DistributedOperationError:
            raise
        except Exception as error:
            step, failure = None, error
            news = _Announcement(channel, live, None, error)
        if ahead or failure is not None:
            news.send()
        return step, failure, news

    step, failure, news = read()
    try:
        while step is not None:
            present, sent = step, news
            if not ahead:
                sent.send()
                sent.wait()
            step, failure, news = read()
            sent.wait()
            yield Delivery(present.parts[0], present.round, step is None and failure is None, present.note)
        if failure is not None:
            raise failure
    finally:
        with contextlib.suppress(DistributedOperationError):  # a rank that is gone shows at the next message
            news.wait()


def follow(channel: Channel, *, ahead: bool) -> Iterator[Delivery]:
    """The other ranks' side: yield what rank 0 sends.

    Raises:
        DistributedOperationError: If rank 0's data set raised, with its message, or rank 0 is gone.
    """
    kind, size = channel.receive_header()
    coming = channel.receive(size) if size and (ahead or kind == _ERROR) else None
    try:
        while kind == _DATA:
            coming = coming or channel.receive(size)
            cut, batch = unpack(coming.wait())
            coming = None
            kind, size = channel.receive_header()
            coming = channel.receive(size) if size and (ahead or kind == _ERROR) else None
            yield Delivery(batch, cut, kind == _END)
        if kind == _ERROR:
            assert coming is not None
            text, coming = unpack(coming.wait()), None
            raise DistributedOperationError(f"Reading data failed on rank 0, which reads for all: {text}")
    finally:
        if coming is not None:
            with contextlib.suppress(DistributedOperationError):
                coming.wait()
