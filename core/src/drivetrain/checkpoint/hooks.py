"""Functions that the user has called before a save or a load."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

__all__ = ["HookHandle", "HookList", "remaining"]


class HookHandle:
    """Removes a hook: by `remove`, or at the end of a ``with`` block."""

    def __init__(self, hooks: dict[int, Callable[..., Any]], key: int) -> None:
        self._hooks = hooks
        self._key = key

    def remove(self) -> None:
        """Remove the hook. Idempotent."""
        self._hooks.pop(self._key, None)

    def __enter__(self) -> HookHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


class HookList:
    """Hooks, called in the order of registration.

    Example:
        >>> hooks = HookList()
        >>> handle = hooks.register(print)
        >>> hooks("saving")
        saving
        >>> handle.remove()
        >>> len(hooks)
        0
    """

    def __init__(self) -> None:
        self._hooks: dict[int, Callable[..., Any]] = {}
        self._keys = itertools.count()

    def register(self, hook: Callable[..., Any]) -> HookHandle:
        """Add a hook."""
        key = next(self._keys)
        self._hooks[key] = hook
        return HookHandle(self._hooks, key)

    def __call__(self, *args: Any) -> None:
        """Call all hooks."""
        for hook in list(self._hooks.values()):
            hook(*args)

    def __len__(self) -> int:
        return len(self._hooks)

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(self._hooks.values())


def remaining(before: Sequence[Any], after: Sequence[Any]) -> list[int]:
    """Which items a hook left in a list, as positions before; an item that it replaced in place counts as left.

    Example:
        >>> a, b = {}, {}
        >>> remaining([a, b], [a])
        [0]
        >>> remaining([a, b], [a, {"new": 1}])
        [0, 1]
    """
    if len(before) == len(after):
        return list(range(len(before)))
    return [i for i, item in enumerate(before) if any(item is other for other in after)]
