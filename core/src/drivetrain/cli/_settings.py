"""Settings as the command line writes them, checks them and finds them: ``section.key=value`` over all schemas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from drivetrain.config.files import ConfigFile, read_config_file
from drivetrain.config.options import Options, nearest
from drivetrain.config.precedence import resolve_core, resolve_options
from drivetrain.config.settings import CoreSettings
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain._engine.collecting import Sections

__all__ = ["Assignments", "Key", "problems", "resolved_rows"]

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Assignments:
    """Values by section ("" for core's) and name, as a file holds them: checked against the schemas.

    Args:
        values: What was assigned.
    """

    values: Mapping[Key, Any] = field(default_factory=dict)

    @staticmethod
    def key(text: str) -> Key:
        """Section and name of a dotted key.

        Example:
            >>> Assignments.key("data-loader.prefetch"), Assignments.key("cpu")
            (('data_loader', 'prefetch'), ('', 'cpu'))
        """
        section, _, name = text.strip().replace("-", "_").rpartition(".")
        return ("" if section == "core" else section), name

    @classmethod
    def parse(cls, words: Sequence[str], sections: Sections) -> Assignments:
        """Read ``KEY=VALUE`` words.

        Raises:
            ConfigurationError: For a key that nothing has (with the nearest one) or a value of a wrong type.
        """
        values: dict[Key, Any] = {}
        for word in words:
            text, equals, value = word.partition("=")
            if not equals:
                raise ConfigurationError(f"{word!r} isn't KEY=VALUE, as in launch.num_processes=4.")
            key = cls.key(text)
            values[key] = as_stored(*key, value, sections)
        return cls(values)


def as_stored(section: str, name: str, text: str, sections: Sections) -> Any:
    """One value as a file holds it.

    Raises:
        ConfigurationError: See `Assignments.parse`.
    """
    shown = f"{section}.{name}" if section else name
    owner = next((c for c in _classes(section, sections) if name in c.hints()), None)
    if owner is None:
        every = [
            f"{s}.{n}" if s else n for s in ("", *sections.names()) for c in _classes(s, sections) for n in c.hints()
        ]
        raise ConfigurationError(f"Nothing installed has a setting {shown!r}.{_closest(shown, every)}")
    try:
        value = owner.convert(name, text, strict=False)
    except ConfigurationError as error:
        raise ConfigurationError(f"{shown}={text}: {error}") from None
    return msgspec.to_builtins(value)


def _classes(section: str, sections: Sections) -> list[type[Options]]:
    if not section:
        return [CoreSettings]
    return sections.classes(section) if section in sections.names() else []


def _closest(name: str, known: Sequence[str]) -> str:
    hint = nearest(name, known)
    return hint if "Did you mean" in hint else " `drivetrain config show --all` lists all settings."


def problems(path: Path, sections: Sections) -> tuple[list[str], list[str]]:
    """All that is wrong with a file, and what is only worth knowing.

    Args:
        path: The file.
        sections: What is installed.
    """
    try:
        file = read_config_file(path, said_by="drivetrain config")
    except ConfigurationError as error:
        return [str(error)], []
    return list(_wrong(file, sections)), list(file.unknown_sections(sections.names()))


def _wrong(file: ConfigFile, sections: Sections) -> Iterator[str]:
    for section, values in file.sections.items():
        classes = _classes(section, sections)
        if section not in sections.names():
            continue
        for name, value in values.items():
            owner = next((c for c in classes if name in c.hints()), None)
            if owner is None:
                known = [n for c in classes for n in c.hints()]
                yield f"{file.where(name, section)}: [{section}] has no setting {name!r}.{nearest(name, known)}"
                continue
            try:
                owner.convert(name, value)
            except ConfigurationError as error:
                yield f"{file.where(name, section)}: {error}"


def resolved_rows(sections: Sections, file: ConfigFile, environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every setting with its value and origin.

    Raises:
        ConfigurationError: For a value of a wrong type, naming where it stands.
    """
    core = resolve_core({}, environ=environ, file=file)
    rows = _rows("", core.value, core.origins)
    for section in sorted(sections.names()):
        for cls in sections.classes(section):
            found = resolve_options(cls, section=section, environ=environ, file=file)
            rows += _rows(section, found.value, found.origins)
    return rows


def _rows(section: str, options: Options, origins: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for name, origin in origins.items():
        value = msgspec.to_builtins(getattr(options, name), enc_hook=str)
        rows.append({"key": f"{section}.{name}" if section else name, "value": value, "origin": str(origin)})
    return rows
