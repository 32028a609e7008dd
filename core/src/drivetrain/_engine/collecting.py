"""Options objects that the user gave, sorted by whose they are; and every options class resolved field by field."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from drivetrain._engine.plan import Arguments, CatalogView, class_name
from drivetrain._lazy import load_target
from drivetrain.config.files import ConfigFile
from drivetrain.config.options import Options, nearest
from drivetrain.config.origins import EXPLICIT, Origin
from drivetrain.config.precedence import check_section, resolve_options
from drivetrain.config.sections import CORE_OPTIONS, OTHER_SECTIONS
from drivetrain.config.settings import CoreSettings, variable
from drivetrain.errors import ConfigurationError
from drivetrain.specs import Capability

__all__ = ["Given", "GivenOptions", "OptionResolver", "Sections", "collect_options"]

#: Kinds of specs whose options a section or variables can set.
_KINDS = (
    "backend",
    "device",
    "precision",
    "sharding-planner",
    "data-sharding",
    "tracker",
    "checkpoint-format",
    "launcher",
    "command",
)


class Given(NamedTuple):
    """One options object that the user gave.

    Args:
        slot: Name of the options class that it stands for (a subclass stands for its parent).
        value: The object.
        said_by: The argument that held it.
        section: Name of its section in files and variables.
        kind: Kind of the spec that it belongs to; empty for core's own.
        name: Name of that spec.
        named: Where a dict of several was given, all of them by name; ``value`` is the first.
    """

    slot: str
    value: Any
    said_by: str
    section: str
    kind: str = ""
    name: str = ""
    named: Mapping[str, Any] = {}


class GivenOptions(msgspec.Struct, frozen=True):
    """All options objects that the user gave, by slot, and what of the other arguments is left.

    Args:
        by_slot: The objects.
        settings: Core settings that were given; options objects and trackers are taken out.
        backend: Name of the backend that is asked for by an options object in ``backend=``; empty if it isn't.
        trackers: Trackers that were given as objects.
    """

    by_slot: Mapping[str, Given] = msgspec.field(default_factory=dict)
    settings: Mapping[str, Any] = msgspec.field(default_factory=dict)
    backend: str = ""
    trackers: tuple[object, ...] = ()

    def requested(self) -> list[Given]:
        """Backend options in a keyword of their own (``accepts``): who writes that keyword asks for the backend."""
        return [
            g for g in self.by_slot.values() if g.kind == "backend" and g.said_by not in ("backend", "kwargs_handlers")
        ]

    def type_names(self) -> frozenset[str]:
        """Names of the given objects' classes and of what they stand for."""
        return frozenset({*self.by_slot, *(type(g.value).__name__ for g in self.by_slot.values())})


def collect_options(arguments: Arguments, registry: CatalogView) -> GivenOptions:
    """Sort the options objects among the arguments by whose they are.

    Raises:
        ConfigurationError: For an object that nobody takes, two for one place, or one in the wrong keyword.
        TypeError: For a keyword that nobody knows.
        PluginError: For a keyword of a plugin that isn't installed or is broken.
    """
    by_slot: dict[str, Given] = {}
    for given in _identify(arguments, registry):
        other = by_slot.get(given.slot)
        if other is not None:
            what = given.slot if type(given.value) is type(other.value) else f"{given.slot} or its subclasses"
            raise ConfigurationError(f"Two {what} were given, in {other.said_by} and in {given.said_by}. Pass one.")
        by_slot[given.slot] = given
    settings, trackers = _split_trackers(dict(arguments.settings))
    backend = ""
    if not _is_name(settings.get("backend", "")):
        del settings["backend"]
        backend = next(g.name for g in by_slot.values() if g.said_by == "backend")
    return GivenOptions(by_slot, settings, backend, trackers)


