"""What is known about each plugin, and the table of spec kinds."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from drivetrain.specs import (
    AnySpec,
    BackendSpec,
    CheckpointFormatSpec,
    ClusterSpec,
    CommandSpec,
    DataShardingSpec,
    DeviceSpec,
    LauncherSpec,
    PrecisionSpec,
    ShardingPlannerSpec,
    TrackerSpec,
)

__all__ = ["KINDS", "PluginRecord", "Status", "canonical", "kind_of", "register_hook"]

#: The kinds of specs, in the order of listings, and their classes.
KINDS: Mapping[str, type[AnySpec]] = {
    "backend": BackendSpec,
    "device": DeviceSpec,
    "cluster": ClusterSpec,
    "precision": PrecisionSpec,
    "sharding-planner": ShardingPlannerSpec,
    "data-sharding": DataShardingSpec,
    "tracker": TrackerSpec,
    "checkpoint-format": CheckpointFormatSpec,
    "launcher": LauncherSpec,
    "command": CommandSpec,
}

_KIND_OF_CLASS = {cls: kind for kind, cls in KINDS.items()}


def register_hook(kind: str) -> str:
    """Name of the hook that offers specs of a kind.

    Example:
        >>> register_hook("data-sharding")
        'drivetrain_register_data_shardings'
    """
    return f"drivetrain_register_{kind.replace('-', '_')}s"


def kind_of(spec: AnySpec) -> str:
    """The kind of a spec.

    Example:
        >>> kind_of(TrackerSpec(name="toy"))
        'tracker'
    """
    return next(_KIND_OF_CLASS[cls] for cls in type(spec).__mro__ if cls in _KIND_OF_CLASS)


def canonical(name: str) -> str:
    """A distribution's or plugin's name as it is compared: case and the kind of separator don't matter.

    Example:
        >>> canonical("Drivetrain_DDP") == canonical("drivetrain-ddp")
        True
    """
    return name.lower().replace("_", "-").replace(".", "-")


class Status(str, enum.Enum):
    """How a plugin fared at discovery.

    Example:
        >>> str(Status.MISSING_REQUIREMENT)
        'missing-requirement'
    """

    #: Loaded; what it offers can be used.
    OK = "ok"
    #: Switched off by an environment variable; not imported.
    DISABLED = "disabled"
    #: Something that it needs isn't installed, or not in the right version.
    MISSING_REQUIREMENT = "missing-requirement"
    #: It raised, or doesn't keep to the hookspecs.
    FAILED = "failed"
    #: Written for another plugin API.
    WRONG_API = "wrong-api"
    #: It offers a name that is another plugin's too. Its other names work.
    CONFLICT = "conflict"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginRecord:
    """One plugin as it was found at discovery.

    Args:
        name: The entry point's name.
        status: How it fared.
        distribution: Name of the distribution that installed it.
        version: That distribution's version.
        location: File of its module, or the nearest that is known.
        module: What the entry point names.
        api: Its ``DRIVETRAIN_API``, None if it wasn't read or isn't a number.
        specs: All that it offers, usable or not.
        problems: Why single specs can't be used, by (kind, name).
        notes: What is odd, but stops nothing.
        reason: Why the status isn't "ok"; "" when it is.
        cause: The exception behind the reason, if there is one.

    Example:
        >>> record = PluginRecord(name="toy", distribution="toy-plugin", version="1.0")
        >>> record.label
        "plugin 'toy' (toy-plugin 1.0)"
        >>> record.broken
        False
    """

    name: str
    status: Status = Status.OK
    distribution: str = ""
    version: str = ""
    location: str = ""
    module: str = ""
    api: int | None = None
    specs: tuple[AnySpec, ...] = ()
    problems: Mapping[tuple[str, str], str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    reason: str = ""
    cause: BaseException | None = None

    @property
    def label(self) -> str:
        """The plugin with distribution and version, for messages."""
        distribution = f"{self.distribution} {self.version}".strip()
        return f"plugin {self.name!r} ({distribution or 'no distribution'})"

    @property
    def broken(self) -> bool:
        """Whether the user should hear about it: neither fine nor switched off on purpose."""
        return self.status not in (Status.OK, Status.DISABLED)

    @property
    def loaded(self) -> bool:
        """Whether its specs without problems can be used."""
        return self.status in (Status.OK, Status.CONFLICT)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of specs that it offers, in the order of `KINDS`."""
        offered = {kind_of(spec) for spec in self.specs}
        return tuple(kind for kind in KINDS if kind in offered)
