"""Rank information and process control without an Accelerator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from drivetrain._lazy import load_target
from drivetrain.errors import EnvironmentDetectionError
from drivetrain.parallel.distributed_type import DistributedType
from drivetrain.parallel.process import ProcessControl
from drivetrain.parallel.process_group import ProcessGroupHandle, init_process_group
from drivetrain.specs import DeviceSpec, ProcessInfo

__all__ = ["PartialState"]


class PartialState(ProcessControl):
    """Who this process is, where it computes, and control of what runs where.

    Making one joins the job's process group, if the environment speaks of several processes. It is no singleton: each instance is a view of
    the same facts, and all of them are equal.

    Args:
        cpu: Compute on the CPU, whatever accelerators there are.
        backend: Communication backend (see `drivetrain.parallel.process_group.init_process_group`); None for the device's own.
        timeout: Seconds (or a timedelta) after which a collective is given up; None for torch's default.
        init_method: Where processes meet; None: where the environment says.
        debug: Have torch compare every collective of every rank before it runs (slow). None: the variable DRIVETRAIN_DEBUG decides.
        process: Who this process is; None: the environment says it.
        device: Where it computes; None: the best device there is, by local rank.
        device_backend: The communication backend of ``device``; needed with it unless it is the CPU.

    Raises:
        EnvironmentDetectionError: If the environment is half-set or contradicts itself, or the processes don't find each other.

    Example:
        >>> state = PartialState(process=ProcessInfo(), device=torch.device("cpu"))
        >>> state.num_processes, state.distributed_type, state.backend
        (1, <DistributedType.NO>, None)
        >>> state.print("shown once per machine")
        shown once per machine
    """

    def __init__(
        self,
        cpu: bool = False,
        *,
        backend: str | None = None,
        timeout: float | timedelta | None = None,
        init_method: str | None = None,
        debug: bool | None = None,
        process: ProcessInfo | None = None,
        device: torch.device | None = None,
        device_backend: str | None = None,
    ) -> None:
        if process is None:
            process = detect_process(os.environ)
        if device is None:
            spec = _choose_device(cpu or _flag("DRIVETRAIN_CPU"))
            device, device_backend = _place(spec, process), spec.communication_backend
        super().__init__(process, device=device)
        self.debug = _flag("DRIVETRAIN_DEBUG") if debug is None else debug
        self._handle: ProcessGroupHandle | None = None
        if process.world_size > 1 or dist.is_initialized():
            self._handle = init_process_group(
                process,
                backend=backend,
                device=device,
                device_backend=device_backend or "gloo",
                timeout=timeout,
                init_method=init_method,
                debug=self.debug,
            )

    @property
    def initialized(self) -> bool:
        """Whether the process group is there, if this job needs one."""
        return not self.use_distributed or dist.is_initialized()

    @property
    def backend(self) -> str | None:
        """Name of the communication backend for `device`; None without a process group."""
        if self._handle is None:
            return None
        parts = dict(part.split(":") for part in self._handle.backend.split(","))
        return parts.get(self.device.type) or parts.get("cpu")

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together, as far as devices say it."""
        return DistributedType.of_device(self.device.type, self.num_processes)

    @property
    def default_device(self) -> torch.device:
        """The kind of device that PyTorch computes on here when nothing else is asked for."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if accelerator is None else accelerator

    def set_device(self) -> None:
        """Make `device` the current one of its type in this process."""
        if self.device.type != "cpu" and self.device.index is not None:
            torch.get_device_module(self.device).set_device(self.device)

    def destroy_process_group(self, group: dist.ProcessGroup | None = None) -> None:
        """End a process group, or the job's if none is given. Idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group(group)

    def __repr__(self) -> str:
        return (
            f"PartialState(distributed_type={self.distributed_type}, backend={self.backend}, num_processes={self.num_processes}, "
            f"process_index={self.process_index}, local_process_index={self.local_process_index}, device={self.device})"
        )


def detect_process(environ: Mapping[str, str]) -> ProcessInfo:
    """Ask the registered clusters; where none applies, a process group that the script made itself knows rank and world size."""
    clusters = load_target("drivetrain._plugins:get_registry")().specs("cluster").values()
    process: ProcessInfo = load_target("drivetrain._engine.detect:detect_process")(clusters, environ)
    if process.world_size == 1 and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
        return ProcessInfo(
            rank=rank,
            world_size=world,
            local_rank=int(environ.get("LOCAL_RANK", rank)),
            local_world_size=int(environ.get("LOCAL_WORLD_SIZE", world)),
            reason="torch's process group, which was there already",
        )
    return process


def _choose_device(cpu: bool) -> DeviceSpec:
    specs = load_target("drivetrain._plugins:get_registry")().specs("device")
    available = load_target("drivetrain._engine.availability:detect_devices")(specs.values())
    if cpu:
        return available.known()["cpu"]  # type: ignore[no-any-return]
    for name, spec in available.everything().items():  # the highest priority first; the CPU is always there
        if available.status(name).available:
            return spec  # type: ignore[no-any-return]
    raise EnvironmentDetectionError("No device can be used here, not even the CPU: is the builtin plugin disabled?")


def _place(spec: DeviceSpec, process: ProcessInfo) -> torch.device:
    device = load_target(spec.target)(spec)
    place: torch.device = device.torch_device(process.local_rank)
    device.activate(place)
    return place


def _flag(name: str) -> bool:
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")
