"""How plugins are printed. Without rich: a listing is used in pipes and has to start quickly."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import click

from drivetrain._plugins.known import find_known, known_plugins
from drivetrain._plugins.record import KINDS, PluginRecord, Status, canonical, kind_of
from drivetrain._plugins.registry import Registry
from drivetrain.errors import PluginNotFoundError
from drivetrain.specs import AnySpec

__all__ = ["available", "details", "find", "may_offer", "print_json", "table", "to_dict", "verdict"]

_COLORS = {Status.OK: "green", Status.DISABLED: "bright_black"}
_HEADER = ("NAME", "STATUS", "VERSION", "DISTRIBUTION")


def find(registry: Registry, name: str) -> list[PluginRecord]:
    """The plugins of a name; else those of a distribution; else those that offer a spec of that name.

    Raises:
        PluginNotFoundError: If there is none.
    """
    by_name = [r for r in registry.records if canonical(r.name) == canonical(name)]
    by_distribution = [r for r in registry.records if canonical(r.distribution) == canonical(name)]
    by_spec = [r for r in registry.records if any(name in (s.name, *getattr(s, "aliases", ())) for s in r.specs)]
    found = by_name or by_distribution or by_spec
    if found:
        return found
    for kind in ("plugin", *KINDS):
        known = find_known(kind, name)
        if known is not None:
            raise PluginNotFoundError(f"{kind} {name!r} isn't installed. {known.remedy}")
    return [registry.plugin(name)]  # raises, naming what there is


def may_offer(record: PluginRecord, kind: str) -> bool:
    """Whether a plugin offers a kind, or is too broken for anyone to know."""
    return kind in record.kinds or (record.broken and not record.specs)


# -- text ------------------------------------------------------------------------------------------------------------------


def table(records: Sequence[PluginRecord], kind: str | None = None) -> Iterator[str]:
    """One line for each plugin, and below it what it offers and what is wrong with it."""
    rows = [(r.name, str(r.status), r.version or "-", r.distribution or "-") for r in records]
    widths = [max(len(row[i]) for row in (_HEADER, *rows)) for i in range(len(_HEADER))]
    yield click.style(_row(_HEADER, widths), bold=True)
    for record, row in zip(records, rows, strict=True):
        line = _row(row, widths)
        status = click.style(row[1].ljust(widths[1]), fg=_COLORS.get(record.status, "red"))
        start = widths[0] + 2
        yield line[:start] + status + line[start + widths[1] :]
        for offered in record.kinds if kind is None else [k for k in record.kinds if k == kind]:
            names = [spec.name + ("" if _usable(record, spec) else "*") for spec in _of_kind(record, offered)]
            yield _wrap(f"{offered}: {', '.join(names)}", " " * start, " " * (start + 2))
        for problem in _problems(record):
            yield _wrap(problem, " " * start, " " * (start + 2))


def available(records: Iterable[PluginRecord], kind: str | None = None) -> Iterator[str]:
    """First-party plugins that could be installed."""
    installed = {canonical(record.distribution) for record in records}
    missing = [
        known
        for known in known_plugins().values()
        if known.install_command and known.distribution not in installed and (kind is None or kind in known.specs)
    ]
    if missing:
        yield ""
        yield click.style("Not installed:", bold=True)
    for known in missing:
        yield f"{known.name}: {known.summary} {known.install_command}"


def details(record: PluginRecord) -> Iterator[str]:
    """Everything about one plugin."""
    rows = {
        "status": click.style(str(record.status), fg=_COLORS.get(record.status, "red")),
        "reason": record.reason,
        "version": record.version,
        "distribution": record.distribution,
        "location": record.location,
        "module": record.module,
        "api": "" if record.api is None else str(record.api),
        "note": "; ".join(record.notes),
    }
    yield click.style(record.name, bold=True)
    yield from _fields(rows, "  ")
    for spec in record.specs:
        yield ""
        yield f"  {kind_of(spec)} {click.style(spec.name, bold=True)}"
        described = _spec_to_dict(record, spec)
        shown = {key: _plain(described[key]) for key in described if key not in ("kind", "name", "usable")}
        yield from _fields(shown, "    ")
    if record.cause is not None and record.cause.__traceback__ is not None:
        yield ""
        yield textwrap.indent(_traceback(record.cause), "  ")


def _traceback(error: BaseException) -> str:
    """A traceback from where the plugin's code starts: who imported it is no news."""
    frames = traceback.extract_tb(error.__traceback__)
    for i, frame in enumerate(frames):
        if not any(
            part in frame.filename for part in ("importlib", "drivetrain/_plugins", "drivetrain\\_plugins", "pluggy")
        ):
            frames = traceback.StackSummary.from_list(frames[i:])
            break
    else:
        frames = traceback.StackSummary()
    lines = ["Traceback (most recent call last):\n", *frames.format()] if frames else []
    return "".join([*lines, *traceback.format_exception_only(type(error), error)]).rstrip()


