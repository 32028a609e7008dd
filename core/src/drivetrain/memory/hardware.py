"""What devices have: memory, arithmetic, bandwidth, links. A data file knows common accelerators. Nothing here imports torch."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from drivetrain.errors import ConfigurationError

__all__ = ["Hardware", "known_accelerators", "known_hardware", "match_accelerator", "parse_bytes"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def parse_bytes(text: str | int | float) -> int:
    """A number of bytes written for people; GB is 10^9, GiB is 2^30.

    Raises:
        ConfigurationError: If it is none.

    Example:
        >>> parse_bytes("80GB"), parse_bytes("1.5GiB"), parse_bytes(7)
        (80000000000, 1610612736, 7)
    """
    if isinstance(text, int | float):
        return int(text)
    match = re.fullmatch(r"\s*([\d.]+(?:[eE]\d+)?)\s*([KMGT]?I?)B?\s*", text.strip(), re.IGNORECASE)
    try:
        return int(float(match[1]) * _UNITS[match[2].upper()])  # type: ignore[index]
    except (TypeError, ValueError, KeyError):
        raise ConfigurationError(f"{text!r} is no number of bytes. Write 80GB, 1.5GiB or 4e9.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The devices of a job, all alike.

    Args:
        name: What they are.
        memory: Bytes of memory per device.
        flops: Floating-point operations per second of matrix products, by dtype ("float32", "bfloat16", "float16").
        memory_bandwidth: Bytes per second that one device reads or writes in its memory.
        link_bandwidth: Bytes per second that one device sends to others of its machine.
        network_bandwidth: Bytes per second that one device sends to other machines.
        host_bandwidth: Bytes per second between one device and the CPU's memory.
        host_memory: Bytes of the CPU's memory per device; None: not known, and not looked at.
        devices: Number of devices in all.
        devices_per_machine: Number of devices of one machine.
        device: Name of the device's kind in torch ("cuda", "cpu", "xla").
        efficiency: Share of ``flops`` that a training reaches.
        latency: Seconds that a collective takes whatever it sends.
        launch: Seconds that an operation takes whatever it computes, Python's part included.
        gather_factor, scatter_factor: How much longer a byte takes in a gather, or in a reduction of which each device gets its part, than in an all-reduce.
            Rings make them alike; gloo's are not.
        source: Where the figures come from.

    Example:
        >>> known_hardware("a100-80gb", devices=16).machines
        2
    """

    name: str
    memory: int
    flops: Mapping[str, float] = field(default_factory=dict)
    memory_bandwidth: float = 1e11
    link_bandwidth: float = 1e10
    network_bandwidth: float = 2.5e10
    host_bandwidth: float = 2.5e10
    host_memory: int | None = None
    devices: int = 1
    devices_per_machine: int = 8
    device: str = "cuda"
    efficiency: float = 0.5
    latency: float = 3e-5
    launch: float = 8e-6
    gather_factor: float = 1.0
    scatter_factor: float = 1.0
    source: str = ""

    @property
    def machines(self) -> int:
        """Number of machines."""
        return -(-self.devices // self.devices_per_machine)

    @property
    def overlaps(self) -> bool:
        """Whether devices communicate while they compute. CPUs have one set of cores for both."""
        return self.device != "cpu"

    @property
    def staging(self) -> float:
        """Copies of what a reduction gets that the communication backend makes. CPUs' one, gloo, makes one."""
        return 1.0 if self.device == "cpu" else 0.0

    @property
    def steps_at_once(self) -> bool:
        """Whether optimizers work on all parameters at once by default, with temporaries for all of them."""
        return self.device != "cpu"

    def flops_of(self, itemsize: int) -> float:
        """Floating-point operations per second that a training reaches in a dtype of so many bytes."""
        names = ("float32",) if itemsize >= 4 else ("bfloat16", "float16", "float32")
        found = next((self.flops[n] for n in names if n in self.flops), 1e12)
        return found * self.efficiency

    def bandwidth(self, processes: int, *, apart: int = 1) -> float:
        """Bytes per second that a device sends in a collective, as rings over all links of a machine reach.

        Args:
            processes: Devices that take part.
            apart: Distance from one to the next: 1 for neighbours, the number of shards for replicas.

        Example:
            >>> devices = known_hardware("a100-80gb", devices=16)
            >>> devices.bandwidth(8), devices.bandwidth(16), devices.bandwidth(2, apart=8)
            (300000000000, 200000000000, 25000000000)
        """
        if processes * apart <= self.devices_per_machine:
            return self.link_bandwidth
        beside = max(1, self.devices_per_machine // apart)  # of one machine, each with its own way out
        return min(self.link_bandwidth, self.network_bandwidth * beside)

    def with_devices(self, devices: int, per_machine: int | None = None) -> Hardware:
        """The same hardware, so many devices of it."""
        return replace(
            self, devices=devices, devices_per_machine=per_machine or min(self.devices_per_machine, max(devices, 1))
        )


@functools.cache
def known_accelerators() -> Mapping[str, Mapping[str, Any]]:
    """What the data file knows, by name.

    Example:
        >>> known_accelerators()["h100-sxm"]["memory"]
        80000000000
    """
    text = files("drivetrain.memory").joinpath("accelerators.json").read_text(encoding="utf-8")
    accelerators: Mapping[str, Mapping[str, Any]] = json.loads(text)["accelerators"]
    return accelerators


def known_hardware(name: str, *, devices: int = 1, per_machine: int | None = None) -> Hardware:
    """Hardware out of the data file.

    Args:
        name: A name of `known_accelerators`.
        devices: Number of devices in all.
        per_machine: Number of devices of one machine; None: as the data file says.

    Raises:
        ConfigurationError: If the data file doesn't know it.

    Example:
        >>> known_hardware("H100-SXM").flops["bfloat16"] > 9e14
        True
    """
    facts = known_accelerators().get(name.lower())
    if facts is None:
        raise ConfigurationError(
            f"No accelerator is called {name!r}. Known: {', '.join(sorted(known_accelerators()))}. For another one say --device-memory."
        )
    fields = {k: v for k, v in facts.items() if k != "matches"}
    fields["source"] = f"data file: {fields['source']}"
    hardware = Hardware(name=name.lower(), **fields)
    return hardware.with_devices(devices, per_machine)


def match_accelerator(device_name: str, memory: int) -> str | None:
    """Name in the data file of a device that calls itself so, if there is one.

    Args:
        device_name: What the driver says, "NVIDIA H100 80GB HBM3".
        memory: Bytes of memory that it has.

    Example:
        >>> match_accelerator("NVIDIA A100-SXM4-80GB", 85_000_000_000), match_accelerator("NVIDIA H100 PCIe", 85_000_000_000)
        ('a100-80gb', 'h100-pcie')
    """
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    fitting = [
        (-len(pattern.split()), abs(facts["memory"] - memory), name)
        for name, facts in known_accelerators().items()
        for pattern in facts["matches"]
        if words >= set(pattern.split())
    ]
    return min(fitting)[2] if fitting else None
