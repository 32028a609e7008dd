"""Conformance of devices: subclass `DeviceConformance` in a test file, say which device, and run pytest.

    class TestToyChip(DeviceConformance):
        spec = TOYCHIP

The plugin must be installed, so that the ranks find it, and the machine must have at least one such device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from drivetrain._lazy import load_target
from drivetrain.errors import DrivetrainError
from drivetrain.interfaces.device import Device
from drivetrain.specs import DeviceSpec
from drivetrain.testing.pytest_plugin import Workers
from drivetrain.testing.training import Case, Result, reference, train

__all__ = ["DeviceConformance"]

_MEBIBYTE = 2**20


def reduce_on(kit: DeviceConformance, backend: str) -> list[float]:
    """On a rank: an all-reduce and a broadcast of the device's tensors through its own communication backend."""
    device = kit.make_device()
    place = device.torch_device(dist.get_rank())
    device.activate(place)
    group = dist.new_group(backend=backend)
    total = torch.full((3,), float(dist.get_rank() + 1), device=place)
    dist.all_reduce(total, group=group)
    first = torch.full((1,), float(dist.get_rank() + 5), device=place)
    dist.broadcast(first, 0, group=group)
    device.synchronize()
    result: list[float] = torch.cat([total, first]).tolist()
    dist.destroy_process_group(group)
    return result


def train_on(kit: DeviceConformance, case: Case) -> Result:
    """On a rank: train on the device."""
    return train(case, kit.make_accelerator)


def try_to_start(kit: DeviceConformance) -> str:
    """On a rank: the message with which an Accelerator is refused; empty if it isn't."""
    try:
        kit.make_accelerator().end_training()
    except DrivetrainError as error:
        return str(error)
    return ""


