"""Which tensors have no values of their own in a rehearsal: fake ones, and real ones into which a fake one was written."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["Unknown", "tensors_of"]


class Unknown:
    """Real storages whose content stands for something that isn't known.

    Example:
        >>> unknown, x = Unknown(), torch.ones(2)
        >>> unknown.mark(x)
        >>> x in unknown, x[:1] in unknown, torch.ones(2) in unknown
        (True, True, False)
    """

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[Any]] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        if isinstance(tensor, FakeTensor):
            return True
        inner = getattr(tensor, "_local_tensor", None)
        if inner is not None:
            return inner in self
        return bool(self._storages) and not _is_wrapper(tensor) and tensor.untyped_storage()._cdata in self._storages

    def mark(self, tensor: torch.Tensor) -> None:
        """From now on nobody knows the tensor's values, nor those of its views."""
        if not isinstance(tensor, FakeTensor):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._storages:
                self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def tensors_of(values: Any) -> list[torch.Tensor]:
    """The tensors among an operator's arguments or results, also those in lists and containers of these."""
    found: list[torch.Tensor] = []
    _collect(values, found)
    return found


def _collect(values: Any, found: list[torch.Tensor]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)
