"""Making, checking, using and ending the job's process group. Nothing here writes an environment variable."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from drivetrain.errors import ConfigurationError, EnvironmentDetectionError
from drivetrain.parallel._frames import exchange
from drivetrain.parallel._groups import members
from drivetrain.specs import ProcessInfo

__all__ = ["ControlGroup", "ProcessGroupHandle", "barrier", "find_free_port", "init_process_group"]

#: torch.distributed with the names that its type stubs leave out.
_torch: Any = dist

#: The store where the processes met last.
_kept: list[Any] = []

#: Backends that serve the CPU and, staged through it or directly, accelerators.
_GENERAL = ("gloo", "mpi", "ucc", "fake")


@dataclass(slots=True)
class ProcessGroupHandle:
    """The job's process group, and whether it is ours to end.

    Args:
        owned: Whether `init_process_group` made it. One that was there before belongs to whoever made it.
        backend: What it communicates with, by device type: ``"cpu:gloo,cuda:nccl"``.
        level: torch.distributed's debug level before the group was made, where that was raised for it.

    Example:
        >>> ProcessGroupHandle(owned=False, backend="cpu:gloo").destroy()
    """

    owned: bool
    backend: str
    level: Any = None

    def destroy(self) -> None:
        """End the group if it is ours. Idempotent."""
        atexit.unregister(self._end)
        if self.owned and dist.is_initialized():
            _let_threads_finish()
            dist.destroy_process_group()
        if self.level is not None:
            _torch.set_debug_level(self.level)
        self.owned, self.level = False, None

    def destroy_at_exit(self) -> ProcessGroupHandle:
        """End the group with the interpreter, for scripts that don't. Returns the handle.

        A gloo thread that is still dropping the last collective's tensors when the interpreter goes away aborts the process, whose work is done.
        """
        atexit.register(self._end)
        return self

    def _end(self) -> None:
        if (
            getattr(sys, "last_value", None) is None
        ):  # after an error, other ranks may be gone, and ending the group could wait for them
            self.destroy()


def _let_threads_finish() -> None:
    """Give the interpreter's lock to threads of gloo that want it to drop tensors.

    Ending a group joins them while holding the lock (torch 2.13): a thread that still wants it then never ends.
    """
    for _ in range(5):
        time.sleep(0.004)


def init_process_group(
    process: ProcessInfo,
    *,
    backend: str | None = None,
    device: torch.device,
    device_backend: str,
    timeout: float | timedelta | None = None,
    init_method: str | None = None,
    debug: bool = False,
) -> ProcessGroupHandle:
    """Make the process group of the job, or take the one that is there. Collective.

    An accelerator's group also gets gloo for the CPU, so that objects and control messages never touch the device: ``"cpu:gloo,cuda:nccl"``.

    Args:
        process: Who this process is.
        backend: torch's name of a communication backend, which replaces ``device_backend``, or a complete list (``"cuda:nccl"`` gives nccl alone).
        device: Where this process computes.
        device_backend: The backend for that kind of device; empty if it has none: then its tensors are sent through the CPU.
        timeout: Seconds (or a timedelta) after which a rendezvous or a collective is given up; None for torch's default.
        init_method: Where to meet (``env://``, ``tcp://host:port``, ``file:///path``); None: where ``process`` says.
        debug: Have torch compare every collective of every rank before it runs, also those of a model's gradients
            (``DebugLevel.DETAIL``): slow, and a mismatch is an error that names it. The level holds until the handle is destroyed.

    Returns:
        A handle; ``handle.destroy()`` ends the group if it was made here.

    Raises:
        EnvironmentDetectionError: If the group that is there has another rank or world size, a variable for the rendezvous is missing,
            or the processes don't find each other.
        ConfigurationError: If torch has no such backend, or the group that is there lacks the backend asked for.

    Example:
        >>> handle = init_process_group(ProcessInfo(), device=torch.device("cpu"), device_backend="gloo")
        >>> handle.owned, handle.backend.split(",")[0]
        (True, 'cpu:gloo')
        >>> handle.destroy()
    """
    if not dist.is_available():
        raise EnvironmentDetectionError(
            f"{process.world_size} processes are asked for, and this build of PyTorch has no torch.distributed. "
            "Install one that has it, or run one process."
        )
    wanted = _backend_string(backend, device, device_backend)
    if dist.is_initialized():
        return _reuse(process, backend, device, timeout, init_method, debug)
    arguments: dict[str, Any] = {"timeout": _as_timedelta(timeout)} if timeout is not None else {}
    method = ""  # nobody to meet: no address is needed
    if process.world_size > 1 or init_method is not None:
        method = _check_rendezvous(init_method or process.rendezvous, process)
    if device.type != "cpu" and device.index is not None and f"{device.type}:" in wanted:
        arguments["device_id"] = device  # collectives without tensors and new groups then know their device
    _check_backend(wanted)
    level = _raise_debug_level() if debug else None
    try:
        store = _meet(method, process, **arguments) if method else _torch.HashStore()
        dist.init_process_group(wanted, rank=process.rank, world_size=process.world_size, store=store, **arguments)
    except RuntimeError as error:
        if level is not None:
            _torch.set_debug_level(level)
        raise EnvironmentDetectionError(
            f"Rank {process.rank} of {process.world_size} couldn't join the others at "
            f"{method or 'its own store'} ({process.reason}): {error}\n"
            "Check that every process was started, with the same address and world size and a rank of its own, and that the "
            "address can be reached from each machine."
        ) from error
    return ProcessGroupHandle(owned=True, backend=dist.get_backend_config(), level=level).destroy_at_exit()


def _meet(method: str, process: ProcessInfo, **timeout: timedelta) -> Any:
    """A store that all processes share, with nothing in it from earlier groups of theirs.

    A launcher's store outlives a group, and so does the one that rank 0 opens, since it is kept: a process that is quick to make the next group would reach
    it shortly before it closes. Processes find the addresses of the group before in a store that isn't empty (torch 2.13), and wait there for each other.
    """
    store, _, _ = next(rendezvous(method, process.rank, process.world_size, **timeout))
    if timeout:
        store.set_timeout(*timeout.values())
    if not _kept:
        atexit.register(_kept.clear)
    _kept[:] = [store]
    number = store.add(f"drivetrain/groups of rank {process.rank}", 1)
    return _torch.PrefixStore(f"drivetrain/group {number}", store)


def _raise_debug_level() -> Any:
    """What torch's variable TORCH_DISTRIBUTED_DEBUG=DETAIL does, without the variable; returns the level before."""
    before = _torch.get_debug_level()
    _torch.set_debug_level(_torch.DebugLevel.DETAIL)
    return before


def _backend_string(backend: str | None, device: torch.device, device_backend: str) -> str:
    name = backend or device_backend or "gloo"
    if ":" in name or device.type == "cpu" or name in _GENERAL:
        return name
    return f"cpu:gloo,{device.type}:{name}"


def _check_backend(wanted: str) -> None:
    for part in wanted.split(","):
        name = part.rpartition(":")[2]
        if not dist.is_backend_available(name):
            raise ConfigurationError(
                f"This build of PyTorch ({torch.__version__}) has no communication backend {name!r} (asked for as {wanted!r}). "
                'Use another with `InitProcessGroupKwargs(backend="gloo")`, or install a build that has it.'
            )


def _check_rendezvous(method: str, process: ProcessInfo) -> str:
    if method.startswith("env://"):
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise EnvironmentDetectionError(
                f"The processes can't meet: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set "
                f"({process.reason}). Start with `drivetrain launch` or torchrun, which set them, or pass "
                '`InitProcessGroupKwargs(init_method="tcp://HOST:PORT")`.'
            )
    return method


def _reuse(
    process: ProcessInfo,
    backend: str | None,
    device: torch.device,
    timeout: float | timedelta | None,
    init_method: str | None,
    debug: bool,
) -> ProcessGroupHandle:
    rank, world = dist.get_rank(), dist.get_world_size()
    if (rank, world) != (process.rank, process.world_size):
        raise EnvironmentDetectionError(
            f"torch's process group says that this is rank {rank} of {world}, but {process.reason} says rank {process.rank} of "
            f"{process.world_size}. Unset the variables, or end the group with `torch.distributed.destroy_process_group()` first."
        )
    config = dist.get_backend_config()
    parts = dict(part.split(":") for part in config.split(","))
    name = (backend or "").rpartition(":")[2]
    if name and name not in parts.values():
        raise ConfigurationError(
            f"backend={backend!r} was asked for, but the process group that is there already uses {config}. "
            "Leave the setting out, or end that group first."
        )
    if device.type not in parts and "cpu" not in parts:
        raise ConfigurationError(
            f"The process group that is there already ({config}) can't send tensors of {device.type}. "
            f'End it first, or make it with `init_process_group("cpu:gloo,{device.type}:...")`.'
        )
    for name, value in (("timeout", timeout), ("init_method", init_method)):
        if value is not None:
            warnings.warn(f"The process group was made before; {name}={value!r} changes nothing.", stacklevel=3)
    if debug and _torch.get_debug_level() != _torch.DebugLevel.DETAIL:
        warnings.warn(
            "The process group was made before without debug, so torch doesn't compare its collectives: "
            "make it with TORCH_DISTRIBUTED_DEBUG=DETAIL, or let Drivetrain make it.",
            stacklevel=3,
        )
    return ProcessGroupHandle(owned=False, backend=config)


def _as_timedelta(timeout: float | timedelta) -> timedelta:
    return timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)


