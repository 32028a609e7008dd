"""A plugin's static check: loads everything that it names, which discovery never does."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from drivetrain._lazy import load_target
from drivetrain._plugins.names import export_target
from drivetrain._plugins.record import PluginRecord, Status, kind_of
from drivetrain._plugins.registry import Registry
from drivetrain.specs import AnySpec

__all__ = ["INTERFACES", "check_plugin"]

#: What the target of a spec must derive from, by kind. Of the others, a cluster's is a function and a command's a click command.
INTERFACES = {
    "backend": "drivetrain.interfaces:Backend",
    "device": "drivetrain.interfaces:Device",
    "precision": "drivetrain.interfaces:Precision",
    "sharding-planner": "drivetrain.interfaces:ShardingPlanner",
    "data-sharding": "drivetrain.interfaces:DataSharding",
    "tracker": "drivetrain.interfaces:Tracker",
    "checkpoint-format": "drivetrain.interfaces:CheckpointFormat",
    "launcher": "drivetrain.interfaces:Launcher",
}


def check_plugin(registry: Registry, record: PluginRecord) -> list[str]:
    """Load all that a plugin names and say what is wrong with it. Imports torch, as a rule.

    Returns:
        Sentences; none if all is well.

    Example:
        >>> registry = Registry.discover(environ={}, entry_points=[])
        >>> check_plugin(registry, PluginRecord(name="toy", status=Status.WRONG_API, reason="its API is 7"))
        ['wrong-api: its API is 7']
    """
    problems = [f"{record.status}: {record.reason}"] if record.status is not Status.OK else []
    problems += [
        f"{kind} {name!r}: {text}" for (kind, name), text in record.problems.items() if text not in record.reason
    ]
    problems += record.notes
    if record.loaded:
        for spec in record.specs:
            if (kind_of(spec), spec.name) not in record.problems:
                problems += [f"{kind_of(spec)} {spec.name!r}: {problem}" for problem in _spec_problems(spec)]
    return problems


def _spec_problems(spec: AnySpec) -> Iterator[str]:
    if spec.target:
        target, problem = _load("target", spec.target)
        yield from [problem] if problem else _target_problems(spec, target)
    if spec.options:
        options, problem = _load("options", spec.options)
        yield from [problem] if problem else _options_problems(spec.options, options)
    if spec.report:
        report, problem = _load("report", spec.report)
        if problem or not callable(report):
            yield problem or f"report {spec.report!r} isn't a function"
    if adopts := getattr(spec, "adopts", ""):
        function, problem = _load("adopts", adopts)
        if problem or not callable(function):
            yield problem or f"adopts {adopts!r} isn't a function"
    for export in spec.exports:
        _, problem = _load("exports", export_target(spec, export.partition("=")[0]) or "")
        if problem:
            yield problem


def _load(what: str, target: str) -> tuple[Any, str | None]:
    try:
        return load_target(target), None
    except Exception as error:
        return None, f"{what} {target!r} can't be imported: {type(error).__name__}: {error}"


def _target_problems(spec: AnySpec, target: Any) -> Iterator[str]:
    kind = kind_of(spec)
    if kind in INTERFACES:
        interface = load_target(INTERFACES[kind])
        if not (isinstance(target, type) and issubclass(target, interface)):
            yield f"target {spec.target!r} doesn't derive from drivetrain.interfaces.{interface.__name__}"
        elif inspect.isabstract(target):
            yield f"target {spec.target!r} lacks {', '.join(sorted(getattr(target, '__abstractmethods__', ())))}"
    elif kind == "command":
        import click

        if not isinstance(target, click.Command):
            yield f"target {spec.target!r} isn't a click command"
    elif not callable(target):
        yield f"target {spec.target!r} isn't a function"


def _options_problems(name: str, options: Any) -> Iterator[str]:
    from drivetrain.config import Options

    fields = dataclasses.fields(options) if dataclasses.is_dataclass(options) else None
    if fields is None or not (isinstance(options, type) and issubclass(options, Options)):
        yield f"options {name!r} isn't a dataclass that derives from drivetrain.config.Options"
        return
    required = [
        field.name for field in fields if field.init and field.default is field.default_factory is dataclasses.MISSING
    ]
    if required:
        yield f"options {name!r}: without a default, {', '.join(required)} can't come from a file or a variable"
        return
    try:
        options().validate()
    except Exception as error:
        yield f"options {name!r}: the defaults don't fit the schema: {type(error).__name__}: {error}"
