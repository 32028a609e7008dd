"""The configuration file: TOML or YAML, core's settings at the top level or under ``[core]``, one section per spec."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from drivetrain.config.options import nearest
from drivetrain.config.settings import CoreSettings
from drivetrain.errors import ConfigurationError

__all__ = [
    "DEFAULT_FILE",
    "DEFAULT_FILES",
    "YAML_SUFFIXES",
    "ConfigFile",
    "default_file",
    "read_config_file",
    "read_text",
]

#: The file that ``drivetrain config`` writes and that ``drivetrain launch`` takes by itself from the present directory.
DEFAULT_FILE = "drivetrain.toml"
#: All names under which it is looked for.
DEFAULT_FILES = (DEFAULT_FILE, "drivetrain.yaml", "drivetrain.yml")

#: Files that end so are YAML; all others are TOML.
YAML_SUFFIXES = (".yaml", ".yml")

_CORE = "core"
#: Keys of which each file that Accelerate writes has both.
_OF_ACCELERATE = frozenset({"compute_environment", "distributed_type"})


class ConfigFile(msgspec.Struct, frozen=True):
    """What a configuration file says. An empty one stands for no file.

    Args:
        path: Where it lies, as given; empty for no file.
        core: Core's settings.
        sections: Settings by section; hyphens in names of sections and keys are underscores.
        lines: Line of each key, by section ("" for the top level) and key.

    Example:
        >>> ConfigFile().section("my-backend")
        {}
    """

    path: str = ""
    core: Mapping[str, Any] = msgspec.field(default_factory=dict)
    sections: Mapping[str, Mapping[str, Any]] = msgspec.field(default_factory=dict)
    lines: Mapping[tuple[str, str], int] = msgspec.field(default_factory=dict)

    def section(self, name: str) -> Mapping[str, Any]:
        """The settings of one section; empty if there is none of that name."""
        return self.sections.get(_fold(name), {})

    def where(self, key: str, section: str = "") -> str:
        """File and, if it can be told, line of a key: "drivetrain.toml:3"."""
        line = self.lines.get((_fold(section), key))
        return f"{self.path}:{line}" if line else self.path

    def unknown_sections(self, known: Collection[str]) -> tuple[str, ...]:
        """One sentence for each section whose name isn't among ``known``: it may belong to a plugin that isn't installed here."""
        folded = {_fold(name) for name in known}
        return tuple(
            f"{self.where('', name)}: no installed plugin has the section [{name}], so it has no effect here."
            f"{nearest(name, folded)}"
            for name in self.sections
            if name not in folded
        )


def default_file(folder: str | Path = "") -> Path | None:
    """The file of a directory that counts without being named, or None.

    Raises:
        ConfigurationError: If there are several.

    Example:
        >>> import tempfile
        >>> default_file(tempfile.mkdtemp()) is None
        True
    """
    found = [path for name in DEFAULT_FILES if (path := Path(folder, name)).is_file()]
    if len(found) > 1:
        raise ConfigurationError(
            f"{' and '.join(map(str, found))} are both here: remove one, or name the one that counts (--config-file)."
        )
    return found[0] if found else None


def read_config_file(path: str | Path, *, said_by: str = "config_file") -> ConfigFile:
    r"""Read a configuration file.

    Args:
        path: Where it lies.
        said_by: The argument or variable that named the file, for messages.

    Raises:
        ConfigurationError: If it can't be read, isn't TOML (or YAML, if its name ends so), or has an unknown key of core; with file, line, key and the nearest match.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder, "drivetrain.toml")
        ...     _ = path.write_text('mixed-precision = "bf16"\n[my-backend]\nsize = 3\n')
        ...     file = read_config_file(path)
        >>> file.core, file.section("my-backend")
        ({'mixed_precision': 'bf16'}, {'size': 3})
    """
    text = read_text(Path(path), said_by=said_by)
    if Path(path).suffix.lower() in YAML_SUFFIXES:
        from drivetrain.config.yaml_files import parse_yaml  # most runs have no such file

        data, found = parse_yaml(text, path)
        lines = {(_fold(section), _fold(key)): line for (section, key), line in found.items()}
    else:
        data, lines = _parse(text, path), _find_lines(text)
    if _OF_ACCELERATE & data.keys():
        raise ConfigurationError(
            f"{path} ({said_by}) is a configuration file of Accelerate. `drivetrain config convert {path}` writes one with the same settings for "
            "Drivetrain, and says what has no counterpart."
        )
    file = ConfigFile(str(path), {}, {}, lines)
    core: dict[str, Any] = {}
    sections: dict[str, Mapping[str, Any]] = {}
    for key, value in data.items():
        if value is None and _fold(key) not in CoreSettings.hints():
            value = {}  # a section of YAML in which nothing stands
        if not isinstance(value, dict):
            _add_core(core, key, value, "", file)
        elif _fold(key) == _CORE:
            for name, inner in value.items():
                _add_core(core, name, inner, _CORE, file)
        else:
            _add_section(sections, key, value, file)
    return ConfigFile(str(path), core, sections, lines)


def read_text(path: Path, *, said_by: str) -> str:
    """The text of a configuration file.

    Args:
        path: Where it lies.
        said_by: The argument or variable that named the file, for messages.

    Raises:
        ConfigurationError: If it can't be read, or is of another format by its name.

    Example:
        >>> read_text(Path("drivetrain.json"), said_by="--config-file")
        Traceback (most recent call last):
        ...
        drivetrain.errors.ConfigurationError: drivetrain.json (--config-file): configuration files are TOML or YAML, for example drivetrain.toml or drivetrain.yaml.
    """
    if path.suffix.lower() in (".json", ".ini", ".cfg"):
        raise ConfigurationError(
            f"{path} ({said_by}): configuration files are TOML or YAML, for example drivetrain.toml or drivetrain.yaml."
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"The configuration file {path} ({said_by}) can't be read: {reason}.") from None


def _parse(text: str, path: str | Path) -> dict[str, Any]:
    # Imported here: most runs have no such file.
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}") from None


def _add_core(core: dict[str, Any], key: str, value: Any, section: str, file: ConfigFile) -> None:
    name = _fold(key)
    where = file.where(name, section)
    if name == "config_file":
        raise ConfigurationError(f"{where}: a configuration file can't name another one.")
    if name not in CoreSettings.hints():
        known = set(CoreSettings.hints()) - {"config_file"}
        raise ConfigurationError(f"{where}: unknown setting {key!r}.{nearest(name, known)}")
    if name in core:
        raise ConfigurationError(f"{where}: {key!r} is set twice, at the top level and in [core].")
    try:
        core[name] = CoreSettings.convert(name, value)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from None


def _add_section(
    sections: dict[str, Mapping[str, Any]], name: str, values: Mapping[str, Any], file: ConfigFile
) -> None:
    folded: dict[str, Any] = {}
    for key, value in values.items():
        if _fold(key) in folded:
            raise ConfigurationError(f"{file.where(_fold(key), name)}: {key!r} is set twice in [{name}].")
        folded[_fold(key)] = value
    if _fold(name) in sections:
        raise ConfigurationError(f"{file.where('', name)}: the section [{name}] stands there twice.")
    sections[_fold(name)] = folded


def _find_lines(text: str) -> dict[tuple[str, str], int]:
    """The TOML parser keeps no positions: find the first line of each plain ``key =`` and of each section's header."""
    lines: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\s*[\"']?([\w-]+)", line)
        if header:
            section = _fold(header[1])
            lines.setdefault((section, ""), number)
            continue
        key = re.match(r"\s*[\"']?([\w-]+)[\"']?\s*[.=]", line)
        if key:
            lines.setdefault((section, _fold(key[1])), number)
    return lines


def _fold(name: str) -> str:
    return name.replace("-", "_")
