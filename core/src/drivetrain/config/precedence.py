"""Explicit argument beats environment beats configuration file beats default, field by field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from drivetrain.config.files import ConfigFile
from drivetrain.config.options import Options, nearest
from drivetrain.config.origins import DEFAULT, EXPLICIT, Origin, Source
from drivetrain.config.settings import CoreSettings, variable
from drivetrain.errors import ConfigurationError

__all__ = ["Resolved", "check_section", "resolve_core", "resolve_options"]

T = TypeVar("T", bound=Options)


class Resolved(msgspec.Struct, Generic[T], frozen=True):
    """Options whose every field came from the strongest source that says something.

    Args:
        value: The options.
        origins: Where each field came from.

    Example:
        >>> Resolved(CoreSettings(), {"cpu": DEFAULT}).origins["cpu"].source.name
        'DEFAULT'
    """

    value: T
    origins: Mapping[str, Origin] = msgspec.field(default_factory=dict)


def resolve_options(
    cls: type[T], *, section: str, given: T | None = None, environ: Mapping[str, str], file: ConfigFile
) -> Resolved[T]:
    """Resolve an options class field by field.

    Args:
        cls: The options class.
        section: Name of the spec, which names the variables (``DRIVETRAIN_<SECTION>_<FIELD>``) and the file's section.
        given: What the user constructed; returned as it is when no other source adds to it.
        environ: The environment.
        file: The configuration file.

    Raises:
        ConfigurationError: For a value of a wrong type, naming the variable, or file and line.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class ToyOptions(Options):
        ...     size: int = 3
        ...     name: str = "toy"
        >>> r = resolve_options(
        ...     ToyOptions, section="toy", given=ToyOptions(size=3), environ={"DRIVETRAIN_TOY_SIZE": "7",
        ...     "DRIVETRAIN_TOY_NAME": "x"}, file=ConfigFile())
        >>> r.value, str(r.origins["size"]), str(r.origins["name"])
        (ToyOptions(size=3, name='x'), 'argument', 'DRIVETRAIN_TOY_NAME')
    """
    explicit = {} if given is None else given.explicit()
    outside, origins = _from_outside(cls, section, explicit, environ, file, file.section(section))
    try:
        if given is None:
            value = cls(**outside)
        elif outside:
            value = type(given)(**{**outside, **explicit})
        else:
            value = given
        value.validate()
    except ConfigurationError as error:
        # The class knows its fields, not where their values were written.
        places = [f"{name}: {origins[name]}" for name in outside if name in str(error)]
        if not places:
            raise
        raise ConfigurationError(f"{error} ({', '.join(places)})") from None
    return Resolved(value, origins)


def resolve_core(given: Mapping[str, Any], *, environ: Mapping[str, str], file: ConfigFile) -> Resolved[CoreSettings]:
    """Resolve core's settings.

    Args:
        given: Arguments of the constructor that the user gave, by name.
        environ: The environment.
        file: The configuration file.

    Raises:
        ConfigurationError: For a value of a wrong type, naming where it came from.

    Example:
        >>> r = resolve_core({"cpu": False}, environ={"DRIVETRAIN_CPU": "1", "DRIVETRAIN_DEBUG": "on"}, file=ConfigFile())
        >>> r.value.cpu, r.value.debug
        (False, True)
    """
    explicit = {name: CoreSettings.convert(name, value) for name, value in given.items()}
    outside, origins = _from_outside(CoreSettings, "", explicit, environ, file, file.core)
    return Resolved(CoreSettings(**{**outside, **explicit}), origins)


def _from_outside(
    cls: type[Options],
    section: str,
    explicit: Mapping[str, Any],
    environ: Mapping[str, str],
    file: ConfigFile,
    in_file: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Origin]]:
    """Values that the environment or the file gives to fields that aren't explicit, and the origin of every field."""
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for name in cls.hints():
        key = variable(name, section)
        if name in explicit:
            origins[name] = EXPLICIT
        elif environ.get(key, "").strip():
            values[name] = _from_environment(cls, name, key, environ[key])
            origins[name] = Origin(Source.ENVIRONMENT, key)
        elif name in in_file:
            values[name] = _from_file(cls, name, in_file[name], section, file)
            origins[name] = Origin(Source.FILE, _where(name, section, file))
        else:
            origins[name] = DEFAULT
    return values, origins


def _from_environment(cls: type[Options], name: str, key: str, text: str) -> Any:
    try:
        return cls.convert(name, text, strict=False)
    except ConfigurationError as error:
        from drivetrain.config.secrets import without_secrets  # on the way of an error alone

        shown = without_secrets(key, text)
        said = str(error) if shown == text else str(error).replace(text, shown)
        raise ConfigurationError(f"{key}={shown!r}: {said}") from None


def _from_file(cls: type[Options], name: str, value: Any, section: str, file: ConfigFile) -> Any:
    if cls is CoreSettings:
        return value  # converted when the file was read
    try:
        return cls.convert(name, value)
    except ConfigurationError as error:
        raise ConfigurationError(f"{_where(name, section, file)}: {error}") from None


def _where(name: str, section: str, file: ConfigFile) -> str:
    if section or ("", name) in file.lines:
        return file.where(name, section)
    return file.where(name, "core")


def check_section(section: str, known: Collection[str], file: ConfigFile) -> None:
    """Refuse keys of a section that aren't known.

    Raises:
        ConfigurationError: With file, line, key and the nearest match.

    Example:
        >>> check_section("toy", ["size"], ConfigFile("f.toml", {}, {"toy": {"sise": 3}}, {("toy", "sise"): 2}))
        Traceback (most recent call last):
        ...
        drivetrain.errors.ConfigurationError: f.toml:2: [toy] has no setting 'sise'. Did you mean 'size'?
    """
    for key in file.section(section):
        if key not in known:
            raise ConfigurationError(
                f"{_where(key, section, file)}: [{section}] has no setting {key!r}.{nearest(key, known)}"
            )
