"""One tracker's thread: takes records in order, delivers them, and keeps on disk what can't be delivered.

What waits for a tracker is, oldest first: the records in the tracker's hands, those in its spool on disk, those in the queue in memory. The thread
takes from the spool while there is something, else from the queue, so that order is kept through failures. Each tracker has a thread of its
own: one that hangs can't hold up another.

While a call hangs or the queue is over its bound, `drivetrain.tracking.keeper.Keeper` moves the queue to the spool, so that neither training waits nor memory grows.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from math import inf
from queue import Empty, SimpleQueue
from typing import Any

from drivetrain.errors import DrivetrainError
from drivetrain.interfaces.tracker import Tracker
from drivetrain.tracking.delivery import Delivery
from drivetrain.tracking.options import TrackingOptions
from drivetrain.tracking.record import Record
from drivetrain.tracking.redaction import Redactor
from drivetrain.tracking.spool import Spool

__all__ = ["Lane"]

logger = logging.getLogger("drivetrain.tracking")

#: A tracker that refuses this many records in a row is down; fewer, followed by one that it takes, are refused for their own sake.
_STRIKES = 3


class Lane:
    """A tracker, its queue, its spool and its thread.

    Args:
        tracker: The tracker, not started.
        spool: Where undelivered records go.
        options: Bounds.
        on_trouble: Called from the training thread when the queue must be moved to the spool.
    """

    def __init__(
        self, tracker: Tracker, *, spool: Spool, options: TrackingOptions, on_trouble: Callable[[Lane], None]
    ) -> None:
        self.tracker = tracker
        self.name = tracker.spec.name
        self.spool = spool
        self.troubled = False
        self.started = threading.Event()
        self.ended = threading.Event()
        #: What the user must know about a run that didn't open.
        self.start_error: BaseException | None = None
        self._options = options
        self._on_trouble = on_trouble
        self._delivery = Delivery(tracker)
        self._queue: deque[Record] = deque()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._signalled = False
        self._put_weight = 0  # written by producers under the hub's lock
        self._taken_weight = 0  # written under the lane's lock
        self._lock = threading.RLock()
        self._in_flight: list[Record] = []
        self._in_flight_spooled = False
        self._opened = False
        self._deadline = inf
        self._retry_at = 0.0
        self._backoff = options.retry_after
        self._flushes_wanted = 0
        self._flushes_done = 0
        self._stopping = False
        self._warned: set[str] = set()
        self._redactor = Redactor()
        self._thread = threading.Thread(target=self._run, name=f"drivetrain-tracker-{self.name}", daemon=True)

    # -- called by the training thread ---------------------------------------------------------------------------------------

    def put(self, record: Record, now: float) -> None:
        """Enqueue; ``now`` is ``time.monotonic()``. The caller holds the hub's lock."""
        self._queue.append(record)
        self._put_weight += record.weight
        if not self._signalled:
            self._signalled = True
            self._wake.put(None)
        if (now > self._deadline or self.full) and not self.troubled:
            self._on_trouble(self)

    def begin(self) -> None:
        """Start the thread, which opens the run."""
        self._deadline = time.monotonic() + self._options.hang_timeout
        self._thread.start()

    def request_flush(self) -> int:
        """Ask for a flush; takes no lock. Returns the number for `flushed`."""
        self._flushes_wanted += 1
        self._wake.put(None)
        return self._flushes_wanted

    def flushed(self, number: int) -> bool:
        """Whether all that was logged before that request is durable."""
        return self._flushes_done >= number or self.ended.is_set()

    def request_stop(self, status: str) -> None:
        """Ask the thread to deliver what waits, close the run and end."""
        self.tracker.status = status
        self._stopping = True
        self._wake.put(None)

    @property
    def busy(self) -> bool:
        """Whether a call has been running for longer than it may."""
        return time.monotonic() > self._deadline

    @property
    def full(self) -> bool:
        """Whether more waits in memory than may."""
        return self._put_weight - self._taken_weight > self._options.most_pending

    # -- called by the keeper and the hub --------------------------------------------------------------------------------------

    def spill(self) -> None:
        """Move what waits in memory to the spool, with the records of a call that is running, since it may never return.

        If the call does return, its records, then the first in the spool, count as delivered.
        """
        with self._lock:
            records: list[Record] = []
            if self._in_flight and not self._in_flight_spooled:
                self._in_flight_spooled = True
                records += self._in_flight
            self._keep(records + self._pop(len(self._queue)))

    def sync(self) -> None:
        """Make the spool durable."""
        with self._lock, contextlib.suppress(OSError):
            self.spool.sync()

    def warn(self, topic: str, message: str, *args: Any) -> None:
        """Warn once per topic."""
        if topic not in self._warned:
            self._warned.add(topic)
            logger.warning(message, *(a if isinstance(a, (int, float)) else self._redactor.text(str(a)) for a in args))

    # -- the thread --------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._open()
            self.started.set()
            while self.start_error is None and not self.ended.is_set():
                self._await_work()
                wanted, stopping = self._flushes_wanted, self._stopping
                self._drain(last=stopping)
                if wanted > self._flushes_done:
                    self._flush()
                    self._flushes_done = wanted
                if stopping:
                    self._close()
        except Exception:  # a fault of the hub itself: say so, and let nobody wait for this thread
            logger.exception("The thread of tracker %r ended; what it holds goes to %s.", self.name, self.spool.path)
            self.spill()
        finally:
            self._deadline = inf
            self.started.set()
            self.ended.set()

    def _open(self) -> None:
        """Open the run. The user's mistakes are kept for `start_error`, the system's trouble becomes a warning."""
        try:
            self._call(self.tracker.start)
            self._opened = True
            self.note_run()
        except (DrivetrainError, ImportError) as error:
            self.start_error = error
        except Exception as error:
            self._postpone()
            self.warn(
                "start",
                "The tracker %r could not open its run (%s: %s). Values are kept in %s and delivered once it can.",
                self.name,
                type(error).__name__,
                error,
                self.spool.path,
            )

    def _await_work(self) -> None:
        """Sleep until there is something to do; then let values collect for a moment, unless someone waits for them."""
        with contextlib.suppress(Empty):
            wait = max(0.0, self._retry_at - time.monotonic()) if self.spool.pending else None
            self._wake.get(timeout=wait)
        if not self._stopping and self._flushes_wanted == self._flushes_done:
            with contextlib.suppress(Empty):
                self._wake.get(timeout=self._options.interval)
        self._signalled = False  # before records are taken: one that comes later wakes the thread again

    def _drain(self, *, last: bool) -> None:
        while True:
            with self._lock:
                from_spool = self.spool.pending > 0 or not self._opened
                if from_spool:
                    self._keep(self._pop(len(self._queue)))
                    if not self.spool.pending or (time.monotonic() < self._retry_at and not last):
                        return
                else:
                    batch = self._in_flight = self._pop_batch()
                    if not batch:
                        return
            if from_spool:
                if not self._replay():
                    return
            else:
                self._deliver(batch)
                if last and self.spool.pending:
                    self._retry_at = 0.0

    def _deliver(self, batch: list[Record]) -> None:
        """Hand over records from the queue; those that fail become the head of the spool."""
        error = self._send(batch)
        with self._lock:
            spooled, self._in_flight_spooled, self._in_flight = self._in_flight_spooled, False, []
            if error is None:
                if spooled:
                    try:
                        self.spool.skip(len(batch))
                    except (OSError, ValueError, LookupError) as problem:
                        self._abandon_spool(problem)
                return
            if not spooled:
                self._keep(batch)
            self._postpone()
        self._warn_failed(error)

    def _replay(self) -> bool:
        """Hand over records from the spool. Returns whether to go on at once."""
        waiting = self._read_spool()
        if not self._opened:
            self._open()
            if not self._opened:
                return False
        refused: list[tuple[Record, BaseException]] = []
        progress = False
        for record, offset in waiting:
            error = self._send([record])
            if error is not None:
                refused.append((record, error))
                if len(refused) == _STRIKES:
                    break
                continue
            with self._lock:
                for poison, reason in refused:
                    self.spool.reject(poison, reason)
                    self._warn_refused(poison, reason)
                self.spool.commit(len(refused) + 1, offset)
            refused.clear()
            progress = True
        if progress or not waiting:
            self._backoff = self._options.retry_after
            return True  # those refused last come again, before others
        self._warn_failed(refused[0][1])
        self._postpone()
        return False

    def _send(self, batch: list[Record]) -> Exception | None:
        for record in batch:  # not the tracker's time: a device computes, or another process is late
            if record.pending is not None:
                record.resolve()
        try:
            self._call(self._delivery.send, batch)
        except Exception as error:
            return error
        return None

    def _call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call the tracker; meanwhile others see when the call counts as hanging."""
        self._deadline = time.monotonic() + self._options.hang_timeout
        try:
            function(*args)
        finally:
            self._deadline = inf

    def _flush(self) -> None:
        if self.spool.pending:
            self.sync()
        if self._opened:
            try:
                self._call(self.tracker.flush)
            except Exception as error:
                self.warn("flush", "The tracker %r failed to flush: %s: %s.", self.name, type(error).__name__, error)

    def _close(self) -> None:
        """End the run: nothing more comes."""
        if self._opened:
            self._flush()
            try:
                self._call(self.tracker.finish)
            except Exception as error:
                self.warn(
                    "finish", "The tracker %r failed to close its run: %s: %s.", self.name, type(error).__name__, error
                )
        self._delivery.close()
        with self._lock:
            self.note_run()
            self.spool.close()
        self.ended.set()

    def note_run(self) -> None:
        """Whose values the spool holds, for who delivers them later."""
        with self._lock, contextlib.suppress(OSError):
            self.spool.note_run(self.tracker.run_id, self.tracker.status)

    # -- the queue ---------------------------------------------------------------------------------------------------------------

    def _pop(self, count: int) -> list[Record]:
        records = [self._queue.popleft() for _ in range(count)]
        self._taken_weight += sum(r.weight for r in records)
        return records

    def _pop_batch(self) -> list[Record]:
        """As many rows as one call may take, or one record of another kind."""
        queue = self._queue
        count, most = 0, min(self.tracker.rows_per_call, len(queue))
        while count < most and queue[count].kind == "row" and not queue[count].options:
            count += 1
        return self._pop(count or min(1, len(queue)))

    def _keep(self, records: list[Record]) -> None:
        try:
            self.spool.append(records)
        except OSError as error:
            self.warn(
                "disk",
                "Values for tracker %r are lost: they could neither be delivered nor kept in %s (%s).",
                self.name,
                self.spool.path,
                error,
            )

    def _read_spool(self) -> list[tuple[Record, int]]:
        with self._lock:
            try:
                waiting = self.spool.read(max(_STRIKES, self.tracker.rows_per_call))
                if not waiting:
                    raise LookupError("it ends too early")
            except (OSError, ValueError, LookupError) as problem:
                self._abandon_spool(problem)
                return []
        return waiting

    def _abandon_spool(self, problem: BaseException) -> None:
        """Someone else has removed or changed the file."""
        path = self.spool.path
        self.spool.abandon()
        self.warn("spool", "The values for tracker %r in %s can't be read: %s.", self.name, path, problem)

    def _postpone(self) -> None:
        self._retry_at = time.monotonic() + self._backoff
        self._backoff = min(2 * self._backoff, self._options.retry_at_most)

    def _warn_failed(self, error: BaseException) -> None:
        self.warn(
            "failed",
            "The tracker %r failed (%s: %s). Training goes on; values are kept in %s and offered to it again.",
            self.name,
            type(error).__name__,
            error,
            self.spool.path,
        )

    def _warn_refused(self, record: Record, error: BaseException) -> None:
        self.warn(
            "refused",
            "The tracker %r refuses a %s (%s: %s), while it takes others. What it refuses is kept in %s.",
            self.name,
            record.kind,
            type(error).__name__,
            error,
            self.spool.rejected_path,
        )
