"""fsdp keeps what the Backend interface promises."""

from drivetrain.testing.backend import BackendConformance
from drivetrain.testing.static import PluginConformance
from drivetrain_fsdp.options import FullyShardedDataParallelPlugin
from drivetrain_fsdp.plugin import FSDP


class TestFSDP(BackendConformance):
    """Each linear layer is a unit, and the rest is one: small models then have several, as large ones do."""

    spec = FSDP
    world_sizes = (1, 2, 3)
    precisions = ("fp32", "bf16", "fp16")
    arguments = {"cpu": True, "fsdp_plugin": FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Linear"])}


class TestPlugin(PluginConformance):
    plugin = "fsdp"
