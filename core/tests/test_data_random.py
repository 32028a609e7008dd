"""Seeds and generator states."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.data import (
    fork_rng,
    rng_state,
    set_rng_state,
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)
from drivetrain.data.random import derive_seed
from drivetrain.data.seeding import BatchSeeder, batch_seed
from drivetrain.errors import ConfigurationError
from drivetrain.interfaces.device import Device
from drivetrain.specs import DeviceSpec


class OwnGenerator(Device):
    """A device type with a generator that torch doesn't know."""

    def __init__(self):
        super().__init__(DeviceSpec(name="own", torch_type="cpu", communication_backend="gloo"))
        self.generator = torch.Generator()

    def manual_seed(self, seed):
        self.generator.manual_seed(seed)

    def rng_state(self):
        return {"own": self.generator.get_state()}

    def set_rng_state(self, state):
        if "own" in state:
            self.generator.set_state(state["own"])


def draw(device=None):
    numbers = [torch.rand(1).item(), torch.randn(3).tolist(), random.random(), random.gauss(0, 1)]
    numbers += [np.random.rand(), np.random.randn()]
    return [*numbers, *([] if device is None else [torch.rand(1, generator=device.generator).item()])]


def test_set_seed_seeds_everything():
    device = OwnGenerator()
    set_seed(7, devices=[device])
    first = draw(device)
    assert draw(device) != first
    set_seed(7, devices=[device])
    assert draw(device) == first
    set_seed(8)
    assert draw() != first[:-1]
    torch.manual_seed(7)
    expected = torch.rand(1).item()
    assert first[0] == expected


def test_state_is_plain_data_and_complete():
    device = OwnGenerator()
    random.gauss(0, 1), np.random.randn()  # both keep half of a pair
    state = rng_state(devices=[device])
    plain = json.loads(json.dumps({k: v for k, v in state.items() if k not in ("torch", "devices")}))
    tensors = [state["torch"], *state["devices"].values()]
    assert all(t.dtype is torch.uint8 and t.device.type == "cpu" for t in tensors)
    first = draw(device)
    set_rng_state({**state, **plain}, devices=[device])
    assert draw(device) == first


def test_states_of_absent_devices_are_left_out():
    state = rng_state()
    set_rng_state({**state, "devices": {"cuda:7": torch.zeros(16, dtype=torch.uint8)}})
    assert torch.equal(torch.get_rng_state(), state["torch"])


def test_fork_rng_puts_everything_back_also_after_an_error():
    set_seed(1)
    expected = draw()
    set_seed(1)
    with fork_rng(seed=5):
        inside = draw()
    with pytest.raises(KeyError), fork_rng():
        draw()
        raise KeyError
    assert draw() == expected
    with fork_rng(seed=5):
        assert draw() == inside


def test_device_specific_seeds_differ_by_rank(ranks):
    def run():
        set_seed(3, device_specific=True)
        specific = torch.rand(1).item()
        set_seed(3)
        return specific, torch.rand(1).item()

    a, b = ranks.run(run)
    assert a[0] == a[1] == b[1] != b[0]


def test_device_specific_before_there_is_a_group(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    set_seed(3, device_specific=True)
    seen = torch.rand(1)
    set_seed(5)
    assert torch.equal(seen, torch.rand(1))


def test_deterministic_mode_names_what_has_no_deterministic_form():
    benchmark, deterministic = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    try:
        set_seed(0, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
        with pytest.raises(RuntimeError, match="does not have a deterministic"):
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, deterministic


def test_synchronised_generators_agree(ranks):
    def run():
        set_seed(dist.get_rank())
        own = torch.Generator().manual_seed(dist.get_rank())
        before = (random.random(), np.random.rand(), torch.rand(1).item(), torch.rand(1, generator=own).item())
        synchronize_rng_states(["python", "numpy", "torch", "generator"], own)
        after = (random.random(), np.random.rand(), torch.rand(1).item(), torch.rand(1, generator=own).item())
        return before, after

    (before_a, after_a), (before_b, after_b) = ranks.run(run)
    assert after_a == after_b and all(x != y for x, y in zip(before_a, before_b, strict=True))


def test_unknown_generators_are_refused():
    with pytest.raises(ConfigurationError, match="no generator of type 'dice'"):
        synchronize_rng_state("dice")
    with pytest.raises(ConfigurationError, match="needs the generator"):
        synchronize_rng_state("generator")


@given(st.integers(0, 2**64), st.lists(st.integers(0, 2**63), max_size=3))
def test_derived_seeds_fit_every_generator(seed, path):
    value = derive_seed(seed, *path)
    assert 0 <= value < 2**63 and value == derive_seed(seed, *path)
    assert 0 <= batch_seed(value, 12345) < 2**63


def test_derived_seeds_are_spread():
    seeds = {derive_seed(s, e) for s in range(50) for e in range(50)}
    assert len(seeds) == 2500
    bits = np.array([[(x >> i) & 1 for i in range(63)] for x in seeds]).mean(axis=0)
    assert (abs(bits - 0.5) < 0.05).all()


@pytest.mark.parametrize("mode", [True, "auto"])
def test_batches_are_read_from_their_seeds_and_leave_no_trace(mode):
    seeder = BatchSeeder(mode)
    set_seed(0)
    expected = draw()
    set_seed(0)
    first = [seeder.read(draw, seed) for seed in (5, 6)]
    assert [seeder.read(draw, seed) for seed in (5, 6)] == first and first[0] != first[1]
    assert draw() == expected
    with pytest.raises(KeyError):
        seeder.read(lambda: {}["x"], 1)


def test_auto_finds_out_which_generators_are_used():
    seeder = BatchSeeder("auto")
    for seed in range(10):
        seeder.read(lambda: None, seed)
    assert seeder.used == set()
    for seed in range(seeder.EVERY):
        seeder.read(lambda: np.random.rand(), seed)
    assert seeder.used == {"numpy"}
    state = np.random.get_state()[2]
    assert seeder.read(np.random.rand, 3) == seeder.read(np.random.rand, 3) and np.random.get_state()[2] == state
    for seed in range(seeder.EVERY_FOR_TORCH):
        seeder.read(lambda: torch.rand(1), seed)
    assert seeder.used == {"numpy", "torch"}


def test_deterministic_mode_looks_after_all_generators_always():
    seeder = BatchSeeder("auto")
    for seed in range(20):
        seeder.read(lambda: None, seed)
    torch.use_deterministic_algorithms(True)
    try:
        seeder.start()
        before = rng_state()
        assert seeder.read(draw, 3) == seeder.read(draw, 3)
        assert rng_state()["python"] == before["python"] and rng_state()["numpy"] == before["numpy"]
    finally:
        torch.use_deterministic_algorithms(False)


def test_no_seeding_at_all():
    seeder = BatchSeeder(False)
    set_seed(2)
    expected = [torch.rand(1).item() for _ in range(2)]
    set_seed(2)
    assert [seeder.read(lambda: torch.rand(1).item(), 9) for _ in range(2)] == expected
