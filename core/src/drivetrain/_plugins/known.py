"""First-party plugins, installed or not: the data file that lets messages say what to install."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["KnownPlugin", "find_known", "known_plugins"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPlugin:
    """A plugin of this project.

    Args:
        name: Its entry point's name.
        distribution: What installs it.
        extra: Core's extra that installs it, or None.
        available: Whether it was released.
        summary: One line for listings.
        specs: Names of what it offers, by kind.
        exports: Names that ``drivetrain`` and ``drivetrain.utils`` resolve through it.
        accepts: Constructor keywords of the Accelerator that it takes.
        distributed_types: Members of Accelerate's ``DistributedType`` that stand for it.

    Example:
        >>> KnownPlugin(name="ddp", distribution="drivetrain-ddp", extra="ddp", available=True).remedy
        'Install it: pip install "drivetrain[ddp]"'
    """

    name: str
    distribution: str
    extra: str | None = None
    available: bool = False
    summary: str = ""
    specs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    exports: tuple[str, ...] = ()
    accepts: tuple[str, ...] = ()
    distributed_types: tuple[str, ...] = ()

    @property
    def install_command(self) -> str | None:
        """The shell command that installs it; None as long as it isn't released."""
        if not self.available:
            return None
        return f'pip install "drivetrain[{self.extra}]"' if self.extra else f"pip install {self.distribution}"

    @property
    def remedy(self) -> str:
        """What to do about its absence, as a clause."""
        if self.install_command is None:
            return f"It belongs to {self.distribution}, which isn't released yet."
        return f"Install it: {self.install_command}"


@functools.cache
def known_plugins() -> Mapping[str, KnownPlugin]:
    """All first-party plugins by name.

    Example:
        >>> known_plugins()["ddp"].specs
        {'backend': ('ddp',), 'sharding-planner': ('ddp',)}
    """
    import json

    entries = json.loads(Path(__file__).with_name("known_plugins.json").read_text(encoding="utf-8"))
    return {
        name: KnownPlugin(
            name=name,
            distribution=entry["distribution"],
            extra=entry["extra"],
            available=entry["available"],
            summary=entry["summary"],
            specs={kind: tuple(names) for kind, names in entry["specs"].items()},
            exports=tuple(entry["exports"]),
            accepts=tuple(entry["accepts"]),
            distributed_types=tuple(entry["distributed_types"]),
        )
        for name, entry in entries.items()
    }


def find_known(space: str, name: str) -> KnownPlugin | None:
    """The first-party plugin that a name belongs to.

    Args:
        space: A kind of spec, or "export", "accept" or "plugin".
        name: What is looked for.

    Example:
        >>> find_known("backend", "ddp").distribution
        'drivetrain-ddp'
        >>> find_known("backend", "dpp") is None
        True
    """
    for plugin in known_plugins().values():
        names = {"plugin": (plugin.name,), "export": plugin.exports, "accept": plugin.accepts}.get(space)
        if name in (plugin.specs.get(space, ()) if names is None else names):
            return plugin
    return None
