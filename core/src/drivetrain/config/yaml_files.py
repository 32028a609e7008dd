"""Configuration files in YAML. The library is imported when there is one, and not before."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigurationError

__all__ = ["load_yaml", "parse_yaml"]


def load_yaml(text: str, path: str | Path) -> Any:
    """A YAML 1.2 document that keeps its comments and knows its lines; an empty one has no keys. Makes plain values alone, whatever tags say.

    Raises:
        ConfigurationError: If it isn't YAML, or no mapping; with the line.

    Example:
        >>> load_yaml("cpu: true  # why", "a.yaml")["cpu"]
        True
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        document = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        what = (error.problem or error.context or "").partition("\n")[0]
        raise ConfigurationError(f"{where}: not valid YAML: {what}") from None
    except (YAMLError, ValueError) as error:
        raise ConfigurationError(f"{path} is not valid YAML: {error}") from None
    if document is None:
        from ruamel.yaml.comments import CommentedMap

        return CommentedMap()
    if not isinstance(document, dict):
        raise ConfigurationError(f"{path}:1: a configuration file has keys and values, and this one is something else.")
    return document


def parse_yaml(text: str, path: str | Path) -> tuple[dict[str, Any], dict[tuple[str, str], int]]:
    r"""The plain values of a YAML document, and the line of each key, by section ("" for the top level) and key, as written.

    Raises:
        ConfigurationError: See `load_yaml`.

    Example:
        >>> parse_yaml("cpu: true\nddp:\n  bucket-cap-mb: 3\n", "a.yaml")
        ({'cpu': True, 'ddp': {'bucket-cap-mb': 3}}, {('', 'cpu'): 1, ('ddp', ''): 2, ('ddp', 'bucket-cap-mb'): 3})
    """
    document = load_yaml(text, path)
    lines: dict[tuple[str, str], int] = {}
    for key, value in document.items():
        line = _line(document, key)
        if isinstance(value, dict):
            lines[str(key), ""] = line
            lines.update({(str(key), str(inner)): _line(value, inner) for inner in value})
        else:
            lines["", str(key)] = line
    return {str(key): _plain(value, f"{path}:{_line(document, key)}") for key, value in document.items()}, lines


def _line(mapping: Any, key: Any) -> int:
    try:
        return int(mapping.lc.key(key)[0]) + 1
    except (AttributeError, KeyError, TypeError):  # merged from an anchor
        return int(mapping.lc.line) + 1


def _plain(value: Any, where: str) -> Any:
    """Python's own types: the library's remember how they were written."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if value is None:
        return None
    if hasattr(value, "isoformat"):  # a date, where a text was meant
        return str(value)
    if type(value).__name__ == "ScalarBoolean":  # a boolean with an anchor
        return bool(value)
    raise ConfigurationError(f"{where}: tags have no meaning here; give a plain value.")
