"""Flags from schemas: every setting of every section is one, typed, under a heading of its own.

Options classes are imported only for the sections that the command line speaks of (or for ``--help``): a launch needs no plugin's.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from drivetrain.config.describing import described
from drivetrain.config.options import Options
from drivetrain.config.parsing import parse_text
from drivetrain.config.settings import CoreSettings, variable
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain._engine.collecting import Sections

__all__ = ["GroupedCommand", "GroupedOption", "SectionFlags", "group_option", "setting_flags"]

F = TypeVar("F", bound=Callable[..., Any])

#: Between section and field in the name of a click parameter, which must be an identifier.
_SEPARATOR = "__"


_CORE = frozenset(variable(name) for name in CoreSettings.hints())


class GroupedOption(click.Option):
    """An option under a heading of ``--help``."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


def group_option(group: str, *names: str, **kwargs: Any) -> Callable[[F], F]:
    """Like ``click.option``, with the heading first."""
    return click.option(*names, cls=GroupedOption, group=group, **kwargs)


class GroupedCommand(click.Command):
    """A command whose help lists its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, those without a heading last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        groups["Other"] = groups.pop("Other", [])
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def setting_flags(
    cls: type[Options], *, names: Iterable[str] | None = None, section: str = "", group: str
) -> list[GroupedOption]:
    """A flag for each field of an options class that text can say.

    Args:
        cls: The options class.
        names: Fields; None for all.
        section: Its section, which the flags' names begin with; empty for core's settings.
        group: The heading.

    Example:
        >>> from drivetrain.config import AutocastKwargs
        >>> [flag.opts[0] for flag in setting_flags(AutocastKwargs, section="autocast", group="autocast")]
        ['--autocast-enabled', '--autocast-cache-enabled']
    """
    texts = described(cls)
    fields = [name for name in (cls.hints() if names is None else names) if _can_be_text(cls.hints()[name])]
    return [_flag(cls, name, section, group, texts.get(name, "")) for name in fields]


def _flag(cls: type[Options], name: str, section: str, group: str, text: str) -> GroupedOption:
    flag = f"{section}-{name}".strip("-").replace("_", "-")
    hint = cls.hints()[name]
    key = f"{section}{_SEPARATOR}{name}" if section else name

    def convert(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        if value is None:
            return None
        words = str(value).lower() if isinstance(value, bool) else value
        try:
            converted = cls.convert(name, words, strict=False)
        except ConfigurationError as error:
            raise click.BadParameter(str(error), ctx, param) from None
        return words if section else converted

    common: dict[str, Any] = {"group": group, "help": _short(text), "callback": convert, "default": None}
    if _is_bool(hint):
        return GroupedOption([f"--{flag}/--no-{flag}", key], is_flag=True, **common)
    return GroupedOption([f"--{flag}", key], metavar=_metavar(hint), **common)


class SectionFlags:
    """The flags of all sections but the launchers' own short ones.

    Args:
        sections: What there is.
        without: Sections that have flags of another making.
    """

    def __init__(self, sections: Sections, without: Iterable[str] = ()) -> None:
        self._sections = sections
        self.names = sorted(set(sections.names()) - set(without))

    def mentioned(self, words: Iterable[str]) -> list[str]:
        """Sections that a command line speaks of; all of them for ``--help``."""
        flags = [w.lstrip("-").replace("_", "-") for w in words if w.startswith("--")] + [w for w in words if w == "-h"]
        if {"help", "-h"} & set(flags):
            return self.names
        return [n for n in self.names if any(f.removeprefix("no-").startswith(f"{_dashed(n)}-") for f in flags)]

    def flags(self, names: Iterable[str]) -> list[GroupedOption]:
        """The flags of some sections, each under its section's heading. Imports their options classes."""
        found = []
        for name in names:
            for cls in self._sections.classes(name):
                names = [n for n in cls.hints() if variable(n, name) not in _CORE]  # one variable, one flag
                found += setting_flags(cls, names=names, section=name, group=f"[{name}]")
        return found

    @staticmethod
    def given(values: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """By section and field, what was given."""
        found: dict[str, dict[str, str]] = {}
        for key, value in values.items():
            section, separator, name = key.partition(_SEPARATOR)
            if separator:
                found.setdefault(section, {})[name] = value
        return found


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _can_be_text(hint: Any) -> bool:
    """Whether a value other than none can be written as text."""
    try:
        parse_text("\0", hint)
    except ValueError as error:
        return not str(error).endswith("can only be given in Python")
    return True


def _is_bool(hint: Any) -> bool:
    if typing.get_origin(hint) is typing.Annotated:
        return _is_bool(typing.get_args(hint)[0])
    return hint is bool or set(typing.get_args(hint)) == {bool, type(None)}


def _metavar(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _metavar(arguments[0])
    if origin is typing.Literal:
        return "|".join(str(a) for a in arguments)
    if origin in (list, tuple, set, frozenset):
        return "A,B,..."
    if origin in (typing.Union, types.UnionType):
        rest = [a for a in arguments if a is not type(None)]
        return _metavar(rest[0]) if len(rest) == 1 else "VALUE"
    members = getattr(hint, "__members__", None)
    if members is not None:
        return "|".join(str(m.value) for m in members.values())
    return {int: "INTEGER", float: "NUMBER", str: "TEXT"}.get(
        hint, "JSON" if origin is not None or hint is dict else "VALUE"
    )


def _short(text: str) -> str:
    """The first sentence: ``docs/configuration.md`` has the rest."""
    first = text.split("; ")[0].split(". ")[0].rstrip(".")
    return f"{first}." if first else ""
