"""Accelerate's configuration files in Drivetrain's words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from drivetrain.cli._settings import Assignments, Key, as_stored
from drivetrain.config.settings import CoreSettings
from drivetrain.config.yaml_files import parse_yaml
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain._engine.collecting import Sections

__all__ = ["Converted", "convert"]

#: Keys of the top level with another name here.
_RENAMED: Mapping[str, Key] = {"use_cpu": ("", "cpu"), "dynamo_backend": ("", "dynamo_backend")}
#: Fields of sections with another name here.
_FIELDS = {"transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap"}
#: What says nothing that one could set, or is always so here.
_WITHOUT_EFFECT = frozenset({"compute_environment", "main_training_function", "enable_cpu_affinity"})
#: Values that mean "nothing".
_NOTHING: tuple[Any, ...] = (None, "", {}, [])
#: Distributed types for which the devices and the number of processes say enough.
_AUTOMATIC = ("NO", "MULTI_")
#: How a rendezvous without a choice is written there.
_DEFAULTS = {"rdzv_backend": "static", "same_network": True}


class Converted(NamedTuple):
    """What became of a file.

    Args:
        values: Settings for Drivetrain.
        left: A sentence for each key without a counterpart.
    """

    values: Assignments
    left: tuple[str, ...]


def convert(text: str, path: Path, sections: Sections) -> Converted:
    r"""Read a file that ``accelerate config`` has written.

    Args:
        text: What stands in it.
        path: Where it lies, for messages.
        sections: What is installed.

    Raises:
        ConfigurationError: If it isn't YAML, or none of Accelerate's.

    Example:
        >>> from drivetrain._engine.collecting import Sections
        >>> from drivetrain._plugins import get_registry
        >>> found = convert("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\ntpu_zone: a\n", Path("old.yaml"), Sections(get_registry()))
        >>> found.values.values
        {('', 'cpu'): True, ('launch', 'num_processes'): 2}
        >>> found.left
        ("old.yaml:4: tpu_zone: 'a' has no counterpart.",)
    """
    data, lines = parse_yaml(text, path)
    if "distributed_type" not in data:
        raise ConfigurationError(f"{path} is no configuration file of Accelerate: it has no distributed_type.")
    values: dict[Key, Any] = {}
    left: list[str] = []
    for table, key, value in _flat(data):
        line = lines.get((table, key)) or lines.get((key, "")) or 1
        shown = f"{path}:{line}: {f'{table}.' if table else ''}{key}: {value!r}"
        if value in _NOTHING or (not table and key in _WITHOUT_EFFECT) or _DEFAULTS.get(key) == value:
            continue
        if key == "distributed_type":
            name = _backend(str(value))
            if name is not None:
                values["", "backend"] = name
            elif not str(value).startswith(_AUTOMATIC):
                left.append(f"{shown} has no counterpart.")
            continue
        target = _target(table, key, sections)
        if target is None:
            left.append(f"{shown} has no counterpart.")
            continue
        try:
            values[target] = as_stored(*target, _text(value), sections)
        except ConfigurationError as error:
            left.append(f"{shown} can't be taken over: {error}")
    return Converted(Assignments(values), tuple(left))


def _flat(data: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from ((key, inner, item) for inner, item in value.items())
        else:
            yield "", key, value


def _backend(distributed_type: str) -> str | None:
    """Which backend, installed or known, has that type."""
    from drivetrain._plugins import get_registry
    from drivetrain._plugins.known import known_plugins

    for name, spec in get_registry().specs("backend").items():
        if spec.distributed_type == distributed_type:
            return str(name)
    for plugin in known_plugins().values():
        if distributed_type in plugin.distributed_types:
            return next(iter(plugin.specs.get("backend", ())), None)
    return None


def _target(table: str, key: str, sections: Sections) -> Key | None:
    """Section and name of a key; tables are called ``<section>_config``, and their keys repeat that."""
    if key in _RENAMED:
        return _RENAMED[key]
    if not table:
        if key in CoreSettings.hints():
            return "", key
        return ("launch", key) if _has(sections, "launch", key) else None
    for section in (table.removesuffix("_config"), table):
        for prefix in (f"{table}_", f"{section}_", ""):
            name = key.removeprefix(prefix)
            name = _FIELDS.get(name, name)
            if _has(sections, section, name):
                return section, name
    return None


def _has(sections: Sections, section: str, name: str) -> bool:
    return section in sections.names() and any(name in cls.hints() for cls in sections.classes(section))


def _text(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else ",".join(map(str, value))
        if isinstance(value, list)
        else str(value)
    )
