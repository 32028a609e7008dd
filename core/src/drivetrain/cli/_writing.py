"""Writing configuration files: what isn't changed stays as it is, comments too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from drivetrain.cli._settings import Key
from drivetrain.config.files import YAML_SUFFIXES
from drivetrain.errors import ConfigurationError

__all__ = ["write_changes"]


class _Format(Protocol):
    """One format's documents, which are mappings of mappings."""

    def load(self, text: str, path: Path) -> Any: ...

    def table(self) -> Any: ...

    def text(self, document: Any) -> str: ...


class _Toml:
    def load(self, text: str, path: Path) -> Any:
        import tomlkit
        from tomlkit.exceptions import ParseError

        try:
            return tomlkit.parse(text)
        except ParseError as error:
            raise ConfigurationError(f"{path} is not valid TOML: {error}") from None

    def table(self) -> Any:
        import tomlkit

        return tomlkit.table()

    def text(self, document: Any) -> str:
        import tomlkit

        return tomlkit.dumps(document)


class _Yaml:
    def load(self, text: str, path: Path) -> Any:
        from drivetrain.config.yaml_files import load_yaml

        return load_yaml(text, path)

    def table(self) -> Any:
        from ruamel.yaml.comments import CommentedMap

        return CommentedMap()

    def text(self, document: Any) -> str:
        from io import StringIO

        from ruamel.yaml import YAML

        if not document:
            return ""
        writer = YAML(typ="rt")
        writer.width = 4096  # long texts stay on their lines
        stream = StringIO()
        writer.dump(document, stream)
        return stream.getvalue()


def write_changes(path: Path, values: Mapping[Key, Any], dropped: Sequence[Key]) -> None:
    """Set and take out keys of a TOML or YAML file. A file that isn't there is made.

    Raises:
        ConfigurationError: If the file isn't what its name says, or a key to take out isn't there.
    """
    form: _Format = _Yaml() if path.suffix.lower() in YAML_SUFFIXES else _Toml()
    document = form.load(path.read_text(encoding="utf-8") if path.exists() else "", path)
    for (section, name), value in sorted(values.items()):
        if value is None:  # TOML has no word for it: it is the default of every setting that may be none
            _drop(document, section, name)
            continue
        table = _table(document, section, form)
        table[_spelling(table, name)] = value
    for section, name in dropped:
        if not _drop(document, section, name):
            raise ConfigurationError(f"{path} has no {f'{section}.{name}' if section else name}.")
    path.write_text(form.text(document), encoding="utf-8")


def _drop(document: Any, section: str, name: str) -> bool:
    table = _table(document, section, None)
    if table is None or _spelling(table, name) not in table:
        return False
    del table[_spelling(table, name)]
    return True


def _table(document: Any, section: str, form: _Format | None) -> Any:
    """The table of a section, in the spelling that the file has, made if a format is given; core's settings may stand under ``core``."""
    if not section:
        return document.get("core") or document
    name = _spelling(document, section)
    if document.get(name) is None:
        if form is None:
            return None
        document[name] = form.table()
    return document[name]


def _spelling(table: Any, name: str) -> str:
    """A hyphen and an underscore are the same: what the file has, or an underscore."""
    return next((str(key) for key in table if str(key).replace("-", "_") == name), name)
