"""Random number generators: seeding, states as plain data, and making them equal on all ranks."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from drivetrain.data.ranks import Ranks
from drivetrain.errors import ConfigurationError
from drivetrain.interfaces.device import Device

__all__ = [
    "derive_seed",
    "fork_rng",
    "rng_state",
    "set_rng_state",
    "set_seed",
    "synchronize_rng_state",
    "synchronize_rng_states",
]

_MASK = (1 << 64) - 1


def derive_seed(seed: int, *path: int) -> int:
    """A seed for one of many independent streams: equal arguments give equal seeds, on any machine.

    Args:
        seed: The seed that all streams come from.
        *path: Which stream, for example epoch and batch; non-negative.

    Returns:
        An integer from 0 to 2**63 - 1, mixed by SplitMix64's finalizer (Steele et al. 2014) once for each number.

    Example:
        >>> derive_seed(42, 0, 1) == derive_seed(42, 0, 1), derive_seed(42, 0, 1) == derive_seed(42, 1, 0)
        (True, False)
    """
    x = seed & _MASK
    for number in path:
        x = (x + 0x9E3779B97F4A7C15 * (number + 1)) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x ^= x >> 31
    return x >> 1


def set_seed(
    seed: int, device_specific: bool = False, deterministic: bool = False, *, devices: Iterable[Device] = ()
) -> None:
    """Seed Python, NumPy, torch and every device type that torch knows.

    Args:
        seed: The seed.
        device_specific: Add this process's rank, so that processes draw different numbers. Orders of prepared loaders stay common.
        deterministic: Also let torch use only deterministic algorithms (an operation that has none raises and names itself) and keep
            cuDNN from choosing algorithms by timing. On CUDA set ``CUBLAS_WORKSPACE_CONFIG=:4096:8`` before the process starts.
        devices: Devices with generators of their own that torch doesn't seed.

    Example:
        >>> set_seed(42)
        >>> a = torch.rand(1)
        >>> set_seed(42)
        >>> bool(torch.rand(1) == a)
        True
    """
    if device_specific:
        seed += _process_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    for device in devices:
        device.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True


def _process_rank() -> int:
    """This process's rank; before there is a process group, what a launcher says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def rng_state(*, devices: Iterable[Device] = ()) -> dict[str, Any]:
    """State of all generators of this process as plain data: numbers, strings, lists, and uint8 tensors on the CPU; nothing to pickle.

    Args:
        devices: Devices with generators of their own that torch doesn't know.

    Returns:
        ``{"python": ..., "numpy": ..., "torch": tensor, "devices": {name: tensor}}``.

    Example:
        >>> state = rng_state()
        >>> a = random.random(), np.random.rand(), torch.rand(1).item()
        >>> set_rng_state(state)
        >>> a == (random.random(), np.random.rand(), torch.rand(1).item())
        True
    """
    version, numbers, gauss = random.getstate()
    key = np.random.get_state(legacy=False)
    by_device: dict[str, torch.Tensor] = _torch_device_states()
    for device in devices:
        by_device.update(device.rng_state())
    return {
        "python": [version, list(numbers), gauss],
        "numpy": {
            "bit_generator": key["bit_generator"],
            "state": {name: v.tolist() if isinstance(v, np.ndarray) else int(v) for name, v in key["state"].items()},
            "has_gauss": int(key["has_gauss"]),
            "gauss": float(key["gauss"]),
        },
        "torch": torch.get_rng_state(),
        "devices": by_device,
    }


def set_rng_state(state: Mapping[str, Any], *, devices: Iterable[Device] = ()) -> None:
    """Restore what `rng_state` returned. States of devices that this process doesn't have are left out.

    Args:
        state: The state.
        devices: Devices with generators of their own that torch doesn't know.

    Example:
        >>> set_rng_state(rng_state())
    """
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    saved = state["numpy"]
    inner = {name: np.array(v, dtype=np.uint32) if isinstance(v, list) else v for name, v in saved["state"].items()}
    np.random.set_state({**saved, "state": inner})
    torch.set_rng_state(state["torch"])
    by_device: Mapping[str, torch.Tensor] = state.get("devices", {})
    _set_torch_device_states(by_device)
    for device in devices:
        device.set_rng_state(by_device)


