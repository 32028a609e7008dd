"""Text from environment variables and command lines, read as a field's type."""

from __future__ import annotations

import enum
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

__all__ = ["parse_text"]

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_NONE = frozenset({"", "none", "null"})
_SEQUENCES = (list, tuple, set, frozenset)


def parse_text(text: str, hint: Any) -> Any:
    """Read ``text`` as a value of type ``hint``.

    Booleans are 1/0, true/false, yes/no, on/off in any case; sequences are separated by commas or are JSON; dicts are JSON; "none" is None
    where None is allowed; of several types the first that fits is taken, text last. Times are seconds.

    Raises:
        ValueError: With a clause that says what was expected, for example "expected 1/0, true/false, yes/no or on/off".

    Example:
        >>> parse_text("Yes", bool), parse_text("3,4", tuple[int, ...]), parse_text("none", float | None)
        (True, (3, 4), None)
        >>> parse_text("maybe", bool | None)
        Traceback (most recent call last):
        ...
        ValueError: expected 1/0, true/false, yes/no or on/off, or none
    """
    text = text.strip()
    origin = typing.get_origin(hint)
    if hint is Any:
        return text
    if origin is typing.Annotated:
        return _checked(parse_text(text, typing.get_args(hint)[0]), hint)
    if origin in (typing.Union, types.UnionType):
        return _parse_union(text, typing.get_args(hint))
    if origin is typing.Literal:
        return _parse_choice(text, {str(v): v for v in typing.get_args(hint)})
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _parse_choice(text, {**{m.name: m for m in hint}, **{str(m.value): m for m in hint}})
    return _parse_plain(text, origin or hint, hint)


def _parse_plain(text: str, kind: Any, hint: Any) -> Any:
    if kind in _READERS:
        return _READERS[kind](text)
    if kind in _SEQUENCES:
        return _parse_sequence(text, hint)
    if isinstance(kind, type) and (issubclass(kind, Mapping) or hasattr(kind, "__dataclass_fields__")):
        return _checked(_json(text, "a JSON object"), hint)
    raise ValueError("this setting can only be given in Python")


def _parse_bool(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError("expected 1/0, true/false, yes/no or on/off")


def _parse_none(text: str) -> None:
    if text.lower() not in _NONE:
        raise ValueError("expected none")


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("expected an integer") from None


def _parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("expected a number") from None


def _parse_union(text: str, hints: tuple[Any, ...]) -> Any:
    """None first and text last; "1" is an integer where both integer and boolean are allowed."""
    expected = []
    only_in_python = False
    for hint in sorted(hints, key=lambda h: _UNION_ORDER.get(h, 2)):
        try:
            return parse_text(text, hint)
        except ValueError as error:
            if str(error).startswith("expected "):
                expected.append((hint is type(None), str(error).removeprefix("expected ")))
            else:
                only_in_python = True
    if only_in_python and all(is_none for is_none, _ in expected):
        allowed = "expected none; other values" if expected else "this setting"
        raise ValueError(f"{allowed} can only be given in Python")
    expected.sort()
    raise ValueError("expected " + ", or ".join(clause for _, clause in expected))


def _parse_choice(text: str, choices: Mapping[str, Any]) -> Any:
    if text in choices:
        return choices[text]
    folded = {name.lower().replace("-", "_"): value for name, value in choices.items()}
    key = text.lower().replace("-", "_")
    if key not in folded:
        raise ValueError(f"expected one of {', '.join(dict.fromkeys(folded))}")
    return folded[key]


def _parse_sequence(text: str, hint: Any) -> Any:
    if text.startswith("["):
        return _checked(_json(text, "a JSON list"), hint)
    kind, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if kind is tuple and args and args[-1] is not Ellipsis:
        if len(args) != len(parts):
            raise ValueError(f"expected {len(args)} values separated by commas")
        return tuple(parse_text(part, h) for part, h in zip(parts, args, strict=True))
    item = args[0] if args else str
    return kind(parse_text(part, item) for part in parts)


def _json(text: str, what: str) -> Any:
    try:
        return msgspec.json.decode(text.encode())
    except msgspec.DecodeError as error:
        raise ValueError(f"expected {what} ({error})") from None


def _checked(value: Any, hint: Any) -> Any:
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)[:1].lower() + str(error)[1:]) from None


_READERS: dict[Any, Callable[[str], Any]] = {
    bool: _parse_bool,
    int: _parse_int,
    float: _parse_float,
    str: str,
    type(None): _parse_none,
}
_UNION_ORDER = {type(None): 0, int: 1, float: 2, bool: 3, str: 9}
