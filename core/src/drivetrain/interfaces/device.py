"""A device type as objects use it: the memory, RNG and placement functions behind one `DeviceSpec`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch

from drivetrain.specs import DeviceSpec

__all__ = ["Device", "TorchDevice"]


class Device:
    """What core asks of a device type. A subclass serves a device that differs from torch's module protocol.

    Args:
        spec: The descriptor.
    """

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec

    def is_available(self) -> bool:
        """Whether at least one is usable in this process."""
        raise NotImplementedError

    def count(self) -> int:
        """Number of devices that this process may use."""
        raise NotImplementedError

    def torch_device(self, local_rank: int) -> torch.device:
        """The device of the process with this local rank."""
        raise NotImplementedError

    def activate(self, device: torch.device) -> None:
        """Make ``device`` the current one of this process."""

    def synchronize(self) -> None:
        """Wait until all queued work is done."""

    def empty_cache(self) -> None:
        """Give cached memory back to the driver."""

    def manual_seed(self, seed: int) -> None:
        """Seed the generators of all devices of this type."""

    def rng_state(self) -> dict[str, torch.Tensor]:
        """State of each generator of this type, by name, as uint8 tensors on the CPU; empty if it has none of its own."""
        return {}

    def set_rng_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `rng_state` returned; names that don't exist here are ignored."""

    def memory_stats(self) -> dict[str, int]:
        """Bytes by name ("allocated", "reserved", "peak_allocated", "total"); empty where the device can't tell."""
        return {}


class TorchDevice(Device):
    """Any device that follows torch's module protocol (``torch.cuda``, ``torch.xpu``, ``torch.mps``, ...), and the CPU.

    Example:
        >>> spec = DeviceSpec(name="cpu", torch_type="cpu", communication_backend="gloo", priority=0)
        >>> TorchDevice(spec).torch_device(local_rank=1)
        device(type='cpu')
    """

    def __init__(self, spec: DeviceSpec) -> None:
        super().__init__(spec)
        if spec.module is not None:
            importlib.import_module(spec.module)
        self._is_cpu = spec.torch_type == "cpu"
        self._module: Any = None if self._is_cpu else torch.get_device_module(spec.torch_type)

    def is_available(self) -> bool:  # noqa: D102
        return self._is_cpu or bool(self._module.is_available())

    def count(self) -> int:  # noqa: D102
        return 1 if self._is_cpu else int(self._module.device_count())

    def torch_device(self, local_rank: int) -> torch.device:  # noqa: D102
        if self._is_cpu:
            return torch.device("cpu")
        return torch.device(self.spec.torch_type, local_rank % max(self.count(), 1))

    def activate(self, device: torch.device) -> None:  # noqa: D102
        if not self._is_cpu and hasattr(self._module, "set_device"):
            self._module.set_device(device)

    def synchronize(self) -> None:  # noqa: D102
        if not self._is_cpu:
            self._module.synchronize()

    def empty_cache(self) -> None:  # noqa: D102
        if not self._is_cpu and hasattr(self._module, "empty_cache"):
            self._module.empty_cache()

    def manual_seed(self, seed: int) -> None:  # noqa: D102
        if not self._is_cpu:
            seed_all = getattr(self._module, "manual_seed_all", None) or self._module.manual_seed
            seed_all(seed)

    def rng_state(self) -> dict[str, torch.Tensor]:  # noqa: D102
        if self._is_cpu:
            return {}
        if hasattr(self._module, "get_rng_state_all"):
            return {f"{self.spec.torch_type}:{i}": s for i, s in enumerate(self._module.get_rng_state_all())}
        return {self.spec.torch_type: self._module.get_rng_state()}

    def set_rng_state(self, state: Mapping[str, torch.Tensor]) -> None:  # noqa: D102
        for name, value in state.items():
            kind, _, index = name.partition(":")
            if kind != self.spec.torch_type or (index and int(index) >= self.count()):
                continue
            if index:
                self._module.set_rng_state(value, int(index))
            else:
                self._module.set_rng_state(value)

    def memory_stats(self) -> dict[str, int]:  # noqa: D102
        if self._is_cpu or not hasattr(self._module, "memory_allocated"):
            return {}
        stats = {"allocated": int(self._module.memory_allocated())}
        if hasattr(self._module, "memory_reserved"):
            stats["reserved"] = int(self._module.memory_reserved())
        if hasattr(self._module, "max_memory_allocated"):
            stats["peak_allocated"] = int(self._module.max_memory_allocated())
        return stats
