"""One piece of work at a time on another thread."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401 - so that its own end is registered before ours, and comes after it
import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Background"]

T = TypeVar("T")


class Background(Generic[T]):
    """Runs a function on a thread of its own. The program's end waits for it, and tells of an error that nobody has seen.

    Args:
        function: The work.
        name: The thread's name.

    Example:
        >>> work = Background(lambda: 3, name="demo")
        >>> work.wait()
        3
    """

    def __init__(self, function: Callable[[], T], *, name: str) -> None:
        self._function = function
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=False)
        _open.add(self)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the work has ended, well or not."""
        return not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether the work has ended with an error."""
        return self._error is not None

    def wait(self) -> T:
        """Wait for the end; give the result, or raise the work's error."""
        self._thread.join()
        _open.discard(self)
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:
            self._error = error
        finally:
            del self._function  # with the state that it holds

    def _end(self) -> None:
        self._thread.join()
        if self._error is not None:
            sys.stderr.write(f"{self._thread.name} failed at the program's end: {self._error}\n")


#: Work that nobody has waited for yet. It stands for threads, which are process-wide, too.
_open: set[Background[Any]] = set()


def _end_all() -> None:
    for work in list(_open):
        work._end()


# Executors, which the work may need, are shut down before threads are joined, and this comes before both.
_register = getattr(threading, "_register_atexit", None)
if _register is not None:
    with contextlib.suppress(RuntimeError):  # the shutdown has begun
        _register(_end_all)
