"""Rank 0 reads and sends each rank its own part, and nothing else.

Messages go point to point over a gloo group of their own, so that they neither wait for nor disturb the training group's collectives. A step
is one header (kind, bytes) and one payload: the pickled skeleton of the batch, and the bytes of its tensors. A small payload travels with its
header; whether it will follows from the payloads before, which both sides know. Rank 0 reads one step ahead and announces it before it hands
out the present one: so every rank knows whether the present batch is its last, can have the next one travel meanwhile, and gets an error of
rank 0's data set instead of waiting for ever.

Each message that must be waited for costs turns of the scheduler, and gloo's own thread spins while this one is put to sleep inside of a call. So
messages are few, and the place for the next header is ready before it is sent: data then goes out at once, without asking first.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from drivetrain.data.batch import Round
from drivetrain.data.packing import pack, unpack
from drivetrain.data.ranks import Ranks
from drivetrain.errors import DistributedOperationError

__all__ = ["Channel", "Delivery", "Step", "follow", "serve"]

_DATA, _END, _ERROR, _LEFT = 0, 1, 2, 3
#: Bytes of a header: two int64. A multiple of the alignment, so that what follows it is aligned.
_HEADER = 16
#: Payloads up to so many bytes travel with their header.
_SMALL = 1 << 16


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
    #: Messages under way when a loop was left early: the others' last word for it.
    left: list[_Sending] = field(default_factory=list)
    #: The loop that uses the channel now.
    loop: _Loop | None = None

    def begin(self, loop: _Loop) -> None:
        """A new loop begins: one that was left lying about unfinished is over."""
        if self.loop is not None:
            self.loop.leave()
        self.loop = loop

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

    def receive(self, data: torch.Tensor) -> _Sending:
        """Start receiving from rank 0 into a tensor."""
        try:
            work = dist.irecv(data, group=self.group, tag=self.tag, group_src=0)
        except RuntimeError as error:
            raise self._lost(0) from error
        return _Sending(self, 0, work, data)

    def memory(self, size: int) -> torch.Tensor:
        """So many bytes to receive into."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.pin)

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


class _Room:
    """How many bytes a rank's next header has, with what travels beside it. Both sides know the payloads before.

    The smallest of the last few payloads fits: so hardly any byte is sent in vain where sizes change.
    """

    __slots__ = ("_sizes",)

    def __init__(self) -> None:
        self._sizes: deque[int] = deque(maxlen=4)

    def note(self, payload: int) -> None:
        """A payload's size."""
        self._sizes.append(payload)

    @property
    def bytes(self) -> int:
        """Those of the next header's message."""
        smallest = min(self._sizes, default=0)
        return _HEADER + smallest if smallest <= _SMALL else _HEADER


class _Loop:
    """One side's loop over an epoch."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def leave(self) -> None:
        """It ends; does nothing the second time."""
        raise NotImplementedError

    def require_current(self) -> None:
        """Raise if a newer loop has begun.

        Raises:
            DistributedOperationError: With what to do.
        """
        if self.channel.loop is not self:
            raise DistributedOperationError(
                "Another loop over this loader has begun since: rank 0 reads one loop's batches at a time. Prepare two loaders to read both."
            )


class _Announcement:
    """Rank 0's messages about one step.

    Everything is packed before anything is sent: a batch that can't be pickled raises here and leaves the others' messages in order.

    Args:
        channel: To the others.
        rooms: Of the ranks that get a message.
        step: The step; None at the end.
        failure: Why there is none.
    """

    def __init__(
        self, channel: Channel, rooms: dict[int, _Room], step: Step | None, failure: Exception | None = None
    ) -> None:
        self._channel = channel
        messages: list[tuple[int, int, torch.Tensor]] = []
        for rank in rooms:
            if failure is not None:
                text = f"{type(failure).__name__}: {failure}"
                messages.append((rank, _ERROR, pack(text, before=_HEADER)))
            elif step is None or step.round.received[rank] == 0:
                messages.append((rank, _END, torch.empty(_HEADER, dtype=torch.uint8)))
            else:
                messages.append((rank, _DATA, pack((step.round, step.parts[rank]), before=_HEADER)))
        self._rests: list[tuple[int, torch.Tensor]] = []
        self.sending = []
        for rank, kind, message in messages:
            room = rooms[rank].bytes
            rooms[rank].note(message.numel() - _HEADER)
            self.sending.append(channel.send(rank, _head(kind, message, room)))
            if message.numel() > room:
                self._rests.append((rank, message[room:]))
            if kind != _DATA:
                del rooms[rank]

    def send(self) -> None:
        """Start what had no room beside the headers."""
        for rank, rest in self._rests:
            self.sending.append(self._channel.send(rank, rest))
        self._rests = []

    def wait(self) -> None:
        """Until every rank has its own."""
        for message in self.sending:
            message.wait()
        self.sending = []


def _head(kind: int, message: torch.Tensor, room: int) -> torch.Tensor:
    """The first bytes of a message, as many as there is room for, with the header in front."""
    size = message.numel()
    message[:_HEADER] = torch.tensor([kind, size - _HEADER]).view(torch.uint8)
    return message[:room] if size >= room else torch.cat([message, message.new_zeros(room - size)])


class _Serving(_Loop):
    """Rank 0's loop.

    Args:
        channel: To the others.
        steps: What rank 0 reads.
        ahead: Whether the next step travels before the present one is handed out.
    """

    def __init__(self, channel: Channel, steps: Iterator[Step], *, ahead: bool) -> None:
        super().__init__(channel)
        self._steps = steps
        self._ahead = ahead
        #: Ranks that get another message.
        self._rooms = {rank: _Room() for rank in range(1, channel.ranks.size)}
        self._news: _Announcement | None = None

    def read(self) -> tuple[Step | None, Exception | None, _Announcement]:
        """The next step, announced to the others; or the end, or why it can't be read."""
        step, failure = None, None
        try:
            step = next(self._steps, None)
            news = _Announcement(self.channel, self._rooms, step)  # a batch that can't be pickled fails here
        except DistributedOperationError:
            raise
        except Exception as error:
            step, failure = None, error
            news = _Announcement(self.channel, self._rooms, None, error)
        self._news = news
        if self._ahead or failure is not None:
            news.send()
        return step, failure, news

    def leave(self) -> None:
        news, self._news = self._news, None
        if news is None:
            return
        with contextlib.suppress(DistributedOperationError):  # a rank that is gone shows at the next message
            news.send()
            for rank, room in self._rooms.items():  # none of them, unless the loop is left early
                message = _head(_LEFT, torch.empty(_HEADER, dtype=torch.uint8), room.bytes)
                self.channel.left.append(self.channel.send(rank, message))
            self.channel.left += news.sending


