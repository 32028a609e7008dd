"""What comes with core keeps what the interfaces promise."""

import torch

from drivetrain._plugins import get_registry
from drivetrain.config import GradScalerKwargs
from drivetrain.testing.backend import BackendConformance
from drivetrain.testing.checkpoint_format import CheckpointFormatConformance
from drivetrain.testing.device import DeviceConformance
from drivetrain.testing.precision import PrecisionConformance
from drivetrain.testing.static import PluginConformance

get = get_registry().get


class TestSingle(BackendConformance):
    spec = get("backend", "single")
    world_sizes = (1,)
    precisions = ("fp32", "bf16", "fp16")


class TestCPU(DeviceConformance):
    spec = get("device", "cpu")


class TestFullPrecision(PrecisionConformance):
    spec = get("precision", "fp32")


class TestBFloat16(PrecisionConformance):
    spec = get("precision", "bf16")
    autocast = torch.bfloat16
    tolerance = 5e-2


class TestFloat16(PrecisionConformance):
    spec = get("precision", "fp16")
    options = {"GradScalerKwargs": GradScalerKwargs(init_scale=128.0)}
    autocast = torch.float16
    tolerance = 1e-2


class TestSafetensors(CheckpointFormatConformance):
    spec = get("checkpoint-format", "safetensors")


class TestBuiltinPlugin(PluginConformance):
    plugin = "builtin"
