"""Which devices are there: asked once each, and only those that matter. The probe alone imports torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from drivetrain._lazy import load_target
from drivetrain.specs import DeviceSpec

__all__ = ["Availability", "DeviceStatus", "Probe", "TorchProbe", "detect_devices"]


class DeviceStatus(msgspec.Struct, frozen=True):
    """Whether a kind of device can be used in this process.

    Args:
        available: Whether it can.
        count: How many of them.
        reason: Why not, or what was found; one clause.
    """

    available: bool
    count: int
    reason: str


class Probe(Protocol):
    """Looks at the hardware."""

    def status(self, spec: DeviceSpec) -> DeviceStatus:
        """Whether this kind of device can be used here. Never raises."""
        ...

    def discover(self, known: Collection[str]) -> tuple[DeviceSpec, ...]:
        """Descriptors of accelerators whose torch type isn't among ``known``."""
        ...


class Availability:
    """The devices of this machine. Each is asked once, when it is first needed: ``cpu=True`` initialises no accelerator.

    Args:
        specs: Descriptors; their order doesn't matter.
        probe: Looks at the hardware.
    """

    def __init__(self, specs: Iterable[DeviceSpec], probe: Probe) -> None:
        self._specs = {spec.name: spec for spec in sorted(specs, key=lambda s: (-s.priority, s.name))}
        self._probe = probe
        self._status: dict[str, DeviceStatus] = {}
        self._discovered: dict[str, DeviceSpec] | None = None

    def known(self) -> Mapping[str, DeviceSpec]:
        """Registered devices by name, the highest priority first."""
        return self._specs

    def everything(self) -> Mapping[str, DeviceSpec]:
        """Registered devices and any other that torch reports."""
        if self._discovered is None:
            found = self._probe.discover({spec.torch_type for spec in self._specs.values()})
            self._discovered = {spec.name: spec for spec in found if spec.name not in self._specs}
        specs = [*self._specs.values(), *self._discovered.values()]
        return {spec.name: spec for spec in sorted(specs, key=lambda s: (-s.priority, s.name))}

    def status(self, name: str) -> DeviceStatus:
        """Whether the device of this name can be used here."""
        if name not in self._status:
            self._status[name] = self._probe.status(
                self.everything()[name] if name not in self._specs else self._specs[name]
            )
        return self._status[name]


def detect_devices(device_specs: Iterable[DeviceSpec], probe: Probe | None = None) -> Availability:
    """Which devices can be used in this process.

    Args:
        device_specs: Descriptors.
        probe: Looks at the hardware; default: through torch.

    Example:
        >>> class NoAccelerator:
        ...     def status(self, spec):
        ...         return DeviceStatus(spec.torch_type == "cpu", 1, "")
        ...     def discover(self, known):
        ...         return ()
        >>> cpu = DeviceSpec(name="cpu", torch_type="cpu", communication_backend="gloo", priority=0)
        >>> detect_devices([cpu], NoAccelerator()).status("cpu").available
        True
    """
    return Availability(device_specs, probe or TorchProbe())


class TorchProbe:
    """Asks the device's own class (`drivetrain.interfaces.Device`), and ``torch.accelerator`` for those that have no descriptor."""

    def status(self, spec: DeviceSpec) -> DeviceStatus:
        """Whether this kind of device can be used here. Never raises: what goes wrong is the reason."""
        if spec.module is not None and not _is_importable(spec.module):
            return DeviceStatus(False, 0, f"the module {spec.module} isn't installed")
        if spec.torch_type == "cpu" and spec.target == DeviceSpec.__dataclass_fields__["target"].default:
            return DeviceStatus(True, 1, "always there")
        try:
            device = load_target(spec.target)(spec)
            count = int(device.count()) if device.is_available() else 0
        except (
            Exception
        ) as error:  # drivers and vendors' modules fail in any way; the device is then not there, and this is why
            return DeviceStatus(False, 0, f"{type(error).__name__}: {_first_line(error)}")
        if not count:
            return DeviceStatus(False, 0, "PyTorch finds none")
        return DeviceStatus(True, count, f"{count} found")

    def discover(self, known: Collection[str]) -> tuple[DeviceSpec, ...]:
        """The accelerator that torch reports, unless its type is among ``known``."""
        import torch

        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type in known:
            return ()
        return (
            DeviceSpec(
                name=accelerator.type.replace("_", "-"),
                summary="an accelerator that PyTorch reports",
                torch_type=accelerator.type,
                communication_backend=_default_communication(accelerator.type),
                priority=50,
            ),
        )


def _default_communication(torch_type: str) -> str:
    import torch.distributed as dist

    if not dist.is_available():
        return ""
    try:
        return str(dist.get_default_backend_for_device(torch_type))
    except ValueError:
        return ""


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _first_line(error: Any) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