def _accelerator() -> tuple[str, Any] | None:
    """Type and module of the accelerator that torch has here, if its generators can be read."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    module = torch.get_device_module(device.type)
    return (device.type, module) if hasattr(module, "get_rng_state") else None


def _torch_device_states() -> dict[str, torch.Tensor]:
    found = _accelerator()
    if found is None:
        return {}
    kind, module = found
    if hasattr(module, "get_rng_state_all"):
        return {f"{kind}:{i}": s for i, s in enumerate(module.get_rng_state_all())}
    return {kind: module.get_rng_state()}


def _set_torch_device_states(states: Mapping[str, torch.Tensor]) -> None:
    found = _accelerator()
    if found is None:
        return
    kind, module = found
    for name, value in states.items():
        ours, _, index = name.partition(":")
        if ours != kind or (index and int(index) >= module.device_count()):
            continue
        if index:
            module.set_rng_state(value, int(index))
        else:
            module.set_rng_state(value)


@contextlib.contextmanager
def fork_rng(seed: int | None = None, *, devices: Iterable[Device] = ()) -> Iterator[None]:
    """Leave all generators as they were, whatever is drawn inside: evaluation that doesn't change the course of training.

    Args:
        seed: Seed everything with it inside.
        devices: Devices with generators of their own that torch doesn't know.

    Example:
        >>> before = torch.get_rng_state()
        >>> with fork_rng(seed=0):
        ...     _ = torch.rand(3), random.random()
        >>> bool((torch.get_rng_state() == before).all())
        True
    """
    devices = tuple(devices)
    state = rng_state(devices=devices)
    try:
        if seed is not None:
            set_seed(seed, devices=devices)
        yield
    finally:
        set_rng_state(state, devices=devices)


def synchronize_rng_state(
    rng_type: Any = None,
    generator: torch.Generator | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Give all ranks rank 0's state of one generator. A collective operation.

    Args:
        rng_type: "python", "numpy", "torch" (the CPU's), a device type ("cuda", "xpu", ...), or "generator"; members of an enum with these
            values will do.
        generator: For "generator": which one.
        group: The ranks; None for all.

    Raises:
        ConfigurationError: For an unknown type, one that this process doesn't have, or "generator" without one.

    Example:
        >>> synchronize_rng_state("torch")
    """
    kind = str(getattr(rng_type, "value", rng_type))
    read, write = _access(kind, generator)
    ranks = Ranks.of(group)
    if ranks.size > 1:
        state = ranks.broadcast(read() if ranks.index == 0 else None)
        if ranks.index > 0:
            write(state)


def _access(kind: str, generator: torch.Generator | None) -> tuple[Any, Any]:
    if kind == "python":
        return random.getstate, random.setstate
    if kind == "numpy":
        return np.random.get_state, np.random.set_state
    if kind == "torch":
        return torch.get_rng_state, torch.set_rng_state
    if kind == "generator":
        if generator is None:
            raise ConfigurationError("synchronize_rng_state('generator') needs the generator as its second argument.")
        return generator.get_state, generator.set_state
    found = _accelerator()
    if found is None or found[0] != kind:
        here = "" if found is None else f", {found[0]!r}"
        raise ConfigurationError(
            f"There is no generator of type {kind!r} here; use 'python', 'numpy', 'torch'{here} or 'generator'."
        )
    return found[1].get_rng_state, found[1].set_rng_state


def synchronize_rng_states(
    rng_types: Iterable[Any],
    generator: torch.Generator | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """`synchronize_rng_state` for each of several types.

    Example:
        >>> synchronize_rng_states(["python", "torch"])
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator, group=group)
