"""The loaders being iterated, innermost last: what the training engine asks for the present batch."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.utils.data import DataLoader

    from drivetrain.data.loader import PreparedDataLoader

__all__ = ["LoaderStack"]


class LoaderStack:
    """One per Accelerator. Loaders enter when they yield and leave when their loop ends, by exhaustion, ``break`` or an error.

    The loader that yielded last is the active one. So a validation loop inside a training loop is active until it ends; an iterator that
    was started and left lying about isn't.

    Example:
        >>> stack = LoaderStack()
        >>> stack.enter("train"); stack.enter("validation")
        >>> stack.leave("validation")
        >>> stack.active
        'train'
    """

    __slots__ = (
        *("__weakref__", "_loaders", "_made", "_prepared"),
        *("active", "after_batch", "guard", "joined", "side_group"),
    )

    def __init__(self) -> None:
        #: The loader that yielded last, or None outside of loops. A plain attribute: read for each batch.
        self.active: Any = None
        #: A gloo group for what loaders tell each other and rank 0's batches when dispatching, made when first needed.
        self.side_group: Any = None
        #: Told (``watch(loader)``, ``release(loader)``) when a loader hands out batches that not all ranks have.
        self.guard: Any = None
        #: Called when a loop's body is done with a batch, before the next one is read; None when there is nothing to do then.
        self.after_batch: Callable[[], None] | None = None
        #: By the number of a loader: how another run cuts its epochs, whose ranks' batches it is to join (one process only).
        self.joined: Sequence[Mapping[str, Any]] = ()
        self._loaders: list[Any] = []
        self._prepared: weakref.WeakKeyDictionary[DataLoader[Any], PreparedDataLoader[Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._made = 0

    def enter(self, loader: Any) -> None:
        """Make ``loader`` the active one."""
        if loader in self._loaders:
            self._loaders.remove(loader)
        self._loaders.append(loader)
        self.active = loader

    def leave(self, loader: Any) -> None:
        """``loader``'s loop has ended; does nothing if it isn't here."""
        if loader in self._loaders:
            self._loaders.remove(loader)
            self.active = self._loaders[-1] if self._loaders else None

    def next_index(self) -> int:
        """Number of the loader being prepared: 0, 1, ..."""
        self._made += 1
        return self._made - 1

    def remember(self, original: DataLoader[Any], prepared: PreparedDataLoader[Any]) -> None:
        """Preparing ``original`` again gives ``prepared``."""
        self._prepared[original] = prepared

    def prepared(self, original: DataLoader[Any]) -> PreparedDataLoader[Any] | None:
        """What was made of ``original``, if anything."""
        return self._prepared.get(original)
