"""``log(..., reduce=...)``: one value of all processes' values, off the training thread.

Each process has a thread that takes part in its calls in order, on a gloo group of its own, so that nothing here can come between training's collectives, and
nobody waits for a slower process. The training thread hands over numbers and goes on.

A process that doesn't take part must be an error, not a hang, and one that is only late must not be. What tells them apart is what the waiting process has done since
its call: when it has passed two points where all processes meet (optimizer steps, barriers, gathers), those that are missing have passed the place of
the call, without calling. The same holds for a process that has ended its training with fewer calls. For the rest there is a generous limit of time.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from drivetrain.errors import ConfigurationError, DistributedOperationError, TrackerError
from drivetrain.tracking.values import PendingValues, Snapshot

if TYPE_CHECKING:
    from drivetrain.specs import ProcessInfo

__all__ = ["REDUCTIONS", "Call", "Reducer", "caller", "check_reduction", "make_call", "reduce_rows"]

#: What ``reduce`` may be.
REDUCTIONS = ("mean", "sum", "max", "min")

#: Seconds before it is asked who is missing, and between two questions.
_GRACE = 2.0
_HEADER = 1024
_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class Call:
    """One call on one process.

    Args:
        how: One of `REDUCTIONS`.
        names: Names of the values.
        read: Returns the values and their weights; may wait for a device.
        where: File and line of the call.
        future: Gets the results, in the order of the names.
        number: How many calls there were before it.
        progress: How often this process had met the others before it.
    """

    how: str
    names: Sequence[str]
    read: Callable[[], tuple[Sequence[float], Sequence[float]]]
    where: str
    future: Future[list[float]] = field(default_factory=Future)
    number: int = 0
    progress: int = 0

    @property
    def text(self) -> str:
        """The call as a message names it."""
        shown = ", ".join(map(repr, self.names[:5])) + (", ..." if len(self.names) > 5 else "")
        return f"log(reduce={self.how!r}) of {shown} at {self.where}"


class Reducer:
    """Takes this process's part in the reductions of one hub.

    Args:
        process: Who this process is.
        timeout: Seconds after which a missing process is an error, whatever it may be doing.
        key: Tells this one apart from others, the same on all processes; default: the order in which they are made.

    Raises:
        DistributedOperationError: (`check`, `submit`) Once a reduction has failed.
    """

    def __init__(self, process: ProcessInfo, timeout: float, key: str | None = None) -> None:
        self._process = process
        self._timeout = timeout
        self._prefix = f"drivetrain/tracking/{f'hub-{next(_numbers)}' if key is None else key}"
        self._queue: SimpleQueue[Call | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._store: Any = None
        self._group: Any = None
        self._calls = 0
        self._progress = 0
        self._unfinished = 0
        #: Why reductions don't go on.
        self.error: DistributedOperationError | None = None

    def submit(self, call: Call) -> None:
        """Take part in a call, on the thread."""
        self.check()
        if self._thread is None:
            self._store = self._connect()
            self._thread = threading.Thread(target=self._run, name="drivetrain-tracking-reducer", daemon=True)
            self._thread.start()
        call.number, call.progress = self._calls, self._progress
        self._calls += 1
        self._unfinished += 1
        self._queue.put(call)

    def met(self, count: int = 1) -> None:
        """Note that this process has met all others, ``count`` times; an optimizer step is one, and two prove that none is before it.

        Raises:
            DistributedOperationError: If a reduction has failed meanwhile.
        """
        self._progress += count
        if self.error is not None:
            raise self.error

    def check(self) -> None:
        """Raise why reductions don't go on, if they don't."""
        if self.error is not None:
            raise self.error

    def leave(self) -> None:
        """Tell the others how many calls there were here: no more come.

        A process whose store is gone with the one that held it has nobody to tell. A new connection to it would be tried for minutes.
        """
        import torch.distributed as dist

        if self._process.world_size > 1 and dist.is_available() and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                store = self._store or dist.distributed_c10d._get_default_store()
                store.set(f"{self._prefix}/left/{self._process.rank}", str(self._calls))

    def wait(self, timeout: float) -> bool:
        """Wait until all calls are through. Returns whether they are."""
        limit = time.monotonic() + timeout
        while self._unfinished and self.error is None and time.monotonic() < limit:
            time.sleep(0.002)
        return not self._unfinished

    def close(self) -> None:
        """End the thread, if it isn't waiting for others."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(5.0)
            self._thread = self._group = None

    # -- the thread --------------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            call = self._queue.get()
            if call is None:
                self._group = None
                return
            if self.error is None:
                try:
                    call.future.set_result(self._reduce(call))
                except Exception as error:
                    if not isinstance(error, DistributedOperationError):
                        text = f"{call.text} failed on rank {self._process.rank}: {type(error).__name__}: {error}"
                        error = DistributedOperationError(text)
                    self.error = error
            if self.error is not None:
                call.future.set_exception(self.error)
            self._unfinished -= 1

    def _reduce(self, call: Call) -> list[float]:
        import torch

        values, weights = call.read()
        self._meet(call)
        self._agree(call)
        if not call.names:
            return []
        mine = torch.tensor([list(values), list(weights)], dtype=torch.float64)
        rows = self._gather(mine)
        return reduce_rows(call.how, [row[0].tolist() for row in rows], [row[1].tolist() for row in rows])

    def _meet(self, call: Call) -> None:
        """Wait until every process has come to this call."""
        key, world = f"{self._prefix}/calls/{call.number}", self._process.world_size
        self._store.set(f"{self._prefix}/at/{self._process.rank}", str(call.number + 1))
        if self._store.add(key, 1) == world:
            self._store.set(f"{key}/all", "1")
            if call.number:  # everyone who is here has left the call before
                before = f"{self._prefix}/calls/{call.number - 1}"
                with contextlib.suppress(RuntimeError):
                    self._store.delete_key(before)
                    self._store.delete_key(f"{before}/all")
        began, pause, asked = time.monotonic(), 0.0005, time.monotonic()
        while not self._store.check([f"{key}/all"]):
            now = time.monotonic()
            if now - asked > _GRACE:
                asked = now
                self._judge(call, now - began)
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)

    def _judge(self, call: Call, waited: float) -> None:
        """Raise if those that are missing won't come."""
        missing = [r for r in range(self._process.world_size) if self._count("at", r) <= call.number]
        gone = [r for r in missing if 0 <= self._count("left", r, -1) <= call.number]
        passed = self._progress - call.progress >= 2
        if missing and (gone or passed or waited > self._timeout):
            ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, gone or missing))}"
            did = "ended without it" if gone else "went past it" if passed else f"didn't come within {waited:.0f} s"
            raise DistributedOperationError(
                f"{call.text} was called on rank {self._process.rank}, but {ranks} {did}. With reduce=, log() must be called on every process: take it "
                "out of `if accelerator.is_main_process:` and of branches that only some take. Without reduce=, it is stored by the main process "
                "and does nothing on others."
            )

    def _count(self, what: str, rank: int, default: int = 0) -> int:
        key = f"{self._prefix}/{what}/{rank}"
        return int(self._store.get(key)) if self._store.check([key]) else default

    def _agree(self, call: Call) -> None:
        """All processes must have called the same."""
        import torch

        digest = hashlib.sha256(json.dumps([call.how, list(call.names)]).encode()).hexdigest()[:16]
        text = json.dumps([digest, call.text[:400]]).encode("ascii")[:_HEADER]
        header = torch.zeros(_HEADER, dtype=torch.uint8)
        header[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        found = [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in self._gather(header)]
        if len({d for d, _ in found}) > 1:
            listed = "\n".join(f"  rank {rank}: {text}" for rank, (_, text) in enumerate(found))
            raise DistributedOperationError(
                f"Processes disagree in log(reduce=...):\n{listed}\nEvery process must call it with the same names in the same order."
            )

    def _gather(self, tensor: Any) -> list[Any]:
        import torch
        import torch.distributed as dist

        world = self._process.world_size
        if self._group is None:
            store = dist.distributed_c10d.PrefixStore(f"{self._prefix}/gloo", self._store)
            self._group = dist.ProcessGroupGloo(store, self._process.rank, world, timedelta(seconds=self._timeout))
        rows = [torch.empty_like(tensor) for _ in range(world)]
        self._group.allgather([rows], [tensor]).wait()
        return rows

    def _connect(self) -> Any:
        """A connection to the job's store of its own, where the store can: others may hold theirs for long."""
        from drivetrain.parallel._groups import members

        members(None)  # says what is wrong, if there is no process group
        import torch.distributed as dist

        store: Any = dist.distributed_c10d._get_default_store()
        try:
            return store.clone()
        except (AttributeError, RuntimeError):
            return store


def reduce_rows(how: str, values: Sequence[Sequence[float]], weights: Sequence[Sequence[float]]) -> list[float]:
    """Reduce over processes.

    Args:
        how: One of `REDUCTIONS`.
        values: Of each process, its values.
        weights: Of each process, the weights of its values; a value of weight 0 has no say, also where it is NaN.

    Example:
        >>> reduce_rows("mean", [[1.0], [4.0]], [[2.0], [1.0]])
        [2.0]
        >>> reduce_rows("max", [[1.0], [4.0]], [[1.0], [1.0]])
        [4.0]
    """
    results = []
    for column, column_weights in zip(zip(*values, strict=True), zip(*weights, strict=True), strict=True):
        pairs = [(v, w) for v, w in zip(column, column_weights, strict=True) if w]
        if not pairs:
            results.append(0.0 if how == "sum" else math.nan)
        elif how == "mean":
            results.append(_sum(v * w for v, w in pairs) / _sum(w for _, w in pairs))
        elif how == "sum":
            results.append(_sum(v for v, _ in pairs))
        elif any(math.isnan(v) for v, _ in pairs):
            results.append(math.nan)
        else:
            results.append((max if how == "max" else min)(v for v, _ in pairs))
    return results


def _sum(values: Iterable[float]) -> float:
    """The exact sum, rounded once; with infinities and NaN, what addition makes of them."""
    values = list(values)
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def check_reduction(how: str, weight: Any) -> None:
    """Refuse what isn't a reduction, and weights that would have no effect.

    Raises:
        ConfigurationError: For either.
    """
    if how not in REDUCTIONS:
        raise ConfigurationError(f"reduce={how!r} is none of {', '.join(map(repr, REDUCTIONS))}, or None.")
    if weight is not None and how != "mean":
        raise ConfigurationError(f"weight= weighs a mean; log(reduce={how!r}) takes none.")


def make_call(snapshot: Snapshot, values: Mapping[Any, Any], how: str, weight: Any) -> tuple[Call, PendingValues]:
    """The call of ``log(values, reduce=how, weight=weight)``, and what fills a row with its results.

    Raises:
        TrackerError: For a text among the values, or a value without a weight.

    Example:
        >>> call, pending = make_call(Snapshot(), {"loss": 2, "eval": {"acc": 0.5}}, "sum", None)
        >>> list(call.names), call.read()
        (['loss', 'eval/acc'], ([2.0, 0.5], [1.0, 1.0]))
        >>> call.future.set_result([5.0, 1.0]); row = {}
        >>> pending.fill(row); row
        {'loss': 5, 'eval/acc': 1.0}
    """
    row, later, _ = snapshot.scalars(values)
    for name, value in row.items():
        if type(value) is str:
            raise TrackerError(
                f"log(reduce={how!r}) takes numbers: {name!r} is the text {value[:60]!r}. Log it apart, without reduce=."
            )
    by_name = isinstance(weight, Mapping)
    given = {} if weight is None else weight if by_name else {"": weight}
    weights, weights_later, _ = snapshot.scalars(given)
    unknown = set(row) ^ set(weights) if by_name else set()
    if unknown:
        raise TrackerError(
            f"weight= must have a number for each value: they differ in {', '.join(map(repr, sorted(unknown)))}."
        )

    def read() -> tuple[list[float], list[float]]:
        for numbers, pending in ((row, later), (weights, weights_later)):
            if pending is not None:
                pending.fill(numbers)
        alike = float(weights[""]) if given and not by_name else 1.0
        return [float(v) for v in row.values()], [float(weights[k]) if by_name else alike for k in row]

    def cast_for(name: str) -> Callable[[float], Any]:
        whole = how != "mean"
        return lambda x: int(x) if whole and type(row[name]) in (int, bool) and math.isfinite(x) else x

    call = Call(how, list(row), read, caller())
    return call, PendingValues(list(row), [cast_for(name) for name in row], call.future)


def caller() -> str:
    """File and line of the code that called into this distribution."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("drivetrain."):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
