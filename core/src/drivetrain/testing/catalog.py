"""A registry made of plugin modules and specs in memory, and a machine that has the devices one says: for tests of what is chosen."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain import specs as s
from drivetrain._engine.availability import Availability, DeviceStatus
from drivetrain._lazy import load_target
from drivetrain.errors import PluginNotFoundError

__all__ = ["MemoryRegistry", "devices"]

_CLASSES = {
    "backend": s.BackendSpec,
    "device": s.DeviceSpec,
    "cluster": s.ClusterSpec,
    "precision": s.PrecisionSpec,
    "sharding-planner": s.ShardingPlannerSpec,
    "data-sharding": s.DataShardingSpec,
    "tracker": s.TrackerSpec,
    "checkpoint-format": s.CheckpointFormatSpec,
    "launcher": s.LauncherSpec,
    "command": s.CommandSpec,
}


@dataclass(frozen=True, slots=True)
class _Provider:
    name: str
    version: str


class MemoryRegistry:
    """What plugin modules and loose specs offer, without entry points.

    Args:
        plugins: Modules (or objects) with hook implementations; with the builtin one first.
        specs: Further specs; they belong to a plugin "test".
        detections: Answers to which backends apply, besides those of the plugins.
        version: The version of every plugin.
        commands: What `installable` returns.

    Example:
        >>> from drivetrain._builtin import plugin
        >>> MemoryRegistry([plugin]).get("precision", "no").name
        'fp32'
    """

    def __init__(
        self,
        plugins: Iterable[Any] = (),
        *,
        specs: Iterable[s.AnySpec] = (),
        detections: Iterable[s.Detection] = (),
        version: str = "1.0",
        commands: Sequence[str] = (),
    ) -> None:
        self._plugins = list(plugins)
        self._detections = list(detections)
        self._version = version
        self._commands = commands
        self._specs: dict[str, dict[str, Any]] = {kind: {} for kind in _CLASSES}
        self._owner: dict[tuple[str, str], str] = {}
        for plugin in self._plugins:
            for kind in _CLASSES:
                hook = getattr(plugin, f"drivetrain_register_{kind.replace('-', '_')}s", None)
                for spec in hook() if hook is not None else ():
                    self._add(kind, spec, plugin.__name__)
        for spec in specs:
            self._add(next(kind for kind, cls in _CLASSES.items() if isinstance(spec, cls)), spec, "test")

    def _add(self, kind: str, spec: Any, owner: str) -> None:
        self._specs[kind][spec.name] = spec
        self._owner[kind, spec.name] = owner

    def specs(self, kind: str) -> Mapping[str, Any]:
        """Specs of a kind, by name."""
        return self._specs[kind]

    def get(self, kind: str, name: str) -> Any:
        """A spec by name or alias."""
        for spec in self._specs[kind].values():
            if name == spec.name or name in getattr(spec, "aliases", ()):
                return spec
        raise PluginNotFoundError(f"There is no {kind} {name!r}.")

    def provider(self, kind: str, name: str) -> _Provider:
        """Who offers a spec."""
        return _Provider(self._owner[kind, name], self._version)

    def load(self, kind: str, name: str, target: str | None = None) -> Any:
        """Import what a spec names."""
        return load_target(target or self._specs[kind][name].target)

    def accepted_by(self, keyword: str) -> tuple[str, Any]:
        """The kind and spec that take a constructor keyword."""
        for kind, specs in self._specs.items():
            for spec in specs.values():
                if keyword in spec.accepts:
                    return kind, spec
        raise TypeError(f"got an unexpected keyword argument {keyword!r}")

    def spec_of_options(self, options: object) -> tuple[str, Any] | None:
        """The kind and spec whose options class an object is an instance of."""
        for kind, specs in self._specs.items():
            for spec in specs.values():
                # An object of a class exists only once its module was imported.
                module = (spec.options or "").partition(":")[0]
                if module in sys.modules and isinstance(options, load_target(spec.options)):
                    return kind, spec
        return None

    def detect_backends(self, request: s.Request) -> list[s.Detection]:
        """All plugins' answers to which backends apply."""
        found = list(self._detections)
        for plugin in self._plugins:
            hook = getattr(plugin, "drivetrain_detect_backend", None)
            found.extend((hook(request) if hook is not None else None) or ())
        return found

    def installable(self, kind: str) -> Sequence[str]:
        """Install commands of plugins that aren't there."""
        return self._commands


class _Machine:
    def __init__(self, counts: Mapping[str, int], discovered: tuple[s.DeviceSpec, ...]) -> None:
        self._counts = counts
        self._discovered = discovered
        self.asked: list[str] = []

    def status(self, spec: s.DeviceSpec) -> DeviceStatus:
        self.asked.append(spec.name)
        count = self._counts.get(spec.name, 0)
        return DeviceStatus(count > 0, count, f"{count} found" if count else "not on this machine")

    def discover(self, known: Collection[str]) -> tuple[s.DeviceSpec, ...]:
        return tuple(spec for spec in self._discovered if spec.torch_type not in known)


def devices(registry: MemoryRegistry, *discovered: s.DeviceSpec, **counts: int) -> Availability:
    """A machine with these devices, and a CPU.

    Args:
        registry: What is installed.
        *discovered: Devices that torch reports and nothing registers.
        **counts: Number of devices by name.

    Example:
        >>> from drivetrain._builtin import plugin
        >>> devices(MemoryRegistry([plugin]), cuda=2).status("cuda").count
        2
    """
    return Availability(registry.specs("device").values(), _Machine({"cpu": 1, **counts}, discovered))
