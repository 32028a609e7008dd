"""Accelerate's names for how processes work together. Names of backends come from the data file that knows the first-party plugins."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import json
from collections.abc import Iterator
from typing import ClassVar

__all__ = ["DistributedType"]


class _Members(type):
    """Makes the class behave like an enumeration whose last members are read from a file when they are first needed."""

    def __getattr__(cls, name: str) -> DistributedType:
        if not name.startswith("_"):
            member = _all_members().get(name)
            if member is not None:
                return member
        close = difflib.get_close_matches(name, list(_all_members()), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else f" There are {', '.join(_all_members())}."
        raise AttributeError(f"DistributedType has no member {name!r}.{hint}")

    def __call__(cls, value: str) -> DistributedType:
        member = _all_members().get(value)
        if member is None:
            raise ValueError(f"{value!r} is no DistributedType: there are {', '.join(_all_members())}.")
        return member

    def __getitem__(cls, name: str) -> DistributedType:
        try:
            return _all_members()[name]
        except KeyError:
            raise KeyError(name) from None

    def __iter__(cls) -> Iterator[DistributedType]:
        return iter(_all_members().values())

    def __len__(cls) -> int:
        return len(_all_members())

    def __contains__(cls, value: object) -> bool:
        return isinstance(value, str) and str(value) in _all_members()

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), *_all_members()})


class DistributedType(str, metaclass=_Members):
    """How the job's processes work together, as a string with a name.

    ``NO``, ``MULTI_CPU``, ``MULTI_GPU``, ..., and the names of the first-party backends. An accelerator that isn't listed is ``MULTI_`` and
    its type in capitals.

    It serves scripts that ask; nothing in this library branches on it.

    Example:
        >>> DistributedType.MULTI_GPU == "MULTI_GPU", DistributedType("NO") is DistributedType.NO
        (True, True)
        >>> DistributedType.MULTI_GPUS
        Traceback (most recent call last):
        ...
        AttributeError: DistributedType has no member 'MULTI_GPUS'. Did you mean 'MULTI_GPU'?
    """

    __slots__ = ()

    NO: ClassVar[DistributedType]
    MULTI_CPU: ClassVar[DistributedType]
    MULTI_GPU: ClassVar[DistributedType]
    MULTI_XPU: ClassVar[DistributedType]
    MULTI_NPU: ClassVar[DistributedType]
    MULTI_HPU: ClassVar[DistributedType]
    MULTI_MLU: ClassVar[DistributedType]
    MULTI_SDAA: ClassVar[DistributedType]
    MULTI_MUSA: ClassVar[DistributedType]
    MULTI_NEURON: ClassVar[DistributedType]

    @classmethod
    def of_device(cls, device_type: str, world_size: int) -> DistributedType:
        """The type of ``world_size`` processes on devices of a torch type.

        Example:
            >>> DistributedType.of_device("cuda", 2), DistributedType.of_device("cpu", 1)
            (<DistributedType.MULTI_GPU>, <DistributedType.NO>)
        """
        if world_size == 1:
            return cls.NO
        capitals = device_type.upper()
        known = _all_members()
        name = "MULTI_GPU" if device_type == "cuda" else f"MULTI_{capitals}"
        return known.get(name) or known.get(capitals) or _member(name)

    @property
    def name(self) -> str:
        """The member's name."""
        return str(self)

    @property
    def value(self) -> str:
        """The member's value: its name."""
        return str(self)

    def __str__(self) -> str:
        return str.__str__(self)

    def __repr__(self) -> str:
        return f"<DistributedType.{str.__str__(self)}>"

    def __reduce__(self) -> tuple[object, ...]:
        return _member, (str.__str__(self),)


@functools.lru_cache(maxsize=64)
def _member(value: str) -> DistributedType:
    return str.__new__(DistributedType, value)


@functools.lru_cache(maxsize=1)
def _all_members() -> dict[str, DistributedType]:
    core = [name for name in DistributedType.__annotations__ if name.isupper()]
    return {name: _member(name) for name in [*core, *_names_of_backends()]}


def _names_of_backends(package: str = "drivetrain._plugins") -> list[str]:
    try:
        text = importlib.resources.files(package).joinpath("known_plugins.json").read_text("utf-8")
    except FileNotFoundError:
        return []
    names: list[str] = []
    for entry in json.loads(text).values():
        names += [name for name in entry.get("distributed_types", ()) if name not in names]
    return names
