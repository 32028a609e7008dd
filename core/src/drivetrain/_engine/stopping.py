"""Stopping at a step that all ranks agree on, without a collective of training's.

A request on one rank (a signal, a time limit, a call) is written to the job's store, where a thread on every rank looks and
acknowledges. Once all have, each rank publishes the step that it is at when its next window ends, and from then on waits for its
device at each window's end. All stop at ``max(published) + 2``. No rank can pass that step unknowing: when the device is done with
step s, every other rank has at least begun step s, so one that hasn't published will publish s or more. And none ever waits for
another, so nothing can lock up.

Where a signal stops a run before its end, that is noted in the file that ``DRIVETRAIN_STOPPED_FILE`` names: whoever started the run
can't tell by its exit code, and must start it again.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from drivetrain.config.settings import STOPPED_FILE
from drivetrain.specs import ProcessInfo

__all__ = ["Stopper"]

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
#: A time limit, or a request of the script's own, is the end that the script wants.
_SIGNAL_NAMES = frozenset(number.name for number in _SIGNALS)

_MARGIN = 2
_POLL_SECONDS = 0.5


class Stopper:
    """One Accelerator's agreement on stopping. Starts nothing until `watch` is called.

    Args:
        process: Who this process is.
        synchronize: Waits for the device, called at window ends while a request is pending.
        key: Prefix in the store, equal on all ranks and different for each Accelerator.
        note: File to make when a signal stops the run before its end, by one process of each machine; empty for none.

    Example:
        >>> stopper = Stopper(ProcessInfo(), synchronize=lambda: None, key="doc")
        >>> stopper.request("time limit")
        >>> stopper.window_ended(step=1)
        >>> stopper.should_stop, stopper.reason
        (True, 'time limit')
    """

    def __init__(self, process: ProcessInfo, *, synchronize: Callable[[], None], key: str, note: str = "") -> None:
        self._process = process
        self._synchronize = synchronize
        self._key = f"drivetrain/stop/{key}"
        self._note = Path(note) if note and process.local_rank == 0 else None
        self._store: Any = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._watching = False
        self._previous: dict[int, Any] = {}
        self._deadline: float | None = None
        self._published: int | None = None
        self._stop_at: int | None = None
        #: A request is known here. Read at each window's end, so kept a plain attribute.
        self.pending = False
        #: All ranks have reached the step agreed on.
        self.should_stop = False
        self.reason = ""

    def watch(self) -> None:
        """Listen for SIGTERM and SIGUSR1 (in the main thread) and for other ranks. Called when the script first asks; idempotent."""
        if self._watching:
            return
        self._watching = True
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._previous[number] = signal.signal(number, self._on_signal)
        if self._process.is_distributed and dist.is_initialized():
            self._store = dist.distributed_c10d._get_default_store()  # torch has no public name for it
        if self._store is not None:
            self._start_thread()

    def stop_after(self, seconds: float) -> None:
        """Request a stop that many seconds from now."""
        self._deadline = time.monotonic() + seconds
        self._start_thread()

    def request(self, reason: str) -> None:
        """Ask all ranks to stop; safe in a signal handler and in any thread."""
        self.reason = self.reason or reason
        self.pending = True

    def window_ended(self, step: int) -> None:
        """A window has ended after optimizer step ``step``; call only while `pending`."""
        if self.should_stop:
            return
        if self._store is None:  # alone; or nobody watches, and then nobody asks
            self._decide(not self._process.is_distributed)
            return
        world = self._process.world_size
        if self._published is None:
            if self._store.add(f"{self._key}/known", 0) < world:
                return
            self._store.set(f"{self._key}/{self._process.rank}", str(step))
            self._published = step
        self._synchronize()
        if self._stop_at is None:
            keys = [f"{self._key}/{rank}" for rank in range(world)]
            if not self._store.check(keys):
                return
            self._stop_at = max(int(self._store.get(key)) for key in keys) + _MARGIN
        self._decide(step >= self._stop_at)

    def finished(self) -> None:
        """The training loop came to its end all the same: the run needn't be started again."""
        if self._note is not None:
            self._note.unlink(missing_ok=True)

    def _decide(self, stop: bool) -> None:
        self.should_stop = stop
        if stop and self._note is not None and self.reason in _SIGNAL_NAMES:
            try:
                self._note.write_text(f"{self.reason}\n", encoding="utf-8")
            except OSError as error:  # the run itself goes on to save
                warnings.warn(
                    f"{self._note} ({STOPPED_FILE}) can't be written ({error.strerror}), so whoever started this run won't start it again.",
                    stacklevel=2,
                )

    def close(self) -> None:
        """Put the signal handlers back and end the thread."""
        self._closing.set()
        for number, handler in self._previous.items():
            with contextlib.suppress(ValueError):  # not in the main thread any more
                signal.signal(number, handler)
        self._previous.clear()

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._poll, name="drivetrain-stop", daemon=True)
            self._thread.start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)

    def _poll(self) -> None:
        acknowledged = False
        while not self._closing.wait(_POLL_SECONDS):
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self.request("time limit")
            if self._store is None or acknowledged:
                continue
            try:
                if self.pending:
                    self._store.set(f"{self._key}/requested", self.reason)
                elif self._store.check([f"{self._key}/requested"]):
                    self.request(self._store.get(f"{self._key}/requested").decode())
                if self.pending:
                    self._store.add(f"{self._key}/known", 1)
                    acknowledged = True
            except RuntimeError:  # the store's server went away: the job is ending
                return
