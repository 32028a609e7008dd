"""What the probes play with: a small model, its training, a tracker, a plugin of a third party."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings

import torch
import torch.distributed as dist

from drivetrain import Accelerator, InitProcessGroupKwargs
from drivetrain._plugins.process import _process_registry
from drivetrain.testing.distributions import write_plugin
from drivetrain.tracking import GeneralTracker


class Net(torch.nn.Module):
    """Notes what is true inside its forward."""

    def __init__(self):
        super().__init__()
        self.used = torch.nn.Linear(4, 4)
        self.spare = torch.nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1))
        self.notes = {}

    def forward(self, x):
        y = self.used(x)
        self.notes = {"dtype": str(y.dtype), "cache": torch.is_autocast_cache_enabled()}
        return y


@contextlib.contextmanager
def training(**arguments):
    """An Accelerator with a prepared model and optimizer; ended afterwards."""
    torch.manual_seed(0)
    with quiet():
        accelerator = Accelerator(**{"cpu": True, **arguments})
    try:
        model = Net()
        for parameter in model.spare.parameters():
            parameter.requires_grad = False
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        yield accelerator, *accelerator.prepare(model, optimizer)
    finally:
        with quiet():
            accelerator.end_training()


@contextlib.contextmanager
def quiet():
    """Notes about what is tried on purpose aren't for whoever runs the tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def variables(**values):
    """Environment variables inside a block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def meeting_at(folder, **arguments):
    """Processes meet through a file."""
    return InitProcessGroupKwargs(init_method=f"file://{folder}/meet", **arguments)


@contextlib.contextmanager
def alone(folder):
    """On a rank: without the pool's process group, which is made again afterwards."""
    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{folder}/again", rank=rank, world_size=world)
        dist.barrier()  # no rank may end it while another still connects


def step(accelerator, model, optimizer, *, scheduler=None, loss=None):
    """One micro-batch."""
    with accelerator.accumulate(model):
        y = model(torch.ones(2, 4))
        accelerator.backward(y.pow(2).mean() if loss is None else loss(y))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()


def files(folder):
    """Paths of all files below a folder."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def soon(condition, seconds=5.0):
    """Whether something becomes true within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


class Recorder(GeneralTracker):
    """A tracker that does what a probe tells it: wait, fail, be slow."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self, *, start_seconds=0.0, failures=0, slow=0.0, held=False):
        super().__init__()
        self.rows = []
        self.attempts = 0
        self.started = False
        self.released = threading.Event()
        self._start_seconds = start_seconds
        self._failures = failures
        self._slow = slow
        if not held:
            self.released.set()

    @property
    def tracker(self):
        return self.rows

    def start(self):
        time.sleep(self._start_seconds)
        self.started = True

    def log(self, values, step=None, **kwargs):
        self.attempts += 1
        if self.attempts <= self._failures:
            raise OSError("the service is down")
        self.released.wait(30)
        time.sleep(self._slow)
        self.rows.append((step, values))


PLUGIN = """
    from drivetrain.hookspecs import hookimpl
    from drivetrain.specs import CheckpointFormatSpec, DeviceSpec, LauncherSpec

    DRIVETRAIN_API = 1

    @hookimpl
    def drivetrain_register_devices():
        return [DeviceSpec(name="chip", torch_type="meta", target="probe_parts:Chip", communication_backend="gloo",
                           visible_devices="CHIP_VISIBLE", priority=500)]

    @hookimpl
    def drivetrain_register_checkpoint_formats():
        return [CheckpointFormatSpec(name="other", target="drivetrain.checkpoint.safetensors_format:SafetensorsFormat",
                                     suffix=".other")]

    @hookimpl
    def drivetrain_register_launchers():
        return [LauncherSpec(name="seven", target="probe_parts:Seven")]
"""
PARTS = """
    import torch
    from drivetrain.interfaces import Device, Launcher

    class Chip(Device):
        def is_available(self):
            return True

        def count(self):
            return 2

        def torch_device(self, local_rank):
            return torch.device("meta")

    class Seven(Launcher):
        def launch(self, request):
            return 7

        def describe(self, request):
            return "seven"
"""


@contextlib.contextmanager
def third_party(folder):
    """A plugin with a device that torch knows as "meta", a checkpoint format and a launcher, installed inside the block."""
    write_plugin(folder, "probe", PLUGIN, files={"probe_parts.py": PARTS})
    sys.path.insert(0, str(folder))
    _process_registry.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [n for n in sys.modules if n.startswith("probe_")]:
            del sys.modules[name]
        _process_registry.cache_clear()
