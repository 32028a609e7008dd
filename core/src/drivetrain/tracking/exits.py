"""Flushing when the process ends unexpectedly: at exit, on an uncaught exception, on SIGTERM.

Earlier handlers are kept and called afterwards. A forked child (a data loader's worker) inherits handlers but no threads: there they do nothing
but pass on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["ExitGuard"]


class ExitGuard:
    """While installed, calls back before the process ends.

    Args:
        on_exit: Called at interpreter exit.
        on_exception: Called on an uncaught exception of the main thread.
        on_signal: Called on SIGTERM, in the main thread between any two instructions: it must take no lock.

    Example:
        >>> guard = ExitGuard(on_exit=print, on_exception=print, on_signal=print)
        >>> guard.install(); guard.remove()
    """

    def __init__(
        self, *, on_exit: Callable[[], Any], on_exception: Callable[[], Any], on_signal: Callable[[bool], Any]
    ) -> None:
        self._on_exit = on_exit
        self._on_exception = on_exception
        self._on_signal = on_signal
        #: Somebody else ends the process, in an orderly way, after a SIGTERM that would kill it otherwise.
        self.outlives_signal = False
        self._active = False
        self._pid = os.getpid()
        self._excepthook: Callable[..., Any] | None = None
        self._handler: Any = None
        self._has_handler = False

    def install(self) -> None:
        """Start guarding. Signal handlers can only be set in the main thread; elsewhere SIGTERM is left alone."""
        if self._active:
            return
        self._active, self._pid = True, os.getpid()
        atexit.register(self._exit)
        self._register_early()
        self._excepthook, sys.excepthook = sys.excepthook, self._exception
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGTERM)
            if previous is not None:  # None: set by C code, which Python can't call or put back
                self._handler, self._has_handler = previous, True
                signal.signal(signal.SIGTERM, self._signal)

    def remove(self) -> None:
        """Stop guarding; put back what was there before, unless someone has put a handler over ours since (then ours only passes on)."""
        if not self._active:
            return
        self._active = False
        atexit.unregister(self._exit)
        if sys.excepthook == self._exception and self._excepthook is not None:
            sys.excepthook = self._excepthook
        if (
            self._has_handler
            and threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) == self._signal
        ):
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, self._handler)

    def _register_early(self) -> None:
        """Also be called when the threads are shut down, which comes before atexit: systems that use executors can't store any more after it."""
        register = getattr(threading, "_register_atexit", None)
        method = weakref.WeakMethod(self._exit)

        def early() -> None:
            callback = method()
            if callback is not None:
                callback()

        if register is not None:
            with contextlib.suppress(RuntimeError):  # the shutdown has begun
                register(early)

    @property
    def _guarding(self) -> bool:
        return self._active and os.getpid() == self._pid

    def _exit(self) -> None:
        if self._guarding:
            self._on_exit()

    def _exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        assert self._excepthook is not None
        try:
            self._excepthook(kind, error, traceback)  # the traceback first: flushing may take a while
        finally:
            if self._guarding:
                self._on_exception()

    def _signal(self, number: int, frame: FrameType | None) -> None:
        ends = self._handler == signal.SIG_DFL and not self.outlives_signal
        if self._guarding:
            self._on_signal(ends)
        if callable(self._handler):
            self._handler(number, frame)
        elif ends:
            # Die of the signal, so that the parent sees the right status.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
