"""The base of every options class: one schema for Python, file, command line and environment."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import difflib
import inspect
import sys
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from drivetrain.config.parsing import parse_text
from drivetrain.errors import ConfigurationError

__all__ = ["Options", "nearest", "seconds"]

T = TypeVar("T", bound="Options")

_PLAIN = (str, int, float, bool, list, tuple, dict, set, frozenset, type(None))
_MISSING = object()


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
        """Note which fields are given."""
        self = super().__new__(cls)
        if hasattr(cls, "__dataclass_fields__"):
            object.__setattr__(self, "_given", frozenset({*_schema(cls).positional[: len(args)], *kwargs}))
        return self

    def explicit(self) -> dict[str, Any]:
        """The fields that were given to the constructor, or changed after it, with their present values."""
        return {
            name: getattr(self, name)
            for name, field in _schema(type(self)).fields.items()
            if field.init and (name in self._given or _differs(getattr(self, name), field))
        }

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return {name: getattr(self, name) for name in _schema(type(self)).fields}

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that were given: keyword arguments for the constructor that these options stand for."""
        return self.explicit()

    def settings(self) -> Mapping[str, tuple[Any, str]]:
        """Core's settings that these options say, too: value and where it is written, by name.

        Core takes them where nothing else says that setting, and refuses two values of one.
        """
        return {}

    def notes(self) -> list[str]:
        """Sentences about given values that change nothing, such as switching off what is always on; the user is told them once."""
        return []

    def replaced(self: T, **changes: Any) -> T:
        """A copy with other values, which count as given."""
        new = copy.copy(self)
        for name, value in changes.items():
            object.__setattr__(new, name, value)
        object.__setattr__(new, "_given", self._given | changes.keys())
        return new

    def validate(self) -> None:
        """Check the type of each field; cheap enough for a constructor (about a microsecond per field).

        Raises:
            ConfigurationError: Naming the class and the field.
        """
        for name, hint in _schema(type(self)).checked.items():
            value = getattr(self, name)
            if type(value) is hint or not isinstance(value, _PLAIN):
                continue  # objects (a callable, something of torch) are checked by the class that uses them
            try:
                msgspec.convert(value, hint)
            except msgspec.ValidationError as error:
                text = str(error) if " - at `$" in str(error) else f"{error} - at `$`"
                text = text.replace(" - at `$", f" - at `$.{name}")
                raise ConfigurationError(f"{type(self).__name__}: {text}") from None

    @classmethod
    def from_mapping(cls: type[T], data: Mapping[str, Any], *, strict: bool = True) -> T:
        """Make options from a configuration file's section, or (``strict=False``) from strings.

        Raises:
            ConfigurationError: For an unknown key (with the nearest match) or a value of a wrong type.
        """
        return cls(**{key: cls.convert(key, value, strict=strict) for key, value in data.items()})

    @classmethod
    def convert(cls, name: str, value: Any, *, strict: bool = True) -> Any:
        """Convert one field's value from a file, or (``strict=False``) from text.

        Raises:
            ConfigurationError: For an unknown name (with the nearest match) or a value of a wrong type.
        """
        schema = _schema(cls)
        if name not in schema.hints:
            raise ConfigurationError(f"{cls.__name__} has no setting {name!r}.{nearest(name, schema.hints)}")
        hint = schema.hints[name]
        try:
            if not strict and isinstance(value, str):
                return parse_text(value, hint)
            return msgspec.convert(value, hint, strict=strict) if name in schema.checked else value
        except ValueError as error:
            raise ConfigurationError(f"{cls.__name__}.{name}: {error}") from None

    @classmethod
    def hints(cls) -> Mapping[str, Any]:
        """The type of each field that can be given; `typing.Any` for annotations that can't be evaluated here."""
        return _schema(cls).hints


class _Schema(msgspec.Struct, frozen=True):
    """What is derived once per options class."""

    fields: Mapping[str, dataclasses.Field[Any]]
    hints: Mapping[str, Any]
    checked: Mapping[str, Any]
    positional: tuple[str, ...]


def _schema(cls: type[Any]) -> _Schema:
    """The schema of an options class, kept on the class itself."""
    schema: _Schema | None = cls.__dict__.get("_options_schema")
    if schema is None:
        schema = _derive(cls)
        cls._options_schema = schema
    return schema


def _derive(cls: type[Any]) -> _Schema:
    fields = {f.name: f for f in dataclasses.fields(cls) if not f.name.startswith("_")}
    hints = {name: _hint(cls, name) for name, f in fields.items() if f.init}
    positional = tuple(f.name for f in fields.values() if f.init and not f.kw_only)
    return _Schema(fields, hints, {n: h for n, h in hints.items() if _expressible(h)}, positional)


def _hint(cls: type[Any], name: str) -> Any:
    """Evaluate one field's annotation where it was written; classes imported for type checkers alone count as anything."""
    owner = next(c for c in cls.__mro__ if name in inspect.get_annotations(c))
    annotation = inspect.get_annotations(owner)[name]
    names = {**vars(sys.modules[owner.__module__]), **vars(owner)}
    probe = type("Probe", (), {"__annotations__": {name: annotation}})
    try:
        return typing.get_type_hints(probe, globalns=names, include_extras=True)[name]
    except NameError:
        return Any


def _expressible(hint: Any) -> bool:
    """Whether the schema can check values of this type."""
    if hint is Any:
        return False
    try:
        msgspec.convert(_MISSING, hint)
    except msgspec.ValidationError:
        return True
    except TypeError:
        return False
    return False


def _differs(value: Any, field: dataclasses.Field[Any]) -> bool:
    """Whether a plain value was changed from the field's default; of other objects only the identity can tell."""
    if field.default is not dataclasses.MISSING:
        default = field.default
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
        if not isinstance(default, _PLAIN):
            return False
    else:
        return True
    if value is default:
        return False
    return not (isinstance(value, _PLAIN) and type(value) is type(default) and value == default)


def seconds(value: float | datetime.timedelta | None) -> float | None:
    """A duration in seconds, from a number or a `datetime.timedelta`.

    Example:
        >>> seconds(datetime.timedelta(minutes=2)), seconds(5), seconds(None)
        (120.0, 5.0, None)
    """
    if value is None:
        return None
    return value.total_seconds() if isinstance(value, datetime.timedelta) else float(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """A clause with the closest known name, or with all of them.

    Example:
        >>> nearest("zise", ["size", "name"])
        " Did you mean 'size'?"
    """
    names = sorted(known)
    match = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f" Did you mean {match[0]!r}?" if match else f" Known: {', '.join(names) or 'none'}."
