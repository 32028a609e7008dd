"""One piece of work at a time on another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Background"]

T = TypeVar("T")


class Background(Generic[T]):
    """Runs a function on a thread of its own, which the interpreter waits for at exit.

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
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as error:
            self._error = error
