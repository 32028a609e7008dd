"""DeepSpeed's engines keep what the Backend interface promises, at each ZeRO stage."""

from typing import Any

import pytest

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


@pytest.mark.full
class TestStage0(Stage):
    __test__ = True
    arguments = _arguments(zero_stage=0)
    #: DeepSpeed looks for overflows and norms parameter by parameter, on the host.
    reads = {"fp32": 0, "bf16": 11}


@pytest.mark.full
class TestStage1(Stage):
    __test__ = True
    arguments = _arguments(zero_stage=1)
    reads = {"fp32": 3, "bf16": 4}  # of DeepSpeed's own, and the factor of item weights


class TestStage2(Stage):
    __test__ = True
    arguments = _arguments(zero_stage=2)
    reads = {"fp32": 3, "bf16": 4}  # of DeepSpeed's own, and the factor of item weights


class TestStage3(Stage):
    __test__ = True
    arguments = _arguments(zero_stage=3)
    reads = {"fp32": 2, "bf16": 2}  # of DeepSpeed's own, and the factor of item weights


class TestPlugin(PluginConformance):
    plugin = "deepspeed"
