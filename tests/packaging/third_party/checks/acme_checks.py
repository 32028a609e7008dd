"""Run in the environment that the plugin is installed into: its authors' own tests."""

import json

import pytest
import torch
from acme_drivetrain.plugin import LOG, MEAN, TOYCHIP

from drivetrain import Accelerator
from drivetrain.testing.backend import BackendConformance
from drivetrain.testing.device import DeviceConformance
from drivetrain.testing.static import PluginConformance
from drivetrain.testing.tracker import StoredRun, TrackerConformance
from drivetrain.testing.training import Case, reference, train
from drivetrain.utils import AcmeOptions


class TestAcme(PluginConformance):
    plugin = "acme"


class TestAcmeMean(BackendConformance):
    spec = MEAN
    world_sizes = (2,)
    precisions = ("fp32",)


class TestToyChip(DeviceConformance):
    spec = TOYCHIP


class TestAcmeLog(TrackerConformance):
    spec = LOG

    def read_back(self, directory):
        scalars, config = {}, {}
        for file in directory.rglob("acme.log"):
            for line in file.read_text().splitlines():
                record = json.loads(line)
                config.update(record.get("config", {}))
                for name, value in record.get("values", {}).items():
                    scalars.setdefault(name, []).append((record["step"], value))
        return StoredRun(scalars=scalars, config=config)


def on_toychip():
    case = Case(accumulation=4, accelerator={"device": "toychip"})
    accelerator = Accelerator(device="toychip")
    facts = (accelerator.plan.backend.name, accelerator.plan.device.name, type(accelerator._parts.device).__name__)
    result = train(case)
    return facts, type(accelerator._parts.device).activations > 0, result


def test_ddp_runs_on_the_device_untouched(workers):
    expected = reference(Case(accumulation=4), world_size=2)
    for facts, activated, result in workers(2).run(on_toychip):
        assert facts == ("ddp", "toychip", "ToyChip")
        assert activated
        assert result.largest_difference(expected) < 2e-6


def test_options_reach_the_backend(workers):
    def compressed():
        accelerator = Accelerator(acme_options=AcmeOptions(dtype="bfloat16"), cpu=True)
        model = accelerator.prepare(torch.nn.Linear(1, 1, bias=False))
        accelerator.backward((model(torch.ones(1, 1)) * 1.001).sum())
        return accelerator.plan.backend.name, model.weight.grad.item()

    for backend, gradient in workers(2).run(compressed):
        assert backend == "acme-mean"
        assert gradient == pytest.approx(1.0)  # 1.001 has no place between 1 and 1.0078 in bfloat16


def test_training_logs_to_the_tracker(tmp_path):
    accelerator = Accelerator(cpu=True, log_with="acme-log", project_dir=tmp_path)
    accelerator.init_trackers("demo", config={"lr": 0.1})
    accelerator.log({"loss": torch.tensor(0.5)}, step=3)
    accelerator.end_training()
    lines = [json.loads(line) for line in (tmp_path / "demo" / "acme.log").read_text().splitlines()]
    assert lines == [{"config": {"lr": 0.1}}, {"step": 3, "values": {"loss": 0.5}}]
