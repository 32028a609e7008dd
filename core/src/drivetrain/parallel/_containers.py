"""How each kind of container is taken apart and put together again: the one list of container rules.

A container keeps its type, its order and whatever else it holds (a default factory, attributes). `container_of` finds the rules of a
value; everything that walks a structure goes through it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, UserList, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["ATOMS", "Container", "container_of", "is_namedtuple", "walk"]

#: Types that never hold anything: looked up before any rule is tried.
ATOMS = frozenset({str, int, float, bool, type(None), bytes, complex, torch.dtype, torch.device, torch.Size})


class Container:
    """The rules of one kind of container."""

    #: Whether the order of children means the same on every rank.
    ordered = True

    def children(self, value: Any) -> list[tuple[Any, Any]]:
        """``(key, child)`` pairs, in the container's order."""
        return list(enumerate(value))

    def rebuild(self, value: Any, children: list[Any]) -> Any:
        """A container like ``value`` with other children, in the order of `children`."""
        raise NotImplementedError

    def path(self, key: Any) -> str:
        """How a child is written in a path."""
        return f"[{key!r}]"


class _Dict(Container):
    def children(self, value: dict[Any, Any]) -> list[tuple[Any, Any]]:
        return list(value.items())

    def rebuild(self, value: dict[Any, Any], children: list[Any]) -> Any:
        return dict(zip(value, children, strict=True))


class _DictLike(_Dict):
    """Subclasses of dict and UserDict: a shallow copy keeps the type, the default factory and the attributes."""

    def rebuild(self, value: Any, children: list[Any]) -> Any:
        try:
            new = copy.copy(value)
            for key, child in zip(list(value), children, strict=True):
                new[key] = child
        except Exception:  # read-only, or its copy doesn't work: its constructor may
            return _construct(value, dict(zip(value, children, strict=True)))
        return new


class _Mapping(_Dict):
    """Other mappings: a shallow copy could share what is inside, so the constructor makes the new one."""

    def rebuild(self, value: Mapping[Any, Any], children: list[Any]) -> Any:
        return _construct(value, dict(zip(value, children, strict=True)))


class _List(Container):
    def rebuild(self, value: Any, children: list[Any]) -> Any:
        return children


class _ListLike(Container):
    """Subclasses of list, UserList and deque."""

    def rebuild(self, value: Any, children: list[Any]) -> Any:
        new = copy.copy(value)
        for i, child in enumerate(children):
            new[i] = child
        return new


class _Tuple(Container):
    def rebuild(self, value: Any, children: list[Any]) -> Any:
        return tuple(children)


class _TupleLike(Container):
    """Tuples that are made of one iterable, as those of ``torch.return_types``."""

    def rebuild(self, value: Any, children: list[Any]) -> Any:
        return _construct(value, children)


class _NamedTuple(Container):
    def children(self, value: Any) -> list[tuple[Any, Any]]:
        return list(zip(value._fields, value, strict=True))

    def rebuild(self, value: Any, children: list[Any]) -> Any:
        return type(value)._make(children)

    def path(self, key: Any) -> str:
        return f".{key}"


class _Dataclass(_NamedTuple):
    """A shallow copy with other fields: also frozen, slotted, with ``init=False``; ``__post_init__`` isn't run again."""

    def children(self, value: Any) -> list[tuple[Any, Any]]:
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]

    def rebuild(self, value: Any, children: list[Any]) -> Any:
        new = copy.copy(value)
        for (name, old), child in zip(self.children(value), children, strict=True):
            if child is not old:
                object.__setattr__(new, name, child)
        return new


class _Set(Container):
    ordered = False

    def rebuild(self, value: Any, children: list[Any]) -> Any:
        return type(value)(children)


class _Packed(_NamedTuple):
    """A PackedSequence is its ``data``; the sizes and orders beside it describe rows and stay as they are."""

    ordered = False

    def children(self, value: PackedSequence) -> list[tuple[Any, Any]]:
        return [("data", value.data)]

    def rebuild(self, value: PackedSequence, children: list[Any]) -> Any:
        return PackedSequence(children[0], value.batch_sizes, value.sorted_indices, value.unsorted_indices)


