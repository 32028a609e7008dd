"""Finds plugins through entry points and loads them. It never raises: whatever goes wrong becomes a record."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from drivetrain import __version__
from drivetrain._plugins.known import find_known
from drivetrain._plugins.manager import HookManager
from drivetrain._plugins.metadata import headers
from drivetrain._plugins.record import PluginRecord, Status, canonical, kind_of
from drivetrain._plugins.requirements import Requirements
from drivetrain._plugins.validate import nearest_clause
from drivetrain.errors import PluginError
from drivetrain.specs import API_VERSION

__all__ = ["ALLOW", "BUILTIN", "DISABLE", "GROUP", "Discovery", "discover"]

#: The entry point group.
GROUP = "drivetrain.plugins"
#: Name of the plugin that is part of core.
BUILTIN = "builtin"
#: Variable with the names of the only plugins to load.
ALLOW = "DRIVETRAIN_PLUGINS"
#: Variable with the names of plugins not to load.
DISABLE = "DRIVETRAIN_DISABLE_PLUGINS"


class Discovery(NamedTuple):
    """What was found.

    Args:
        records: One for each plugin, sorted by name and distribution, the builtin one first.
        manager: Holds the hooks of those that loaded.
        warnings: Sentences about the discovery itself.
    """

    records: tuple[PluginRecord, ...]
    manager: HookManager
    warnings: tuple[str, ...]


class _Candidate(NamedTuple):
    record: PluginRecord
    requires: tuple[str, ...] = ()


def discover(
    *,
    environ: Mapping[str, str],
    entry_points: Iterable[importlib.metadata.EntryPoint] | None = None,
    builtin: str = "drivetrain._builtin.plugin",
) -> Discovery:
    """Find and load all plugins.

    Args:
        environ: Environment variables.
        entry_points: Those of the group, in any order; None for what is installed.
        builtin: Module of the builtin plugin.

    Example:
        >>> [record.name for record in discover(environ={}, entry_points=[]).records]
        ['builtin']
    """
    warnings: list[str] = []
    found = _installed_entry_points(warnings) if entry_points is None else entry_points
    switches = _Switches(environ)
    candidates = sorted((_candidate(entry_point) for entry_point in found), key=_order)
    core = PluginRecord(name=BUILTIN, distribution="drivetrain", version=__version__, module=builtin)
    warnings += switches.unknown_names([core, *(candidate.record for candidate in candidates)])
    records = [switches.apply(candidate.record) for candidate in candidates]
    records = [_check_name(record, records) for record in records]
    loader = _Loader()
    loaded = [loader.load(core)]
    for record, candidate in zip(records, candidates, strict=True):
        loaded.append(loader.load(record, candidate.requires) if record.status is Status.OK else record)
    return Discovery(tuple(loaded), loader.manager, tuple(warnings))


class _Switches:
    """The two environment variables that choose among what is installed. Both take plugins' and distributions' names."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.allowed = _names(environ.get(ALLOW, ""))
        self.disabled = _names(environ.get(DISABLE, ""))

    def apply(self, record: PluginRecord) -> PluginRecord:
        names = {canonical(record.name), canonical(record.distribution)}
        if names & self.disabled.keys():
            return replace(record, status=Status.DISABLED, reason=f"it is named in {DISABLE}")
        if self.allowed and not names & self.allowed.keys():
            return replace(record, status=Status.DISABLED, reason=f"it isn't named in {ALLOW}")
        return record

    def unknown_names(self, records: Iterable[PluginRecord]) -> list[str]:
        known = {canonical(name) for record in records for name in (record.name, record.distribution)}
        warnings = []
        for variable, names in ((ALLOW, self.allowed), (DISABLE, self.disabled)):
            unknown = [_unknown_clause(key, name, known) for key, name in names.items() if key not in known]
            if unknown:
                warnings.append(f"{variable} names plugins that aren't installed: {'; '.join(unknown)}")
        if self.disabled.keys() & {BUILTIN, "drivetrain"}:
            warnings.append(f"{DISABLE} names the builtin plugin, which can't be disabled")
        return warnings


def _unknown_clause(key: str, name: str, known: set[str]) -> str:
    owner = find_known("plugin", key)
    clause = f". {owner.remedy}" if owner is not None else nearest_clause(key, known)
    return f"{name!r}{clause if clause.startswith('.') or not clause else '.' + clause}"