def _identify(arguments: Arguments, registry: CatalogView) -> Iterator[Given]:
    for handler in arguments.handlers:
        yield _owner(handler, "kwargs_handlers", registry)
    backend = arguments.settings.get("backend")
    if backend is not None and not _is_name(backend):
        given = _owner(backend, "backend", registry, "the name of a backend or the options of one")
        if given.kind != "backend":
            raise ConfigurationError(
                f"backend= takes the name of a backend or the options of one, not a {type(backend).__name__}."
            )
        yield given
    own = {option.keyword: option.class_name for option in CORE_OPTIONS.values() if option.keyword}
    for keyword, value in arguments.keywords.items():
        if keyword in own:
            given = _owner(value, keyword, registry, own[keyword])
            expected, fits = own[keyword], given.slot == own[keyword]
        else:
            kind, spec = _acceptor(keyword, registry, own)
            expected = class_name(spec.options or "")
            named = _named(value, keyword, spec) if isinstance(value, Mapping) else {}
            for other in named.values():
                if class_name(spec.options or "") != _owner(other, keyword, registry, expected).slot:
                    raise ConfigurationError(f"{keyword}= takes a {expected}, not a {type(other).__name__}.")
            given = _owner(next(iter(named.values()), value), keyword, registry, expected)._replace(named=named)
            fits = (given.kind, given.name) == (kind, spec.name)
        if not fits:
            raise ConfigurationError(f"{keyword}= takes a {expected}, not a {type(value).__name__}.")
        yield given


def _named(value: Mapping[str, Any], keyword: str, spec: Any) -> Mapping[str, Any]:
    """The entries of a dict of options, where the spec takes one."""
    if Capability.NAMED_OPTIONS not in getattr(spec, "capabilities", ()):
        raise ConfigurationError(f"{keyword}= takes a {class_name(spec.options or '')}, not a {type(value).__name__}.")
    if not value or not all(isinstance(name, str) for name in value):
        raise ConfigurationError(f"{keyword}= as a dict takes one object or more, with a name for each.")
    return dict(value)


def _acceptor(keyword: str, registry: CatalogView, own: Mapping[str, str]) -> tuple[str, Any]:
    try:
        return registry.accepted_by(keyword)
    except TypeError:
        known = {*own, *CoreSettings.hints(), "kwargs_handlers"}
        hint = nearest(keyword, known)
        hint = hint if "Did you mean" in hint else ""
        raise TypeError(f"Accelerator() got an unexpected keyword argument {keyword!r}.{hint}") from None


def _owner(value: object, said_by: str, registry: CatalogView, expected: str = "") -> Given:
    """Whose options an object is."""
    if isinstance(value, type):
        raise ConfigurationError(
            f"{said_by} holds the class {value.__name__}. Pass an object of it: {value.__name__}()."
        )
    bases = {c.__name__ for c in type(value).__mro__ if c.__module__.split(".")[0] == "drivetrain"}
    for section, option in CORE_OPTIONS.items():
        if option.class_name in bases:
            return Given(option.class_name, value, said_by, section)
    found = registry.spec_of_options(value)
    if found is not None:
        kind, spec = found
        return Given(class_name(spec.options), value, said_by, spec.name, kind, spec.name)
    if expected:
        raise ConfigurationError(
            f"{said_by}= takes a {expected}, not a {type(value).__name__}.".replace("a the", "the")
        )
    known = ", ".join(option.class_name for option in CORE_OPTIONS.values())
    raise ConfigurationError(
        f"{said_by} holds a {type(value).__name__}, which neither core nor an installed plugin takes. Core takes: {known}; "
        "`drivetrain plugins` lists the plugins."
    )


def _is_name(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, enum.Enum) and isinstance(value.value, str))


def _split_trackers(settings: dict[str, Any]) -> tuple[dict[str, Any], tuple[object, ...]]:
    """Trackers among ``log_with`` that are objects, and the settings with the names alone."""
    wanted = settings.get("log_with")
    if wanted is None:
        return settings, ()
    entries = list(wanted) if isinstance(wanted, list | tuple | set | frozenset) else [wanted]
    settings["log_with"] = [entry for entry in entries if _is_name(entry)]
    return settings, tuple(entry for entry in entries if not _is_name(entry))


