"""DeepSpeed's engines keep what the Backend interface promises, at each ZeRO stage."""

from typing import Any

from drivetrain.testing.backend import BackendConformance
from drivetrain.testing.static import PluginConformance
from drivetrain_deepspeed.options import DeepSpeedPlugin
from drivetrain_deepspeed.plugin import DEEPSPEED


def _arguments(**settings: Any) -> dict[str, Any]:
    return {"cpu": True, "deepspeed_plugin": DeepSpeedPlugin(**settings)}


class Stage(BackendConformance):
    """What all stages have in common."""

    __test__ = False
    spec = DEEPSPEED
    world_sizes = (1, 2)
    precisions = ("fp32", "bf16")


class TestStage0(Stage):
    __test__ = True
    arguments = _arguments(zero_stage=0)


class TestStage1(Stage):
    __test__ = True
    arguments = _arguments(zero_stage=1)


class TestStage2(Stage):
    __test__ = True
    arguments = _arguments(zero_stage=2)


class TestStage3(Stage):
    __test__ = True
    arguments = _arguments(zero_stage=3)


class TestPlugin(PluginConformance):
    plugin = "deepspeed"
