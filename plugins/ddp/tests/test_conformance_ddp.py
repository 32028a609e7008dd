"""ddp keeps what the Backend interface promises."""

from drivetrain.testing.backend import BackendConformance
from drivetrain.testing.static import PluginConformance
from drivetrain_ddp.plugin import DDP


class TestDDP(BackendConformance):
    spec = DDP
    world_sizes = (1, 2, 3)
    precisions = ("fp32", "bf16", "fp16")


class TestPlugin(PluginConformance):
    plugin = "ddp"
