"""Each promise of DeviceConformance is shown to be checked: a device that breaks it fails the test of that promise."""

import dataclasses

import pytest
import torch

from drivetrain.interfaces import Device
from drivetrain.specs import DeviceSpec
from drivetrain.testing.device import DeviceConformance

SPEC = DeviceSpec(name="chip", torch_type="cpu", communication_backend="gloo")
MEBIBYTE = 2**20


class Chip(Device):
    """A chip with a generator and a memory of its own, over the CPU: of one element, `torch.zeros(1)`, each."""

    def __init__(self, spec):
        super().__init__(spec)
        self.used = 0

    def is_available(self):
        return True

    def count(self):
        return 1

    def torch_device(self, local_rank):
        return torch.device("cpu")

    def rng_state(self):
        return {"cpu": torch.get_rng_state()}

    def set_rng_state(self, state):
        if "cpu" in state:
            torch.set_rng_state(state["cpu"])

    def memory_stats(self):
        self.used += MEBIBYTE  # as if everything asked for it
        return {"allocated": self.used, "total": 2**40}


class Kit(DeviceConformance):
    spec = SPEC

    def __init__(self, fault=Chip, **changes):
        self.fault = fault
        self.spec = dataclasses.replace(SPEC, **changes)

    def make_device(self):
        return self.fault(self.spec)


LOCAL = [
    name
    for name in dir(DeviceConformance)
    if name.startswith("test_") and name not in ("test_its_communication_backend", "test_training_equals_the_cpu")
]


@pytest.mark.parametrize("name", LOCAL)
def test_a_good_chip_passes(name):
    getattr(Kit(), name)()


class IsAway(Chip):
    def is_available(self):
        return False


class HasNone(Chip):
    def count(self):
        return 0


class SharesOne(Chip):
    def count(self):
        return 2


class IsAnother(Chip):
    def torch_device(self, local_rank):
        return torch.device("meta")


class NamesADevice(Chip):
    def torch_device(self, local_rank):
        return "cpu"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (IsAway, "is_available"),
        (HasNone, r"count\(\) is 0"),
        (SharesOne, "two local ranks share"),
        (IsAnother, "is meta, not a cpu"),
        (NamesADevice, "is a str"),
    ],
)
def test_placement(fault, message):
    with pytest.raises(AssertionError, match=message):
        Kit(fault).test_it_is_there_and_tensors_go_to_it()


def test_dtypes():
    with pytest.raises(AssertionError, match="float8_e8m0fnu is declared"):
        Kit(dtypes=("float32", "float8_e8m0fnu")).test_declared_dtypes_work()


class SeedsByClock(Chip):
    clock = iter(range(1000))

    def manual_seed(self, seed):
        torch.manual_seed(next(self.clock))


class SeedsAlike(Chip):
    def manual_seed(self, seed):
        torch.manual_seed(0)


@pytest.mark.parametrize(
    ("fault", "message"), [(SeedsByClock, "two sequences of numbers"), (SeedsAlike, "two seeds gave one sequence")]
)
def test_seeds(fault, message):
    with pytest.raises(AssertionError, match=message):
        Kit(fault).test_a_seed_gives_the_same_numbers()


class FloatState(Chip):
    def rng_state(self):
        return {"cpu": torch.get_rng_state().float()}


class LiveState(Chip):
    state = torch.zeros(4, dtype=torch.uint8)

    def rng_state(self):
        return {"cpu": self.state}

    def torch_device(self, local_rank):
        self.state.add_(1)
        return super().torch_device(local_rank)


class RestoresNothing(Chip):
    def set_rng_state(self, state):
        torch.manual_seed(11)


class RefusesUnknownNames(Chip):
    def set_rng_state(self, state):
        assert state.keys() == {"cpu"}, "unknown name"
        super().set_rng_state(state)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (FloatState, "must be a uint8 tensor"),
        (LiveState, "isn't a copy"),
        (RestoresNothing, "didn't bring back"),
        (RefusesUnknownNames, "unknown name"),
    ],
)
def test_random_state(fault, message):
    with pytest.raises(AssertionError, match=message):
        Kit(fault).test_random_state_is_restored()


class CountsNothing(Chip):
    def memory_stats(self):
        return {"allocated": 0}


class CountsBelowZero(Chip):
    def memory_stats(self):
        return {"allocated": -1}


class HasSmallerPeak(Chip):
    def memory_stats(self):
        return {**super().memory_stats(), "peak_allocated": 1}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (CountsNothing, "grew by 0 bytes"),
        (CountsBelowZero, r"memory_stats\(\) is"),
        (HasSmallerPeak, r"memory_stats\(\) is"),
    ],
)
def test_memory(fault, message):
    with pytest.raises(AssertionError, match=message):
        Kit(fault).test_memory_is_counted()


def test_losing_tensors_with_the_cache():
    class Loses(Chip):
        made = []

        def empty_cache(self):
            import gc

            for thing in gc.get_objects():
                if type(thing) is torch.Tensor and thing.shape == (MEBIBYTE // 4,):
                    thing.zero_()

    with pytest.raises(AssertionError):
        Kit(Loses).test_memory_is_counted()


class Deaf(Kit):
    """Two processes aren't refused though nothing connects them; or the wrong numbers come of it."""

    def make_accelerator(self, **kwargs):
        from drivetrain import Accelerator

        return Accelerator(cpu=True, **kwargs)


def test_communication(workers):
    with pytest.raises(AssertionError, match="two processes weren't refused"):
        Deaf(communication_backend="").test_its_communication_backend(workers)
    with pytest.raises(AssertionError, match="nosuch"):
        Deaf(communication_backend="nosuch").test_its_communication_backend(workers)


def test_training(workers):
    class Imprecise(Deaf):
        def make_accelerator(self, **kwargs):
            return super().make_accelerator(mixed_precision="bf16", **kwargs)

    Deaf().test_training_equals_the_cpu(workers, 4)
    with pytest.raises(AssertionError, match="differs from plain PyTorch"):
        Imprecise().test_training_equals_the_cpu(workers, 4)