class OptionResolver:
    """Resolves options classes field by field and gathers the results.

    Args:
        given: What the user gave.
        environ: The environment.
        file: The configuration file.
    """

    def __init__(self, given: GivenOptions, environ: Mapping[str, str], file: ConfigFile) -> None:
        self._given = given
        self._environ = environ
        self._file = file
        self.options: dict[str, Any] = {}
        self.named: dict[str, dict[str, Any]] = {}
        self.origins: dict[str, Origin] = {}

    def core(self) -> None:
        """Resolve those of core's options classes about which any source says something."""
        for section, option in CORE_OPTIONS.items():
            if option.class_name in self._given.by_slot or self._said_outside(section):
                self.add_core(section)

    def add_core(self, section: str) -> None:
        """Resolve one of core's options classes, whether anything is said about it or not."""
        option = CORE_OPTIONS[section]
        given = self._given.by_slot.get(option.class_name)
        self._resolve(option.class_name, section, functools.partial(load_target, option.target), given)

    def spec(self, kind: str, spec: Any, registry: CatalogView) -> None:
        """Resolve the options of a chosen spec; they are the class's defaults where no source says anything."""
        slot = class_name(spec.options or "")
        if spec.options is not None and slot not in self.options:
            given = self._given.by_slot.get(slot)
            self._resolve(slot, spec.name, functools.partial(registry.load, kind, spec.name, spec.options), given)

    def notes(self) -> list[str]:
        """What the resolved options say about values of theirs that change nothing."""
        return [note for options in self.options.values() if isinstance(options, Options) for note in options.notes()]

    def _resolve(self, slot: str, section: str, load: Callable[[], type[Any]], given: Given | None) -> None:
        value = None if given is None else given.value
        cls = load() if given is None else type(given.value)
        if not issubclass(cls, Options):
            # A class of the plugin's own making: only Python can set it.
            self.options[slot] = cls() if given is None else value
            return
        resolve = functools.partial(resolve_options, section=section, environ=self._environ, file=self._file)
        resolved = resolve(cls, given=value)
        self.options[slot] = resolved.value
        if given is not None and given.named:
            others = {name: resolve(type(other), given=other).value for name, other in given.named.items()}
            self.named[slot] = {**others, next(iter(others)): resolved.value}
        for name, origin in resolved.origins.items():
            self.origins[f"{slot}.{name}"] = Origin(origin.source, f"{slot}(...)") if origin == EXPLICIT else origin

    def _said_outside(self, section: str) -> bool:
        """Only then is the class imported. Variables of core that share the prefix (DRIVETRAIN_PROJECT_DIR) are no reason."""
        prefix = variable("", section)
        core = {variable(field) for field in CoreSettings.hints()}
        return bool(self._file.section(section)) or any(
            name.startswith(prefix) and name not in core for name in self._environ
        )


class Sections:
    """What sections of files and prefixes of variables stand for.

    Args:
        registry: What is installed.
    """

    def __init__(self, registry: CatalogView) -> None:
        self._registry = registry
        self._targets: dict[str, list[tuple[str, str, str]]] = {
            name: [("", name, target)]
            for name, target in {**{n: option.target for n, option in CORE_OPTIONS.items()}, **OTHER_SECTIONS}.items()
        }
        for kind in _KINDS:
            for spec in registry.specs(kind).values():
                targets = self._targets.setdefault(spec.name.replace("-", "_"), [])
                if spec.options is not None:
                    targets.append((kind, spec.name, spec.options))

    def names(self) -> Collection[str]:
        """Sections that something installed reads."""
        return self._targets.keys()

    def classes(self, section: str) -> list[type[Options]]:
        """The options classes that a section sets: usually one."""
        found = []
        for kind, name, target in self._targets[section]:
            cls = self._registry.load(kind, name, target) if kind else load_target(target)
            if issubclass(cls, Options) and cls not in found:  # "launch" is a section of core and a command's
                found.append(cls)
        return found

    def fields(self, section: str) -> set[str]:
        """Names of the settings of a section."""
        return {name for cls in self.classes(section) for name in cls.hints()}

    def check(self, file: ConfigFile) -> list[str]:
        """Refuse unknown keys in a file's sections; return sentences about sections that nothing installed reads.

        Raises:
            ConfigurationError: With file, line, key and the nearest match.
        """
        for name in file.sections:
            if name in self._targets:
                check_section(name, self.fields(name), file)
        return list(file.unknown_sections(self.names()))