_DICT, _LIST, _TUPLE = _Dict(), _List(), _Tuple()
_DICT_LIKE, _MAPPING, _LIST_LIKE, _TUPLE_LIKE = _DictLike(), _Mapping(), _ListLike(), _TupleLike()
_NAMED_TUPLE, _DATACLASS, _SET, _PACKED = _NamedTuple(), _Dataclass(), _Set(), _Packed()
_EXACT: dict[type, Container] = {dict: _DICT, list: _LIST, tuple: _TUPLE, set: _SET, frozenset: _SET}


def container_of(value: Any) -> Container | None:
    """The rules for ``value``, or None if it isn't a container (or one that nobody knows how to rebuild).

    Example:
        >>> container_of({"a": 1}).children({"a": 1})
        [('a', 1)]
        >>> container_of("text") is None
        True
    """
    rules = _EXACT.get(type(value))
    if rules is not None or isinstance(value, (str, bytes, type, torch.Tensor, torch.nn.Module)):
        return rules
    if isinstance(value, tuple):
        if isinstance(value, PackedSequence):
            return _PACKED
        return _NAMED_TUPLE if is_namedtuple(value) else _TUPLE_LIKE
    if isinstance(value, (dict, UserDict)):
        return _DICT_LIKE
    if isinstance(value, (list, UserList, deque)):
        return _LIST_LIKE
    if isinstance(value, Mapping):
        return _MAPPING
    if isinstance(value, (set, frozenset)):
        return _SET
    return _DATACLASS if dataclasses.is_dataclass(value) else None


def is_namedtuple(data: Any) -> bool:
    """Whether ``data`` is a named tuple (``collections.namedtuple`` or ``typing.NamedTuple``).

    Example:
        >>> from collections import namedtuple
        >>> is_namedtuple(namedtuple("Point", "x y")(1, 2)), is_namedtuple((1, 2))
        (True, False)
    """
    return isinstance(data, tuple) and hasattr(data, "_fields") and hasattr(data, "_make")


def walk(data: Any, *, path: str = "", parents: tuple[int, ...] = ()) -> Iterator[tuple[str, Any, bool]]:
    """Every value in a structure that isn't a container, depth first.

    Yields:
        Its path (``"['a'][0]"``), the value, and whether ranks agree on its place (nothing inside a set has one).

    Raises:
        ValueError: If a container contains itself.
    """
    rules = None if type(data) in ATOMS else container_of(data)
    if rules is None:
        yield path, data, True
        return
    if id(data) in parents:
        raise ValueError(contains_itself(data, path))
    parents = (*parents, id(data))
    for key, child in rules.children(data):
        for place, value, ordered in walk(child, path=path + rules.path(key), parents=parents):
            yield place, value, ordered and rules.ordered


def contains_itself(value: Any, path: str = "") -> str:
    """The message for a structure without an end."""
    where = f" at {path}" if path else ""
    return f"A {type(value).__name__}{where} contains itself, so the structure has no end. Break the cycle before passing it."


def _construct(value: Any, content: Mapping[Any, Any] | Sequence[Any]) -> Any:
    """Make another object of ``value``'s type with its constructor, and check that it holds what it was given."""
    try:
        new = type(value)(content)
        same = len(new) == len(content) and all(a is b for a, b in zip(_values(new), _values(content), strict=True))
    except Exception as error:
        raise TypeError(_CANT_REBUILD.format(type(value).__name__)) from error
    if not same:
        raise TypeError(_CANT_REBUILD.format(type(value).__name__))
    return new


_CANT_REBUILD = (
    "A {0} can't be made anew from its items, so tensors inside it can't be replaced. Give the class a constructor that takes "
    "its items, or a `to(device)` method, or pass its content as a dict or tuple."
)


def _values(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, Mapping) else container
