"""What was asked for, and what was decided: the input and the output of `drivetrain._engine.resolve`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from drivetrain.config.options import Options
from drivetrain.config.origins import DEFAULT, Origin
from drivetrain.config.secrets import masked
from drivetrain.config.settings import CoreSettings
from drivetrain.errors import ConfigurationError
from drivetrain.specs import (
    BackendSpec,
    CheckpointFormatSpec,
    Detection,
    DeviceSpec,
    PrecisionSpec,
    ProcessInfo,
    Request,
    TrackerSpec,
)

__all__ = ["Arguments", "CatalogView", "Choice", "PreparePlan", "ProviderView", "Rejection", "Row"]

O = TypeVar("O", bound=Options)  # noqa: E741


class ProviderView(Protocol):
    """Who offers a spec."""

    @property
    def name(self) -> str:
        """The plugin's name."""
        ...

    @property
    def version(self) -> str:
        """The version of its distribution."""
        ...


class CatalogView(Protocol):
    """What the resolver asks of the registry."""

    def specs(self, kind: str) -> Mapping[str, Any]:
        """Usable specs of a kind, by name."""
        ...

    def get(self, kind: str, name: str) -> Any:
        """A spec by name or alias; raises a PluginError that says what to do."""
        ...

    def provider(self, kind: str, name: str) -> ProviderView:
        """Who offers a spec."""
        ...

    def accepted_by(self, keyword: str) -> tuple[str, Any]:
        """The kind and spec that take a constructor keyword; raises TypeError or a PluginError if there is none."""
        ...

    def spec_of_options(self, options: object) -> tuple[str, Any] | None:
        """The kind and spec whose options class an object is an instance of."""
        ...

    def load(self, kind: str, name: str, target: str | None = None) -> Any:
        """Import what a spec names; raises a PluginError that names the plugin."""
        ...

    def detect_backends(self, request: Request) -> Iterable[Detection]:
        """All plugins' answers to which backends apply."""
        ...

    def installable(self, kind: str) -> Sequence[str]:
        """Commands that install first-party plugins of this kind which aren't there, the one to try first leading."""
        ...


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """What the user gave to the Accelerator. What isn't given isn't here: equal to the default is not the same as not given.

    Args:
        settings: Core settings by name; ``backend`` may be an options object, ``log_with`` may hold trackers.
        handlers: ``kwargs_handlers``.
        keywords: Other keywords that take options objects (``dataloader_config``, those that plugins accept).
        process: Who this process is, if that is known already (a process group exists): no variables are read for it.
    """

    settings: Mapping[str, Any] = msgspec.field(default_factory=dict)
    handlers: Sequence[object] = ()
    keywords: Mapping[str, object] = msgspec.field(default_factory=dict)
    process: ProcessInfo | None = None

    @classmethod
    def collect(
        cls, *, kwargs_handlers: Sequence[object] | None = None, process: ProcessInfo | None = None, **given: Any
    ) -> Arguments:
        """Sort a constructor's keywords; None means not given.

        Raises:
            ConfigurationError: If ``kwargs_handlers`` is no list.

        Example:
            >>> Arguments.collect(cpu=True, mixed_precision=None, dynamo_plugin="a plugin")
            Arguments(settings={'cpu': True}, handlers=(), keywords={'dynamo_plugin': 'a plugin'}, process=None)
        """
        if kwargs_handlers is not None and not isinstance(kwargs_handlers, list | tuple):
            kind = type(kwargs_handlers).__name__
            raise ConfigurationError(f"kwargs_handlers takes a list of options objects, not a {kind}.")
        core = CoreSettings.hints()
        present = {name: value for name, value in given.items() if value is not None}
        return cls(
            settings={name: value for name, value in present.items() if name in core},
            handlers=tuple(kwargs_handlers or ()),
            keywords={name: value for name, value in present.items() if name not in core},
            process=process,
        )


class Choice(NamedTuple):
    """One thing that was chosen.

    Args:
        kind: "process", "device", "backend", "precision", "tracker", "checkpoint-format".
        name: Its name.
        reason: Why; one clause.
        origin: Where the wish came from; the default where nobody asked.
        plugin: Name of the plugin that offers it; empty for what none does.
        version: The version of that plugin's distribution.
    """

    kind: str
    name: str
    reason: str
    origin: Origin = DEFAULT
    plugin: str = ""
    version: str = ""


class Rejection(NamedTuple):
    """One thing that was not chosen, and why."""

    kind: str
    name: str
    reason: str


class Row(NamedTuple):
    """One line of an explanation.

    Args:
        part: "chosen", "settings", "options", "rejected", "notes".
        name: What it is about.
        value: What was decided; empty for rejections and notes.
        why: Reason, or origin.
    """

    part: str
    name: str
    value: str
    why: str


class PreparePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was decided before an object is made. Equal on all ranks but for `process`.

    Args:
        process: Who this process is.
        device: What it computes on.
        backend: How models live across processes.
        precision: Dtype and scaling.
        trackers: Descriptors of the trackers named in ``log_with``.
        tracker_objects: Trackers that were given as objects.
        checkpoint_format: How checkpoints are stored.
        settings: Core's settings.
        options: Options objects by name of their class: those of chosen specs, and core's where any source says something.
        named_options: Where several options objects of a backend were given, by class and name; the first of them is in ``options``.
        origins: Where each value came from: ``"cpu"``, ``"GradScalerKwargs.init_scale"``.
        choices: What was chosen, and why.
        rejections: What was not chosen, and why.
        notes: Whatever is there but has no effect, or was assumed; a sentence each.
        alternatives: Names of backends that could take the place of one that nobody asked for.
    """

    process: ProcessInfo
    device: DeviceSpec
    backend: BackendSpec
    precision: PrecisionSpec
    trackers: tuple[TrackerSpec, ...]
    tracker_objects: tuple[object, ...] = ()
    checkpoint_format: CheckpointFormatSpec
    settings: CoreSettings
    options: Mapping[str, Any]
    named_options: Mapping[str, Mapping[str, Any]] = {}
    origins: Mapping[str, Origin]
    choices: tuple[Choice, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    notes: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()

    def option(self, cls: type[O]) -> O:
        """The options object of a class; the defaults if no source says anything about it."""
        found = self.options.get(cls.__name__)
        return cls() if found is None else found

    def options_of(self, spec: Any) -> Any:
        """The options object of a chosen spec, None if the spec has none."""
        return None if spec.options is None else self.options.get(class_name(spec.options))

    def named_options_of(self, spec: Any) -> Mapping[str, Any]:
        """The options objects of a chosen spec by name, where several were given."""
        return self.named_options.get(class_name(spec.options or ""), {})

    def rows(self) -> list[Row]:
        """The plan as lines: what was chosen, every setting with its origin, what was rejected, what has no effect. Without secrets."""
        rows = [Row("chosen", c.kind, _with_plugin(c), _because(c)) for c in self.choices]
        for name, value in self.settings.to_dict().items():
            rows.append(Row("settings", name, _text(value, name), str(self.origins.get(name, DEFAULT))))
        for cls, options in sorted(self.options.items()):
            for name, value in _fields(options).items():
                origin = self.origins.get(f"{cls}.{name}", DEFAULT)
                rows.append(Row("options", f"{cls}.{name}", _text(value, name), str(origin)))
        for cls, named in sorted(self.named_options.items()):
            for key, options in list(named.items())[1:]:
                for name, value in options.explicit().items():
                    rows.append(Row("options", f"{cls}[{key!r}].{name}", _text(value, name), "argument"))
        rows.extend(Row("rejected", f"{r.kind} {r.name}", "", r.reason) for r in self.rejections)
        rows.extend(Row("notes", "", "", note) for note in self.notes)
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-like data, without secrets."""
        return {
            "process": {f.name: getattr(self.process, f.name) for f in dataclasses.fields(self.process)},
            "chosen": [{**c._asdict(), "origin": str(c.origin)} for c in self.choices],
            "settings": {
                name: {"value": masked(_plain(value), name), "origin": str(self.origins.get(name, DEFAULT))}
                for name, value in self.settings.to_dict().items()
            },
            "options": {
                cls: {
                    name: {
                        "value": masked(_plain(value), name),
                        "origin": str(self.origins.get(f"{cls}.{name}", DEFAULT)),
                    }
                    for name, value in _fields(options).items()
                }
                for cls, options in sorted(self.options.items())
            },
            "named_options": {
                cls: {
                    key: {name: masked(_plain(value), name) for name, value in _fields(options).items()}
                    for key, options in named.items()
                }
                for cls, named in sorted(self.named_options.items())
            },
            "rejected": [r._asdict() for r in self.rejections],
            "notes": list(self.notes),
        }

    def fingerprint(self) -> dict[str, Any]:
        """What must be equal on every rank: plugins that the plan uses with their versions, settings and options. Plain data."""
        settings = {k: _plain(v) for k, v in self.settings.to_dict().items() if k not in _LOCAL_SETTINGS}
        return {
            "world_size": self.process.world_size,
            "chosen": {
                f"{c.kind} {c.name}": f"{c.plugin} {c.version}".strip() for c in self.choices if c.kind in _USED
            },
            "settings": settings,
            "options": {
                cls: {name: _plain(value) for name, value in _fields(options).items()}
                for cls, options in sorted(self.options.items())
                if cls not in _LOCAL_OPTIONS
            },
            "named options": {
                cls: {key: {name: _plain(value) for name, value in _fields(o).items()} for key, o in named.items()}
                for cls, named in sorted(self.named_options.items())
            },
        }


#: Settings and options in which machines may differ: paths, and what acts on one rank alone.
_LOCAL_SETTINGS = frozenset({"project_dir", "logging_dir", "config_file", "log_with"})
_LOCAL_OPTIONS = frozenset({"ProfileKwargs", "ProjectConfiguration", "TrackingOptions"})
_USED = frozenset({"device", "backend", "precision", "checkpoint-format"})


def class_name(target: str) -> str:
    """Name of the class that a target names.

    Example:
        >>> class_name("toy.options:ToyOptions")
        'ToyOptions'
    """
    return target.rpartition(":")[2]


def _with_plugin(choice: Choice) -> str:
    return f"{choice.name} ({choice.plugin} {choice.version})".replace(" )", ")") if choice.plugin else choice.name


def _because(choice: Choice) -> str:
    return choice.reason if choice.origin == DEFAULT else f"{choice.reason} [{choice.origin}]"


def _fields(options: Any) -> dict[str, Any]:
    if isinstance(options, Options):
        return options.to_dict()
    if dataclasses.is_dataclass(options):
        return {f.name: getattr(options, f.name) for f in dataclasses.fields(options)}
    return dict(vars(options))


def _plain(value: Any) -> Any:
    """JSON-like data that is equal on all ranks: no addresses."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_plain(v)) for v in value)
    if isinstance(value, Options):
        return _plain(value.to_dict())
    owner = value if hasattr(value, "__qualname__") else type(value)
    return f"{owner.__module__}.{owner.__qualname__}"


def _text(value: Any, name: str) -> str:
    plain = masked(_plain(value), name)
    if isinstance(plain, list):
        return ", ".join(str(v) for v in plain) or "none"
    if isinstance(plain, bool):
        return "yes" if plain else "no"
    return "none" if plain is None else str(plain)