def verdict(record: PluginRecord, problems: Sequence[str]) -> Iterator[str]:
    """The result of a check."""
    word = click.style("failed", fg="red") if problems else click.style("ok", fg="green")
    yield f"{record.label}: {word}"
    for problem in problems:
        yield _wrap(f"- {problem}", "  ", "    ")


def _problems(record: PluginRecord) -> Iterator[str]:
    if record.reason:
        yield record.reason
    for (kind, name), problem in sorted(record.problems.items()):
        if problem not in record.reason:
            yield f"* {kind} {name}: {problem}"
    yield from (f"note: {note}" for note in record.notes)


def _usable(record: PluginRecord, spec: AnySpec) -> bool:
    return record.loaded and (kind_of(spec), spec.name) not in record.problems


def _of_kind(record: PluginRecord, kind: str) -> list[AnySpec]:
    return [spec for spec in record.specs if kind_of(spec) == kind]


def _row(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _fields(rows: Mapping[str, str], indent: str) -> Iterator[str]:
    shown = {key.replace("_", " "): value for key, value in rows.items() if value not in ("", "-")}
    width = max(map(len, shown), default=0)
    for key, value in shown.items():
        yield _wrap(f"{key:<{width}}  {value}", indent, indent + " " * (width + 2))


def _wrap(line: str, indent: str, hanging: str) -> str:
    """Break a line for the terminal; in a pipe it stays whole, so that it can be searched."""
    if not sys.stdout.isatty():
        return indent + line
    width = max(40, shutil.get_terminal_size().columns)
    return textwrap.fill(
        line, width, initial_indent=indent, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


# -- JSON ------------------------------------------------------------------------------------------------------------------


def print_json(value: Any) -> None:
    """Print for machines."""
    click.echo(json.dumps(value, indent=2))


def to_dict(record: PluginRecord, kind: str | None = None) -> dict[str, Any]:
    """A plugin as plain data, with its specs (of one kind)."""
    return {
        "name": record.name,
        "status": str(record.status),
        "reason": record.reason,
        "version": record.version,
        "distribution": record.distribution,
        "location": record.location,
        "module": record.module,
        "api": record.api,
        "kinds": list(record.kinds),
        "notes": list(record.notes),
        "specs": [_spec_to_dict(record, spec) for spec in record.specs if kind in (None, kind_of(spec))],
    }


def _spec_to_dict(record: PluginRecord, spec: AnySpec) -> dict[str, Any]:
    problem = record.problems.get((kind_of(spec), spec.name)) or (None if record.loaded else record.reason)
    fields = {f.name: _to_plain(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
    return {"kind": kind_of(spec), "name": spec.name, "usable": problem is None, "problem": problem, **fields}


def _to_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _to_plain(value[key]) for key in sorted(value)}
    if isinstance(value, set | frozenset):
        return sorted(str(item) for item in value)
    if isinstance(value, tuple):
        return [str(item) for item in value]
    return value
