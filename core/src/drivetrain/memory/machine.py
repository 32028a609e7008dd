"""The present machine: what its devices are, or else what they do in short measurements."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.memory.hardware import Hardware, known_hardware, match_accelerator

__all__ = ["measure_machine", "present_hardware"]


def present_hardware(device: torch.device, *, devices: int = 1, per_machine: int | None = None) -> Hardware:
    """The device that computes here: out of the data file if that knows it, else measured. Takes well under a second.

    Args:
        device: One of them.
        devices: Number of devices in all.
        per_machine: Number of devices of one machine; None: all.

    Example:
        >>> present_hardware(torch.device("cpu"), devices=2).memory > 0
        True
    """
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        name = match_accelerator(facts.name, facts.total_memory)
        if name is not None:
            found = known_hardware(name, devices=devices, per_machine=per_machine or devices)
            return replace(found, memory=facts.total_memory, host_memory=_host_memory() // (per_machine or devices))
    return measure_machine(device, devices=devices, per_machine=per_machine)


def measure_machine(
    device: torch.device, *, devices: int = 1, per_machine: int | None = None, group: Any = None
) -> Hardware:
    """Measure arithmetic, memory and link of a device. Collective if there is a process group.

    Args:
        device: The device.
        devices: Number of devices in all.
        per_machine: Number of devices of one machine; None: all.
        group: Processes whose link is measured; None: all, if there is a process group.

    Example:
        >>> measure_machine(torch.device("cpu")).flops["float32"] > 1e8
        True
    """
    near = per_machine or devices
    flops = {"float32": _products(device, torch.float32)}
    for dtype in (torch.bfloat16, torch.float16) if device.type != "cpu" else (torch.bfloat16,):
        flops[str(dtype).removeprefix("torch.")] = _products(device, dtype)
    bandwidth = _copies(device)
    link = _link(device, group) if dist.is_initialized() else {"link_bandwidth": bandwidth / 4, "latency": 1e-4}
    memory = _host_memory() // near if device.type == "cpu" else _device_memory(device)
    return Hardware(
        name=f"this machine's {device.type}",
        memory=memory,
        flops=flops,
        memory_bandwidth=bandwidth,
        network_bandwidth=link["link_bandwidth"],
        host_bandwidth=bandwidth if device.type == "cpu" else 2.5e10,
        host_memory=_host_memory() // near,
        devices=devices,
        devices_per_machine=near,
        device=device.type,
        efficiency=0.8,  # of what large products reach here, not of a data sheet's figure
        launch=_launch(device),
        source="measured",
        **link,
    )


def _best(function: Callable[[], Any], device: torch.device, *, times: int = 3) -> float:
    """Seconds of the quickest of a few calls."""

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    function()
    best = float("inf")
    for _ in range(times):
        wait()
        started = time.perf_counter()
        function()
        wait()
        best = min(best, time.perf_counter() - started)
    return max(best, 1e-9)


def _products(device: torch.device, dtype: torch.dtype) -> float:
    size = 256 if device.type == "cpu" else 4096
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    return float(2 * size**3 / _best(lambda: a @ b, device))


def _copies(device: torch.device) -> float:
    source = torch.ones(2**22 if device.type == "cpu" else 2**27, device=device)
    target = torch.empty_like(source)
    return float(2 * source.nbytes / _best(lambda: target.copy_(source), device))


def _launch(device: torch.device) -> float:
    """Seconds per operation of a chain of small ones, forward and backward."""
    number = 20
    weight = torch.ones(1, device=device, requires_grad=True)

    def chain() -> None:
        x = weight
        for _ in range(number):
            x = x * weight
        x.backward()

    return _best(chain, device) / (3 * number)  # a product, and in backward two


def _link(device: torch.device, group: Any) -> dict[str, float]:
    """Bytes per second that one rank sends in an all-reduce, seconds of an empty one, and how the other collectives compare."""
    size = dist.get_world_size(group)
    if size < 2:
        return {"link_bandwidth": 1e10, "latency": 0.0}
    small, large = torch.zeros(1, device=device), torch.zeros(2**20 // size * size, device=device)
    part = torch.zeros(large.numel() // size, device=device)
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(small, group=group),
        lambda: dist.all_reduce(large, group=group),
        lambda: dist.all_gather_into_tensor(large, part, group=group),
        lambda: dist.reduce_scatter_tensor(part, large, group=group),
    ]
    figures = torch.tensor([_best(call, device) for call in calls], dtype=torch.float64, device=device)
    dist.all_reduce(figures, group=group)  # all ranks go on with the same figures
    latency, *times = (float(f) / size for f in figures)
    reduce, gather, scatter = (max(t - latency, 1e-6) for t in times)
    sent = large.nbytes * (size - 1) / size  # by a gather; an all-reduce sends it twice
    return {
        "link_bandwidth": 2 * sent / reduce,
        "latency": latency,
        "gather_factor": 2 * gather / reduce,
        "scatter_factor": 2 * scatter / reduce,
    }


def _device_memory(device: torch.device) -> int:
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    memory = getattr(properties(device), "total_memory", 0) if properties is not None else 0
    return int(memory) or _host_memory()


def _host_memory() -> int:
    import psutil

    return int(psutil.virtual_memory().total)