def barrier(*, group: dist.ProcessGroup | None = None, what: str = "wait_for_everyone") -> None:
    """Wait until every rank has come here. One collective on the control device; work queued on accelerators isn't waited for.

    Args:
        group: Process group; None for all ranks.
        what: The name that an error message gives to this call.

    Raises:
        DistributedOperationError: On every rank that waits, if one called something else or is gone; says which.

    Example:
        >>> barrier()
    """
    if members(group)[1] > 1:
        exchange(what, group=group)


class ControlGroup:
    """A gloo group over all ranks for control messages, apart from the training group, so that a background thread may use it.

    It is made at the first `get`, which is collective: every rank must come there at the same point of the program, on the thread that
    trains. After that any one thread may use it.

    Args:
        timeout: Seconds after which a collective on it is given up; None for torch's default.

    Example:
        >>> ControlGroup().get() is None  # one process
        True
    """

    def __init__(self, *, timeout: float | timedelta | None = None) -> None:
        self._timeout = None if timeout is None else _as_timedelta(timeout)
        self._group: dist.ProcessGroup | None = None

    def get(self) -> dist.ProcessGroup | None:
        """The group, or None in a world of one."""
        if self._group is None and members(None)[1] > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout, group_desc="drivetrain-control")
        return self._group

    def destroy(self) -> None:
        """End the group. Idempotent."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def find_free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now. Another process may take it before you do: use it at once.

    Example:
        >>> 0 < find_free_port() < 65536
        True
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
