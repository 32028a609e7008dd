"""Writes the tables of `docs/configuration.md` from the options classes themselves.

    python docs/tools/configuration.py

A test says when that must be done again.
"""

from __future__ import annotations

import enum
import inspect
import json
import re
import types
import typing
from pathlib import Path

from drivetrain._engine.collecting import Sections
from drivetrain._plugins import get_registry
from drivetrain._plugins.known import known_plugins
from drivetrain.config import variable
from drivetrain.config.describing import described
from drivetrain.config.sections import CORE_OPTIONS
from drivetrain.config.settings import CoreSettings

PAGE = Path(__file__).parents[1] / "configuration.md"
BEGIN, END = "<!-- tables: written by docs/tools/configuration.py -->\n", "<!-- end of tables -->\n"


def page_with_tables(text: str) -> str:
    """The page with its tables as they should be."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{tables()}\n{END}{tail}"


def tables() -> str:
    """All tables, core's settings first."""
    parts = ["## Core's settings\n", *_table(CoreSettings, "")]
    sections = Sections(get_registry())
    ours = {name: cls for name in sections.names() for cls in sections.classes(name) if _is_ours(cls)}
    for name in [*CORE_OPTIONS, *sorted(set(ours) - set(CORE_OPTIONS))]:
        cls = ours[name]
        keyword = CORE_OPTIONS[name].keyword if name in CORE_OPTIONS else _accepted(cls)
        way = f"`Accelerator({keyword}={cls.__name__}(...))`" if keyword else f"`kwargs_handlers=[{cls.__name__}(...)]`"
        if name in ("launch", *get_registry().specs("launcher")):
            way = "flags of `drivetrain launch`"
        parts += [f"\n## {cls.__name__}\n", f"{_summary(cls)}\n", f"In Python: {way}. In the file: `[{name}]`.\n"]
        parts += _table(cls, name)
    return "\n".join(parts) + "\n"


def _is_ours(cls: type) -> bool:
    """Of this repository: pages don't depend on what else is installed."""
    return cls.__module__.split(".")[0] in {"drivetrain", *(f"drivetrain_{name}" for name in known_plugins())}


def _accepted(cls: type) -> str:
    for keyword, (kind, name) in get_registry().accepts().items():
        if (get_registry().get(kind, name).options or "").endswith(f":{cls.__name__}"):
            return keyword
    return ""


def _table(cls: typing.Any, section: str) -> list[str]:
    says = described(cls)
    rows = ["| setting | type | default | what it says | variable |", "|---|---|---|---|---|"]
    defaults = cls()
    for name, hint in cls.hints().items():
        default = _default(getattr(defaults, name))
        kind = _type(hint)
        where = f"`{variable(name, section)}`" if kind != "function" else "in Python only"
        cells = [f"`{name}`", kind, f"`{default}`", says[name], where]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _default(value: object) -> str:
    """As the file would have it."""
    if value is None:
        return "none"
    return json.dumps(value.value if isinstance(value, enum.Enum) else value)


def _type(hint: typing.Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        names = dict.fromkeys(_type(a) for a in arguments if a is not type(None))
        return " or ".join(names)
    if origin is typing.Literal:
        return " or ".join(f"`{json.dumps(a)}`" for a in arguments)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " or ".join(f"`{json.dumps(member.value)}`" for member in hint)
    known = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "table", typing.Any: "any"}
    if origin in (list, tuple):
        return f"list of {_type(arguments[0])}"
    if hint in known:
        return known[hint]
    if getattr(hint, "__name__", "") == "timedelta":
        return "`timedelta`"
    return "table" if inspect.isclass(origin) and issubclass(origin, typing.Mapping) else "function"


def _summary(cls: type) -> str:
    return _plain((inspect.getdoc(cls) or "").split("\n\n")[0])


def _plain(text: str) -> str:
    return re.sub(r"``", "`", " ".join(text.split()))


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
