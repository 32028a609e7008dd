"""The base of every options class: one schema for Python, file, command line and environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from drivetrain.errors import ConfigurationError

__all__ = ["Options"]

T = TypeVar("T", bound="Options")


class Options:
    """A dataclass of plain field types (dtypes as strings, times in seconds) that remembers which fields were given.

    Derive a ``@dataclass`` from it and annotate every field. Equal to the default is not the same as not given: an explicit value
    beats the environment and the configuration file, even when it equals the default.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class ToyOptions(Options):
        ...     size: int = 3
        ...     name: str = "toy"
        >>> ToyOptions(size=3).explicit()
        {'size': 3}
        >>> ToyOptions.from_mapping({"size": "7"}, strict=False)
        ToyOptions(size=7, name='toy')
        >>> ToyOptions(size="many").validate()
        Traceback (most recent call last):
        ...
        drivetrain.errors.ConfigurationError: ToyOptions: Expected `int`, got `str` - at `$.size`
    """

    _given: frozenset[str]

    def __new__(cls: type[T], *args: Any, **kwargs: Any) -> T:
        self = super().__new__(cls)
        if dataclasses.is_dataclass(cls):
            names = [f.name for f in dataclasses.fields(cls) if f.init and not f.kw_only]
            object.__setattr__(self, "_given", frozenset({*names[: len(args)], *kwargs}))
        return self

    def explicit(self) -> dict[str, Any]:
        """The fields that were given to the constructor, with their present values."""
        return {f.name: getattr(self, f.name) for f in self._fields() if f.name in self._given}

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return {f.name: getattr(self, f.name) for f in self._fields()}

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that were given: keyword arguments for the constructor that these options stand for."""
        return self.explicit()

    def validate(self) -> None:
        """Check the type of each field.

        Raises:
            ConfigurationError: Naming the class and the field.
        """
        for f in self._fields():
            value = getattr(self, f.name)
            hint = self._hints()[f.name]
            if not isinstance(value, _PLAIN):
                continue  # a callable or an object of torch: the class checks it where it is used
            try:
                msgspec.convert(value, hint)
            except msgspec.ValidationError as error:
                text = str(error) if " - at `$" in str(error) else f"{error} - at `$.{f.name}`"
                raise ConfigurationError(f"{type(self).__name__}: {text}") from None
            except TypeError:
                continue  # a type that the schema can't express

    @classmethod
    def from_mapping(cls: type[T], data: Mapping[str, Any], *, strict: bool = True) -> T:
        """Make options from a configuration file's section, or (``strict=False``) from strings.

        Raises:
            ConfigurationError: For an unknown key (with the nearest match) or a value of a wrong type.
        """
        known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        for key in data:
            if key not in known:
                raise ConfigurationError(f"{cls.__name__} has no setting {key!r}.{nearest(key, known)}")
        hints = cls._hints()
        values = {}
        for key, value in data.items():
            try:
                values[key] = msgspec.convert(value, hints[key], strict=strict)
            except msgspec.ValidationError as error:
                raise ConfigurationError(f"{cls.__name__}.{key}: {error}") from None
        return cls(**values)

    @classmethod
    def _fields(cls) -> tuple[dataclasses.Field[Any], ...]:
        return tuple(f for f in dataclasses.fields(cls) if not f.name.startswith("_"))  # type: ignore[arg-type]

    @classmethod
    def _hints(cls) -> dict[str, Any]:
        import typing

        return typing.get_type_hints(cls)


_PLAIN = (str, int, float, bool, list, tuple, dict, type(None))


def nearest(name: str, known: Any) -> str:
    """A clause with the closest known name, or with all of them.

    Example:
        >>> nearest("zise", ["size", "name"])
        " Did you mean 'size'?"
    """
    import difflib

    match = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {match[0]!r}?" if match else f" Known: {', '.join(sorted(known))}."