class _Loader:
    """Imports one plugin after the other."""

    def __init__(self) -> None:
        self.manager = HookManager()
        self._requirements = Requirements()

    def load(self, record: PluginRecord, requires: Iterable[str] = ()) -> PluginRecord:
        """The record, with specs or with the reason why there are none."""
        unmet = self._requirements.unmet(requires)
        torch_before = "torch" in sys.modules
        record = self._load_module(record)
        if not torch_before and "torch" in sys.modules:
            note = "its entry module imports torch, which makes every start slow"
            record = replace(record, notes=(*record.notes, note))
        if unmet and record.status is not Status.WRONG_API:
            # What it offers is still listed, and a failed import has the missing requirement as its likely reason.
            self.manager.unregister(record.name)
            reason = "; ".join(unmet)
            return replace(record, status=Status.MISSING_REQUIREMENT, reason=reason, cause=PluginError(reason))
        return self._check_spec_requirements(record)

    def _load_module(self, record: PluginRecord) -> PluginRecord:
        try:
            if ":" in record.module:
                raise PluginError(f"its entry point must name a module, got {record.module!r}")
            module = importlib.import_module(record.module)
            record = replace(record, location=str(getattr(module, "__file__", None) or record.location))
            record = _check_api(record, module)
            if record.status is Status.OK:
                self.manager.register(record.name, module)
                record = replace(record, specs=self.manager.collect(module))
            return record
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit() in a plugin, or the panic of a Rust extension, ends no program
            self.manager.unregister(record.name)
            return replace(record, status=Status.FAILED, reason=_one_line(error), cause=error)

    def _check_spec_requirements(self, record: PluginRecord) -> PluginRecord:
        problems = {}
        for spec in record.specs:
            unmet = self._requirements.unmet(spec.requires)
            if unmet:
                problems[kind_of(spec), spec.name] = "; ".join(unmet)
        record = replace(record, problems=problems)
        if record.specs and len(problems) == len(record.specs):
            reason = "; ".join(dict.fromkeys(problems.values()))
            return replace(record, status=Status.MISSING_REQUIREMENT, reason=reason, cause=PluginError(reason))
        return record


def _one_line(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = "(its message can't be printed)"
    return text if isinstance(error, PluginError) else f"{type(error).__name__}: {text}".rstrip(": ")


def _check_api(record: PluginRecord, module: ModuleType) -> PluginRecord:
    api = getattr(module, "DRIVETRAIN_API", None)
    supported = [number for number in (API_VERSION, API_VERSION - 1) if number > 0]
    numbers = " and ".join(str(number) for number in supported)
    has = f"drivetrain {__version__} supports {numbers}"
    if type(api) is int and api in supported:
        return replace(record, api=api)
    if api is None:
        reason = f"its module doesn't say which plugin API it was written for: add DRIVETRAIN_API = {API_VERSION}"
    elif type(api) is not int:
        reason = f"its DRIVETRAIN_API must be a number, got {api!r}; {has}"
    else:
        remedy = "upgrade drivetrain" if api > API_VERSION else f"upgrade {record.distribution or record.name}"
        reason = f"it was written for plugin API {api}, but {has}: {remedy}"
    number = api if type(api) is int else None
    return replace(record, status=Status.WRONG_API, api=number, reason=reason, cause=PluginError(reason))


def _check_name(record: PluginRecord, records: Iterable[PluginRecord]) -> PluginRecord:
    """A plugin whose name isn't its own is not imported: nobody can say which one is meant."""
    if record.status is not Status.OK:
        return record
    rivals = [r for r in records if r.name == record.name and r.status is Status.OK]
    owner = find_known("plugin", record.name)
    if record.name == BUILTIN:
        reason = f"the plugin name {BUILTIN!r} belongs to drivetrain itself, but {record.distribution} uses it"
    elif len(rivals) > 1:
        offers = " and ".join(f"{rival.distribution} {rival.version}" for rival in rivals)
        reason = f"the plugin name {record.name!r} is offered by {offers}; uninstall one, or name its distribution in {DISABLE}"
    elif owner is not None and canonical(record.distribution) != canonical(owner.distribution):
        reason = f"the plugin name {record.name!r} belongs to {owner.distribution}, but {record.distribution} uses it"
    else:
        return record
    return replace(record, status=Status.CONFLICT, reason=reason, cause=PluginError(reason))


def _order(candidate: _Candidate) -> tuple[str, str, str]:
    record = candidate.record
    return record.name, canonical(record.distribution), record.module


def _names(value: str) -> dict[str, str]:
    """Canonical to written name of each item of a comma list."""
    return {canonical(item.strip()): item.strip() for item in value.split(",") if item.strip()}


def _installed_entry_points(warnings: list[str]) -> list[importlib.metadata.EntryPoint]:
    try:
        return list(importlib.metadata.entry_points(group=GROUP))
    except Exception as error:  # one distribution's broken metadata spoils the whole query: ask each by itself
        warnings.append(
            f"the entry points of an installed distribution can't be read ({type(error).__name__}: {error})"
        )
    found: list[importlib.metadata.EntryPoint] = []
    seen = set()
    for distribution in importlib.metadata.distributions():
        try:
            name = distribution.metadata["Name"]
            if name not in seen:
                seen.add(name)
                found.extend(distribution.entry_points.select(group=GROUP))
        except Exception as error:
            warnings.append(f"{getattr(distribution, '_path', 'a distribution')} is skipped: {error}")
    return found


def _candidate(entry_point: importlib.metadata.EntryPoint) -> _Candidate:
    module = entry_point.value.partition("[")[0].strip()
    record = PluginRecord(name=entry_point.name, module=module)
    distribution = getattr(entry_point, "dist", None)
    if distribution is None:
        return _Candidate(record)
    try:
        fields = headers(distribution, ["Name", "Version", "Requires-Dist"])
        name, version = "".join(fields["Name"][:1]), "".join(fields["Version"][:1])
        file = Path(str(distribution.locate_file(module.replace(".", "/") + ".py")))
        location = str(file if file.is_file() else distribution.locate_file(""))
        record = replace(record, distribution=name, version=version, location=location)
        return _Candidate(record, tuple(fields["Requires-Dist"]))
    except Exception as error:
        note = f"the metadata of its distribution can't be read ({type(error).__name__}: {error})"
        return _Candidate(replace(record, notes=(note,)))
