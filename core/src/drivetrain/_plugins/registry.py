"""What plugins offer, found once per process and never changed."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Any, Literal, NoReturn, overload

import drivetrain.specs as s
from drivetrain._lazy import load_target
from drivetrain._plugins.known import KnownPlugin, find_known, known_plugins
from drivetrain._plugins.loader import Discovery, discover
from drivetrain._plugins.names import ACCEPT, EXPORT, Names, Offer, export_target
from drivetrain._plugins.record import KINDS, PluginRecord, Status, canonical
from drivetrain._plugins.validate import nearest_clause
from drivetrain.errors import ConfigurationError, DrivetrainError, PluginError, PluginNotFoundError
from drivetrain.specs import AnySpec, Detection, Request

__all__ = ["MissingExportError", "Registry"]


class MissingExportError(PluginNotFoundError, ImportError):
    """A plugin that isn't installed has the name; ``from drivetrain import name`` shows what to install.

    It is an ImportError, so that scripts with ``try: from ... import ...`` / ``except ImportError`` work.
    """


class Registry:
    """What plugins offer. Make one with `Registry.discover`, or take the process's with `drivetrain._plugins.get_registry`.

    Example:
        >>> registry = Registry.discover(environ={}, entry_points=[])
        >>> registry.plugin("builtin").distribution
        'drivetrain'
        >>> registry.get("backend", "no-such-backend")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        drivetrain.errors.PluginNotFoundError: There is no backend 'no-such-backend'...
    """

    __slots__ = (
        "_accepts",
        "_environ",
        "_exports",
        "_listened",
        "_manager",
        "_names",
        "_specs",
        "_unheard",
        "warnings",
    )

    #: Sentences about the discovery itself, such as unknown names in DRIVETRAIN_PLUGINS.
    warnings: tuple[str, ...]

    def __init__(self, discovery: Discovery, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._manager = discovery.manager
        self._names = Names.build(discovery.records)
        self.warnings = discovery.warnings
        self._specs = {kind: self._usable(kind) for kind in KINDS}
        self._accepts = self._offered(ACCEPT)
        self._exports = self._offered(EXPORT)
        self._listened = frozenset(event for event in self._manager.events if self._manager.listeners(event))
        self._unheard = [True]

    @classmethod
    def discover(
        cls, *, environ: Mapping[str, str] | None = None, entry_points: Iterable[EntryPoint] | None = None, **kw: Any
    ) -> Registry:
        """Find and load all plugins. Never raises: what goes wrong is in the records.

        Args:
            environ: Environment variables; None for those of the process.
            entry_points: Those of the group ``drivetrain.plugins``, in any order; None for what is installed.
            **kw: For tests: ``builtin``, the module of the builtin plugin.
        """
        environ = dict(os.environ if environ is None else environ)
        return cls(discover(environ=environ, entry_points=entry_points, **kw), environ)

    # -- plugins -----------------------------------------------------------------------------------------------------------

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """All plugins, the builtin one first, then sorted by name and distribution."""
        return self._names.records

    def plugin(self, name: str) -> PluginRecord:
        """The record of a plugin.

        Raises:
            PluginNotFoundError: If nothing of that name is installed.
            PluginError: If two distributions offer it.
        """
        found = [record for record in self.records if canonical(record.name) == canonical(name)]
        enabled = [record for record in found if record.status is not Status.DISABLED]
        if len(enabled) > 1:
            raise PluginError(enabled[0].reason) from enabled[0].cause
        if found:
            return (enabled or found)[0]
        raise _not_found(
            "plugin", name, [record.name for record in self.records], find_known("plugin", canonical(name))
        )

    def inventory(self) -> dict[str, str]:
        """What is installed, in a form that ranks can compare: plugin's name to distribution, version and status."""
        return {f"{r.name} ({r.distribution})": f"{r.version or 'unknown version'}, {r.status}" for r in self.records}

    def warn_broken(self) -> None:
        """Warn about broken plugins: on the first call, and on rank 0 only."""
        if not self._unheard:
            return
        self._unheard.clear()
        if self._environ.get("RANK", "0") != "0":
            return
        for sentence in self.warnings:
            warnings.warn(sentence, stacklevel=3)
        for record in self.records:
            if record.broken:
                warnings.warn(
                    f"{record.label} has status {str(record.status)!r} and is left out: {record.reason}. "
                    f"Run `drivetrain plugins show {record.name}` for more.",
                    stacklevel=3,
                )

    # -- specs -------------------------------------------------------------------------------------------------------------

    # fmt: off
    @overload
    def specs(self, kind: Literal["backend"]) -> Mapping[str, s.BackendSpec]: ...
    @overload
    def specs(self, kind: Literal["device"]) -> Mapping[str, s.DeviceSpec]: ...
    @overload
    def specs(self, kind: Literal["cluster"]) -> Mapping[str, s.ClusterSpec]: ...
    @overload
    def specs(self, kind: Literal["precision"]) -> Mapping[str, s.PrecisionSpec]: ...
    @overload
    def specs(self, kind: Literal["sharding-planner"]) -> Mapping[str, s.ShardingPlannerSpec]: ...
    @overload
    def specs(self, kind: Literal["data-sharding"]) -> Mapping[str, s.DataShardingSpec]: ...
    @overload
    def specs(self, kind: Literal["tracker"]) -> Mapping[str, s.TrackerSpec]: ...
    @overload
    def specs(self, kind: Literal["checkpoint-format"]) -> Mapping[str, s.CheckpointFormatSpec]: ...
    @overload
    def specs(self, kind: Literal["launcher"]) -> Mapping[str, s.LauncherSpec]: ...
    @overload
    def specs(self, kind: Literal["command"]) -> Mapping[str, s.CommandSpec]: ...
    @overload
    def specs(self, kind: str) -> Mapping[str, Any]: ...
    # fmt: on
    def specs(self, kind: str) -> Mapping[str, Any]:
        """The specs of a kind that can be used, by name (without aliases), sorted."""
        return self._specs[kind]

    # fmt: off
    @overload
    def get(self, kind: Literal["backend"], name: str) -> s.BackendSpec: ...
    @overload
    def get(self, kind: Literal["device"], name: str) -> s.DeviceSpec: ...
    @overload
    def get(self, kind: Literal["cluster"], name: str) -> s.ClusterSpec: ...
    @overload
    def get(self, kind: Literal["precision"], name: str) -> s.PrecisionSpec: ...
    @overload
    def get(self, kind: Literal["sharding-planner"], name: str) -> s.ShardingPlannerSpec: ...
    @overload
    def get(self, kind: Literal["data-sharding"], name: str) -> s.DataShardingSpec: ...
    @overload
    def get(self, kind: Literal["tracker"], name: str) -> s.TrackerSpec: ...
    @overload
    def get(self, kind: Literal["checkpoint-format"], name: str) -> s.CheckpointFormatSpec: ...
    @overload
    def get(self, kind: Literal["launcher"], name: str) -> s.LauncherSpec: ...
    @overload
    def get(self, kind: Literal["command"], name: str) -> s.CommandSpec: ...
    @overload
    def get(self, kind: str, name: str) -> Any: ...
    # fmt: on
    def get(self, kind: str, name: str) -> Any:
        """A spec by name or alias.

        Raises:
            PluginNotFoundError: If nothing of that name is installed; says what there is, and what to install if it is known.
            PluginError: If its plugin is broken or disabled, or the name is offered twice.
        """
        spec = self._specs[kind].get(name)
        return spec if spec is not None else self._lookup(kind, name).spec

    def provider(self, kind: str, name: str) -> PluginRecord:
        """The plugin that offers a spec, usable or not.

        Raises:
            PluginNotFoundError: If there is none.
            PluginError: If there is more than one.
        """
        if (kind, name) in self._names.conflicts:
            raise PluginError(self._names.conflicts[kind, name])
        offer = self._names.offers.get((kind, name))
        return self._names.records[(offer or self._lookup(kind, name)).owner]

    def installable(self, kind: str) -> list[str]:
        """Commands that install the first-party plugins of a kind that aren't installed, the one to try first leading."""
        installed = {canonical(record.distribution) for record in self.records}
        return [
            known.install_command
            for known in known_plugins().values()
            if known.install_command and kind in known.specs and known.distribution not in installed
        ]

    # -- options and exported names ----------------------------------------------------------------------------------------

    def accepts(self) -> Mapping[str, tuple[str, str]]:
        """Constructor keywords of the Accelerator that specs take, each with the kind and name of its spec."""
        return self._accepts

    def accepted_by(self, keyword: str) -> tuple[str, AnySpec]:
        """The kind and spec that take a constructor keyword.

        Raises:
            TypeError: If no plugin knows it.
            PluginNotFoundError: If a plugin that isn't installed would take it.
            PluginError: If the plugin is broken, or two offer the keyword.
        """
        try:
            offer = self._lookup(ACCEPT, keyword)
        except PluginNotFoundError:
            if find_known(ACCEPT, keyword) is None:
                raise TypeError(f"got an unexpected keyword argument {keyword!r}") from None
            raise
        return offer.kind, offer.spec

    def exports(self) -> Mapping[str, tuple[str, str]]:
        """Names that ``drivetrain`` and ``drivetrain.utils`` resolve through specs, each with the kind and name of its spec."""
        return self._exports

    def export(self, name: str) -> Any:
        """The object behind an exported name.

        Raises:
            AttributeError: If no plugin knows the name.
            PluginNotFoundError: If a plugin that isn't installed would export it.
            PluginError: If the plugin is broken, two offer the name, or the object can't be imported.
        """
        try:
            offer = self._lookup(EXPORT, name)
        except PluginNotFoundError as error:
            if find_known(EXPORT, name) is None:
                raise AttributeError(f"module 'drivetrain' has no attribute {name!r}") from None
            raise MissingExportError(str(error)) from None
        target = export_target(offer.spec, name)
        assert target is not None
        return self.load(offer.kind, offer.spec.name, target)

    def load(self, kind: str, name: str, target: str | None = None) -> Any:
        """Import what a spec names.

        Args:
            kind: Kind of the spec.
            name: Its name.
            target: What to import for it; None for its ``target``.

        Raises:
            PluginError: If it can't be imported, naming the plugin.
        """
        spec = self.get(kind, name)
        target = target or spec.target
        try:
            return load_target(target)
        except DrivetrainError:
            raise
        except Exception as error:
            record = self.provider(kind, name)
            raise PluginError(
                f"{kind} {name!r} of {record.label} can't be loaded: importing {target!r} raised {type(error).__name__}: {error}"
            ) from error

    def spec_of_options(self, options: object) -> tuple[str, AnySpec] | None:
        """The kind and spec whose options class an object is an instance of; None if there is none.

        Raises:
            ConfigurationError: If several specs share that class: then only a name can choose one of them.
        """
        found: dict[type, list[tuple[str, AnySpec]]] = {}
        for kind, specs in self._specs.items():
            for spec in specs.values():
                cls = _imported(spec.options)
                if cls is not None and isinstance(options, cls):
                    found.setdefault(cls, []).append((kind, spec))
        if not found:
            return None
        nearest = max(found, key=lambda cls: len(cls.__mro__))
        if len(found[nearest]) > 1:
            names = ", ".join(f"{kind} {spec.name!r}" for kind, spec in found[nearest])
            raise ConfigurationError(
                f"{nearest.__name__} holds options of several specs: {names}. Choose one by its name."
            )
        return found[nearest][0]

    # -- hooks -------------------------------------------------------------------------------------------------------------

    def detect_backends(self, request: Request) -> list[Detection]:
        """Ask all plugins which backends apply.

        A plugin whose hook raises, or speaks for a backend that it doesn't offer, is warned about and not heard.

        Returns:
            Detections of usable backends, sorted by plugin and then in the plugin's order.
        """
        detections = []
        owners = {name: self.provider("backend", name).name for name in self._specs["backend"]}
        for plugin, answer in self._manager.detect_backends(request):
            if isinstance(answer, Exception):
                problem = f"failed to detect backends: {type(answer).__name__}: {answer}"
                self._warn_rank_0(f"{self.plugin(plugin).label} {problem}. Its backends can still be chosen by name.")
                continue
            for detection in answer:
                if owners.get(detection.name) == plugin:
                    detections.append(detection)
                elif not self._offered_by(plugin, detection.name):
                    label = self.plugin(plugin).label
                    self._warn_rank_0(
                        f"{label} detected the backend {detection.name!r}, which isn't its own; left out."
                    )
        return detections

    def notify(self, event: str, **arguments: Any) -> None:
        """Tell the plugins about an event. Costs next to nothing if none listens.

        Args:
            event: Name of an event hook, such as "drivetrain_before_save".
            **arguments: The hook's arguments.

        Raises:
            DrivetrainError: As raised by a plugin.
            PluginError: If a plugin raises anything else, naming it.
        """
        if event not in self._listened:
            assert event in self._manager.events, f"{event} is not an event hook"
            return
        try:
            self._manager.notify(event, arguments)
        except DrivetrainError:
            raise
        except Exception as error:
            name = self._manager.culprit(event, error.__traceback__)
            label = self.plugin(name).label if name else "a plugin"
            raise PluginError(f"{label} failed in {event}: {type(error).__name__}: {error}") from error

    # -- inside ------------------------------------------------------------------------------------------------------------

    def _usable(self, kind: str) -> Mapping[str, AnySpec]:
        offers = (
            offer for (space, name), offer in self._names.offers.items() if (space, name) == (kind, offer.spec.name)
        )
        return MappingProxyType(
            {o.spec.name: o.spec for o in sorted(offers, key=lambda o: o.spec.name) if self._names.problem(o) is None}
        )

    def _offered(self, space: str) -> Mapping[str, tuple[str, str]]:
        return MappingProxyType(
            {
                name: (offer.kind, offer.spec.name)
                for (where, name), offer in sorted(self._names.offers.items(), key=lambda item: item[0])
                if where == space and (where, name) not in self._names.conflicts and self._names.problem(offer) is None
            }
        )

    def _offered_by(self, plugin: str, backend: str) -> bool:
        return any(
            r.name == plugin and any(isinstance(spec, s.BackendSpec) and spec.name == backend for spec in r.specs)
            for r in self.records
        )

    def _lookup(self, space: str, name: str) -> Offer:
        """The usable offer of a name, or the error that says why there is none."""
        if (space, name) in self._names.conflicts:
            raise PluginError(self._names.conflicts[space, name])
        offer = self._names.offers.get((space, name))
        if offer is not None:
            record, problem = self._names.records[offer.owner], self._names.problem(offer)
            if problem is None:
                return offer
            self._raise_broken(space, name, record, problem)
        known = find_known(space, name)
        # What a broken plugin would offer isn't known: its own name, or what it is known for, stands for it.
        names = {name if space in KINDS else None, known.name if known is not None else None}
        for record in self.records:
            if record.status is not Status.OK and record.name in names:
                self._raise_broken(space, name, record, record.reason)
        broken = [record.name for record in self.records if record.broken and not record.specs]
        raise _not_found(space, name, self._visible(space), known, broken)

    def _visible(self, space: str) -> list[str]:
        return list(self._specs.get(space) or {ACCEPT: self._accepts, EXPORT: self._exports}.get(space) or ())

    def _raise_broken(self, space: str, name: str, record: PluginRecord, problem: str) -> NoReturn:
        status = "" if record.loaded else f" has status {str(record.status)!r}"
        space, _ = _WORDS.get(space, (space, ""))
        raise PluginError(
            f"{space} {name!r} can't be used: {record.label}{status}: {problem}. "
            f"Run `drivetrain plugins show {record.name}` for more."
        ) from record.cause

    def _warn_rank_0(self, message: str) -> None:
        if self._environ.get("RANK", "0") == "0":
            warnings.warn(message, stacklevel=4)


#: How messages speak of the spaces that aren't kinds of specs.
_WORDS = {EXPORT: ("name", "available"), ACCEPT: ("keyword", "available")}


def _not_found(
    space: str, name: str, there: list[str], known: KnownPlugin | None, broken: list[str] | None = None
) -> PluginNotFoundError:
    space, state = _WORDS.get(space, (space, "installed"))
    if known is not None:
        return PluginNotFoundError(f"{space} {name!r} isn't {state}. {known.remedy}")
    listed = f" There are: {', '.join(there)}." if there else ""
    maybe = f" What these broken plugins offer isn't known: {', '.join(broken)}." if broken else ""
    return PluginNotFoundError(f"There is no {space} {name!r}.{nearest_clause(name, there)}{listed}{maybe}")


def _imported(target: str | None) -> type | None:
    """The class that a target names, if its module was imported: an object of it can't exist otherwise."""
    if target is None:
        return None
    module, _, attribute = target.partition(":")
    value: Any = sys.modules.get(module)
    for part in attribute.split("."):
        value = getattr(value, part, None)
    return value if isinstance(value, type) else None