class DeviceConformance:
    """What every device must do: the promises of `drivetrain.interfaces.Device` and of its descriptor.

    Attributes:
        spec: The device's descriptor.
        world_sizes: Numbers of ranks that train on it.
        arguments: Keyword arguments of every Accelerator besides ``device``.
        tolerance: Largest difference of a training to one on the CPU, relative for values above 1.
        dtype_tolerance: Largest relative error of a matrix product, by dtype.

    Example:
        >>> class TestToyChip(DeviceConformance):
        ...     spec = DeviceSpec(name="toychip", torch_type="cpu", communication_backend="gloo")
        >>> TestToyChip().make_device().torch_device(0)
        device(type='cpu')
    """

    spec: DeviceSpec
    world_sizes: ClassVar[Sequence[int]] = (1, 2)
    arguments: ClassVar[Mapping[str, Any]] = {}
    tolerance: ClassVar[float] = 1e-5
    dtype_tolerance: ClassVar[Mapping[str, float]] = {
        "float64": 1e-9,
        "float32": 1e-3,
        "float16": 1e-2,
        "bfloat16": 5e-2,
    }

    def make_device(self) -> Device:
        """The device's functions."""
        device: Device = load_target(self.spec.target)(self.spec)
        return device

    def make_accelerator(self, **kwargs: Any) -> Any:
        """An Accelerator on the device, made on a rank."""
        from drivetrain import Accelerator

        return Accelerator(**{"device": self.spec.name, **self.arguments, **kwargs})

    # -- what there is ---------------------------------------------------------------------------------------------------------

    def test_it_is_there_and_tensors_go_to_it(self) -> None:
        """At least one is usable; each local rank has a device of the spec's type, which tensors can be made on."""
        device = self.make_device()
        assert device.is_available() is True, "is_available() must be True on a machine that has one"
        count = device.count()
        assert type(count) is int and count >= 1, f"count() is {count!r}, and the device is there"
        for local_rank in range(count):
            place = device.torch_device(local_rank)
            assert isinstance(place, torch.device), f"torch_device({local_rank}) is a {type(place).__name__}"
            assert place.type == self.spec.torch_type, (
                f"torch_device({local_rank}) is {place}, not a {self.spec.torch_type}"
            )
            device.activate(place)
            tensor = torch.arange(4.0, device=place)
            device.synchronize()
            assert (tensor + 1).cpu().tolist() == [1.0, 2.0, 3.0, 4.0]
        assert len({str(device.torch_device(r)) for r in range(count)}) == count, "two local ranks share a device"

    def test_declared_dtypes_work(self) -> None:
        """Products of matrices in each dtype of the spec, by hand and under autocast."""
        device = self.make_device()
        place = device.torch_device(0)
        a, b = torch.linspace(-1, 1, 64).view(8, 8), torch.linspace(2, 3, 64).view(8, 8)
        expected = a @ b
        for name in self.spec.dtypes:
            dtype = getattr(torch, name)
            tolerance = self.dtype_tolerance.get(name, 0.25)
            try:
                product = a.to(place, dtype) @ b.to(place, dtype)
            except RuntimeError as error:
                raise AssertionError(f"{name} is declared, and has no product of matrices: {error}") from error
            assert product.dtype is dtype
            _check_close(product, expected, tolerance, f"the product in {name}")
            if dtype in (torch.float16, torch.bfloat16):
                with torch.autocast(place.type, dtype=dtype):
                    product = a.to(place) @ b.to(place)
                assert product.dtype is dtype, f"autocast to {name} computed in {product.dtype}"
                _check_close(product, expected, tolerance, f"autocast to {name}")

    # -- random numbers --------------------------------------------------------------------------------------------------------

    def _numbers(self, device: Device) -> list[float]:
        numbers: list[float] = torch.rand(8, device=device.torch_device(0)).tolist()
        return numbers

    def test_a_seed_gives_the_same_numbers(self) -> None:
        """``torch.manual_seed`` and ``manual_seed`` together, whatever was drawn before."""
        device = self.make_device()
        drawn = []
        for seed in (3, 4, 3):
            torch.manual_seed(seed)
            device.manual_seed(seed)
            drawn.append(self._numbers(device))
        assert drawn[0] == drawn[2], "one seed gave two sequences of numbers"
        assert drawn[0] != drawn[1], "two seeds gave one sequence of numbers"

    def test_random_state_is_restored(self) -> None:
        """``rng_state`` and ``set_rng_state``, beside those of the CPU; unknown names are ignored."""
        device = self.make_device()
        cpu, state = torch.get_rng_state(), device.rng_state()
        for name, value in state.items():
            assert isinstance(name, str) and value.dtype is torch.uint8 and value.device.type == "cpu", (
                f"rng_state()[{name!r}] must be a uint8 tensor on the CPU, not {value.dtype} on {value.device}"
            )
        copies = {name: value.clone() for name, value in state.items()}
        first = self._numbers(device)
        for name, value in state.items():
            assert torch.equal(value, copies[name]), "rng_state() isn't a copy: drawing numbers changed it"
        second = self._numbers(device)
        torch.set_rng_state(cpu)
        device.set_rng_state(
            {**copies, f"{self.spec.torch_type}:4711": torch.zeros(16, dtype=torch.uint8), "other": cpu}
        )
        assert self._numbers(device) == first, "set_rng_state() didn't bring back the numbers that followed rng_state()"
        assert self._numbers(device) == second

    # -- memory ----------------------------------------------------------------------------------------------------------------

    def test_memory_is_counted(self) -> None:
        """``memory_stats``: bytes as ints; what is allocated is seen, and ``empty_cache`` loses no tensor."""
        device = self.make_device()
        place = device.torch_device(0)
        before = device.memory_stats()
        tensor = torch.ones(_MEBIBYTE // 4, device=place)
        device.synchronize()
        after = device.memory_stats()
        for stats in (before, after):
            assert all(isinstance(k, str) and type(v) is int and v >= 0 for k, v in stats.items()), (
                f"memory_stats() is {stats}"
            )
        if "allocated" in after:
            grown = after["allocated"] - before["allocated"]
            assert grown >= _MEBIBYTE, f"1 MiB was allocated, and memory_stats() grew by {grown} bytes"
            for larger in ("peak_allocated", "total", "reserved"):
                assert after.get(larger, after["allocated"]) >= after["allocated"], f"memory_stats() is {after}"
        device.empty_cache()
        assert float(tensor.sum()) == _MEBIBYTE // 4

    # -- several processes -----------------------------------------------------------------------------------------------------

    def test_its_communication_backend(self, workers: Workers) -> None:
        """All-reduce and broadcast of its tensors; a device without one serves one process, and two are refused."""
        if max(self.world_sizes) < 2:
            return
        if not self.spec.communication_backend:
            assert all(workers(2).run(try_to_start, self)), (
                "without a communication backend, two processes weren't refused"
            )
            return
        results = workers(2).run(reduce_on, self, self.spec.communication_backend)
        assert results == [[3.0, 3.0, 3.0, 5.0]] * 2, f"all-reduce and broadcast gave {results}"

    @pytest.mark.parametrize("accumulation", [1, 4])
    def test_training_equals_the_cpu(self, workers: Workers, accumulation: int) -> None:
        """Losses, norms and weights, at each world size, through whatever backend is chosen."""
        case = Case(accumulation=accumulation)
        for world_size in self.world_sizes:
            expected = reference(case, world_size)
            for rank, result in enumerate(workers(world_size).run(train_on, self, case)):
                difference = result.largest_difference(expected)
                assert difference <= self.tolerance, (
                    f"rank {rank} of {world_size}: the training differs from plain PyTorch on the CPU by {difference:.3g}"
                )


def _check_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, what: str) -> None:
    error = float((ours.cpu().double() - theirs.double()).abs().max() / theirs.double().abs().max())
    assert error <= tolerance, f"{what} has an error of {error:.3g}, and {tolerance:g} is allowed"