def serve(channel: Channel, steps: Iterator[Step], *, ahead: bool) -> Iterator[Delivery]:
    """Rank 0's side: send the others their parts of each step, yield its own.

    Args:
        channel: To the others.
        steps: What rank 0 reads.
        ahead: Whether the next step travels before the present one is handed out.

    Raises:
        Exception: What ``steps`` raises, after the steps before it were handed out; the other ranks are told.
    """
    loop = _Serving(channel, steps, ahead=ahead)
    channel.begin(loop)
    while channel.left:
        channel.left.pop(0).wait()
    step, failure, news = loop.read()
    try:
        while step is not None:
            present, sent = step, news
            loop.require_current()
            sent.send()
            step, failure, news = loop.read()
            sent.wait()
            yield Delivery(present.parts[0], present.round, step is None and failure is None, present.note)
        # The last word must have arrived before anything can drop the loader, and with it the message: the others take it before their last batch.
        news.wait()
        if failure is not None:
            raise failure
    finally:
        loop.leave()


class _Arrival:
    """What rank 0 announces about the next step, and its payload.

    Args:
        channel: From rank 0.
        room: Both sides' knowledge.
        first: The header's message, under way.
    """

    def __init__(self, channel: Channel, room: _Room, first: _Sending) -> None:
        self._whole = first.wait()
        self.kind, size = self._whole[:_HEADER].view(torch.int64).tolist()
        #: Messages for which there is place from now on, in the order in which they come: the rest of this step, the next header.
        self.coming: deque[_Sending] = deque()
        missing = _HEADER + size - self._whole.numel()
        if missing > 0:
            self.coming.append(self._receive_rest(channel, missing))
        room.note(size)
        if self.kind == _DATA:
            self.coming.append(channel.receive(channel.memory(room.bytes)))

    def _receive_rest(self, channel: Channel, missing: int) -> _Sending:
        first, room = self._whole, self._whole.numel()
        self._whole = channel.memory(room + missing)
        if room > _HEADER:
            self._whole[_HEADER:room] = first[_HEADER:]
        return channel.receive(self._whole[room:])

    def payload(self) -> Any:
        """What came, once it is here."""
        while len(self.coming) > (self.kind == _DATA):
            self.coming.popleft().wait()
        return unpack(self._whole[_HEADER:])


class _Following(_Loop):
    """Another rank's loop.

    Args:
        channel: From rank 0.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._room = _Room()
        #: What was announced last.
        self.arrival: _Arrival | None = None

    def next(self) -> _Arrival:
        """What rank 0 announces next."""
        if self.arrival is None:
            first = self.channel.receive(self.channel.memory(self._room.bytes))
        else:
            first = self.arrival.coming.popleft()
        self.arrival = _Arrival(self.channel, self._room, first)
        return self.arrival

    def leave(self) -> None:
        if self.arrival is not None:
            self.channel.left += self.arrival.coming  # rank 0 leaves this loop, too, and says so there
            self.arrival.coming.clear()


def follow(channel: Channel) -> Iterator[Delivery]:
    """The other ranks' side: yield what rank 0 sends.

    Raises:
        DistributedOperationError: If rank 0's data set raised, with its message, or rank 0 is gone.
    """
    loop = _Following(channel)
    channel.begin(loop)
    while channel.left:
        last = channel.left.pop(0).wait()
        if not channel.left:
            _require(last[:1].item() == _LEFT)
    arrival = loop.next()
    try:
        while arrival.kind == _DATA:
            loop.require_current()
            cut, batch = arrival.payload()
            arrival = loop.next()
            _require(arrival.kind != _LEFT)
            yield Delivery(batch, cut, arrival.kind == _END)
        if arrival.kind == _ERROR:
            raise DistributedOperationError(f"Reading data failed on rank 0, which reads for all: {arrival.payload()}")
    finally:
        loop.leave()


def _require(together: bool) -> None:
    if not together:
        raise DistributedOperationError(
            "Rank 0, which reads for all, left a loop over its loader at another batch than this rank. All ranks must leave a loop together."
        )
