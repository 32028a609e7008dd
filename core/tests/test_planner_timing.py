"""Predicted step time: more work is never faster, faster devices are never slower, and each kind of collective counts by its own speed."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.memory import Hardware, Traffic, known_hardware, measure_machine, profile_of_counts, step_seconds

PROFILE = profile_of_counts(parameters=1e8, layers=4, hidden=512, sequence=128, precision="bf16")
TIMELINE = PROFILE.timelines["none"]
MORE = (
    "gathered",
    "scattered",
    "summed",
    "among_replicas",
    "collectives",
    "operations",
    "copied",
    "host",
    "stepped",
    "step_operations",
)
FASTER = ("memory_bandwidth", "link_bandwidth", "network_bandwidth", "host_bandwidth")
SLOWER = ("latency", "launch", "gather_factor", "scatter_factor")
amounts = st.fixed_dictionaries({name: st.floats(0, 1e10) for name in MORE})
devices = st.sampled_from(["cpu", "cuda"])


def hardware(device, **kwargs):
    return replace(known_hardware("a100-80gb", devices=4), device=device, **kwargs)


def predict(traffic, devices):
    return step_seconds(TIMELINE, Traffic(shards=4, **traffic), PROFILE, devices, micro_batch=4, accumulation=2)


@given(amounts, st.sampled_from(MORE), st.floats(1, 1e10), devices)
def test_more_is_never_faster(amounts, name, added, device):
    more = {**amounts, name: amounts[name] + added}
    assert predict(more, hardware(device)) >= predict(amounts, hardware(device))


@given(amounts, st.sampled_from(FASTER + SLOWER), st.floats(1, 100), devices)
def test_better_hardware_is_never_slower(amounts, name, times, device):
    worse = hardware(device)
    value = getattr(worse, name) * times
    better = replace(worse, **{name: value})
    if name in SLOWER:
        worse, better = better, worse
    assert predict(amounts, better) <= predict(amounts, worse) * (1 + 1e-12)


def test_every_amount_is_tried():
    assert {f.name for f in fields(Traffic)} - set(MORE) == {"shards", "replicas", "steps_on_host"}


def test_a_slow_scatter_counts_for_what_is_scattered_alone():
    slow = hardware("cpu", scatter_factor=3.0)
    scattered, gathered = Traffic(shards=2), Traffic(shards=2)
    scattered.scatter(1e9, 1, times=1)
    gathered.gather(1e9, 1, times=1)
    arguments = {"micro_batch": 1, "accumulation": 1}
    apart = step_seconds(TIMELINE, scattered, PROFILE, slow, **arguments) - step_seconds(
        TIMELINE, gathered, PROFILE, slow, **arguments
    )
    assert apart == pytest.approx(2 * 0.5e9 / slow.link_bandwidth)


def test_this_machine_is_measured(ranks):
    def measure():
        found = measure_machine(torch.device("cpu"), devices=2)
        assert 1e-7 < found.launch < 1e-3 and found.gather_factor > 0 and found.scatter_factor > 0
        return found.latency, found.link_bandwidth, found.gather_factor, found.scatter_factor

    first, second = ranks.run(measure)
    assert first == second  # ranks choose alike
    assert isinstance(measure_machine(torch.device("cpu")), Hardware)
