import sys

import pytest
import torch

from drivetrain._builtin.devices import DEVICES
from drivetrain._engine.availability import Availability, DeviceStatus, TorchProbe, detect_devices
from drivetrain.interfaces import TorchDevice
from drivetrain.specs import DeviceSpec

BY_NAME = {spec.name: spec for spec in DEVICES}


class Recorder:
    """A probe that notes what it was asked."""

    def __init__(self, available=("cpu",), discovered=()):
        self.asked = []
        self.available = available
        self.discovered = discovered

    def status(self, spec):
        self.asked.append(spec.name)
        return DeviceStatus(spec.name in self.available, 1, "recorded")

    def discover(self, known):
        self.asked.append("discover")
        return self.discovered


def test_a_device_is_asked_when_it_is_needed_and_once():
    probe = Recorder()
    availability = detect_devices(DEVICES, probe)
    assert probe.asked == []
    assert availability.status("cpu").available
    assert availability.status("cpu").available
    assert probe.asked == ["cpu"]


def test_devices_come_best_first_whatever_the_order_of_registration():
    names = list(Availability(DEVICES, Recorder()).known())
    assert names == list(Availability(reversed(DEVICES), Recorder()).known())
    assert (names[0], names[-1]) == ("cuda", "cpu")


def test_what_torch_reports_beyond_the_table_is_a_device():
    chip = DeviceSpec(name="chip", torch_type="chip", communication_backend="", priority=50)
    availability = Availability(DEVICES, Recorder(available=("chip",), discovered=(chip,)))
    assert list(availability.everything())[-2:] == ["chip", "cpu"]
    assert "chip" not in availability.known()
    assert availability.status("chip").available


def test_the_probe_agrees_with_torch():
    probe = TorchProbe()
    assert probe.status(BY_NAME["cpu"]) == DeviceStatus(True, 1, "always there")
    for name in ("cuda", "xpu", "mps"):
        status = probe.status(BY_NAME[name])
        module = torch.get_device_module(name)
        assert status.available == module.is_available()
        assert status.count == (module.device_count() if module.is_available() else 0)
        assert status.reason
    accelerator = torch.accelerator.current_accelerator()
    known = {spec.torch_type for spec in DEVICES}
    assert probe.discover(known) == () or accelerator.type not in known


def test_a_missing_module_and_an_unknown_type_are_reasons_and_not_errors():
    probe = TorchProbe()
    missing = probe.status(
        DeviceSpec(name="a", torch_type="cpu", communication_backend="", module="no_such_module.sub")
    )
    assert missing == DeviceStatus(False, 0, "the module no_such_module.sub isn't installed")
    unknown = probe.status(DeviceSpec(name="b", torch_type="bogus", communication_backend=""))
    assert not unknown.available
    assert "bogus" in unknown.reason


class ThreeChips(TorchDevice):
    """A device of a plugin, over the CPU."""

    def is_available(self):
        return True

    def count(self):
        return 3


class Broken(ThreeChips):
    def count(self):
        raise OSError("the driver is too old\nsecond line")


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        (ThreeChips, DeviceStatus(True, 3, "3 found")),
        (Broken, DeviceStatus(False, 0, "OSError: the driver is too old")),
    ],
)
def test_a_plugins_device_class_speaks_for_itself(cls, expected):
    assert cls.__module__ in sys.modules
    spec = DeviceSpec(
        name="toy", torch_type="cpu", communication_backend="gloo", target=f"{cls.__module__}:{cls.__name__}"
    )
    assert TorchProbe().status(spec) == expected


def test_the_table_has_distinct_names_and_priorities():
    assert len({spec.priority for spec in DEVICES}) == len(DEVICES)
    assert BY_NAME["cpu"].priority == 0
    assert BY_NAME["cuda"].priority == DeviceSpec(name="x", torch_type="x", communication_backend="").priority
    assert BY_NAME["mps"].communication_backend == ""
