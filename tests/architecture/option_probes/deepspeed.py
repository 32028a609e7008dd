"""Options of DeepSpeed, seen in its engines on two ranks; and, where an engine would have to compile something, in the configuration made for it."""

from __future__ import annotations

import contextlib

import torch

from drivetrain import Accelerator, DeepSpeedPlugin, init_empty_weights
from drivetrain_deepspeed.config import Facts, resolve

from . import effect


@contextlib.contextmanager
def engine(*batch_sizes, model=None, mixed_precision=None, **options):
    """An Accelerator and the engine of a model that is prepared with loaders of these batch sizes."""
    accelerator = Accelerator(cpu=True, mixed_precision=mixed_precision, deepspeed_plugin=DeepSpeedPlugin(**options))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)) if model is None else model
    loaders = [torch.utils.data.DataLoader(torch.ones(64, 4), batch_size=size) for size in batch_sizes]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    try:
        model, optimizer, *_ = accelerator.prepare(model, optimizer, *loaders)
        yield accelerator, model, optimizer
    finally:
        accelerator.end_training()


def stage(**options):
    with engine(2, **options) as (_, model, _):
        return model.zero_optimization_stage()


@effect(
    "DeepSpeedPlugin.hf_ds_config",
    ({"zero_optimization": {"stage": 1}}, [1, 1]),
    ({"zero_optimization": {"stage": 3}}, [3, 3]),
    ranks=2,
)
def hf_ds_config(value, folder):
    return stage(hf_ds_config=value)


@effect("DeepSpeedPlugin.zero_stage", (1, [1, 1]), (2, [2, 2]), ranks=2)
def zero_stage(value, folder):
    return stage(zero_stage=value)


@effect("Accelerator.deepspeed_plugin", (1, [1, 1]), (3, [3, 3]), ranks=2)
def deepspeed_plugin(value, folder):
    return stage(zero_stage=value)


@effect("Accelerator.deepspeed_plugins", ("first", [1, 1]), ("second", [3, 3]), ranks=2)
def deepspeed_plugins(value, folder):
    """The stage of a model that is prepared after one of two was selected."""
    plugins = {"first": DeepSpeedPlugin(zero_stage=1), "second": DeepSpeedPlugin(zero_stage=3)}
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins)
    accelerator.state.select_deepspeed_plugin(value)
    model = torch.nn.Linear(4, 4)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    try:
        return model.zero_optimization_stage()
    finally:
        accelerator.end_training()


@effect("DeepSpeedPlugin.gradient_accumulation_steps", ("auto", [1, 1]), (3, [3, 3]), ranks=2)
def gradient_accumulation_steps(value, folder):
    with engine(2, gradient_accumulation_steps=value) as (accelerator, _, _):
        return accelerator.gradient_accumulation_steps


@effect("DeepSpeedPlugin.gradient_clipping", (0.5, [0.5, 0.5]), (0.25, [0.25, 0.25]), ranks=2)
def gradient_clipping(value, folder):
    """How far a step of SGD with a rate of 1 goes."""
    with engine(2, zero_stage=2, gradient_clipping=value) as (accelerator, model, optimizer):
        before = [p.detach().clone() for p in model.parameters()]
        accelerator.backward(100 * model(torch.ones(2, 4)).sum())
        optimizer.step()
        moved = [(p.detach() - b).norm() for p, b in zip(model.parameters(), before, strict=True)]
        return round(float(torch.stack(moved).norm()), 3)


@effect("DeepSpeedPlugin.is_train_batch_min", (True, [2, 2]), (False, [8, 8]), ranks=2)
def is_train_batch_min(value, folder):
    with engine(8, 2, is_train_batch_min=value) as (_, model, _):
        return model.train_micro_batch_size_per_gpu()


@effect("DeepSpeedPlugin.train_micro_batch_size_per_gpu", (2, [2, 2]), (3, [3, 3]), ranks=2)
def train_micro_batch_size_per_gpu(value, folder):
    with engine(train_micro_batch_size_per_gpu=value) as (_, model, _):
        return model.train_micro_batch_size_per_gpu()


@effect("DeepSpeedPlugin.offload_optimizer_device", ("none", [False] * 2), ("cpu", [True] * 2), ranks=2)
def offload_optimizer_device(value, folder):
    with engine(2, offload_optimizer_device=value) as (_, model, _):
        return bool(model.optimizer.cpu_offload)


@effect("DeepSpeedPlugin.offload_param_device", ("none", [False] * 2), ("cpu", [True] * 2), ranks=2)
def offload_param_device(value, folder):
    with engine(2, zero_stage=3, offload_param_device=value) as (_, model, _):
        return bool(model.optimizer.offload_param)


def section(kind, folder, name):
    """What the configuration says about the disk."""
    path = folder / name
    path.mkdir()
    options = DeepSpeedPlugin(
        zero_stage=3, **{f"offload_{kind}_device": "nvme", f"offload_{kind}_nvme_path": str(path)}
    )
    config = resolve(options, Facts(world_size=1, micro_batch_size=1, precision="bf16"))
    return config["zero_optimization"][f"offload_{kind}"]["nvme_path"].rpartition("/")[2]


@effect("DeepSpeedPlugin.offload_optimizer_nvme_path", ("a", "a"), ("b", "b"))
def offload_optimizer_nvme_path(value, folder):
    return section("optimizer", folder, value)


@effect("DeepSpeedPlugin.offload_param_nvme_path", ("a", "a"), ("b", "b"))
def offload_param_nvme_path(value, folder):
    return section("param", folder, value)


@effect("DeepSpeedPlugin.zero3_init_flag", (None, ["made"] * 2), (False, ["UnsupportedError"] * 2), ranks=2)
def zero3_init_flag(value, folder):
    with init_empty_weights():
        model = torch.nn.Linear(4, 4)
    with engine(2, model=model, zero_stage=3, zero3_init_flag=value):
        return "made"


@effect("DeepSpeedPlugin.zero3_save_16bit_model", (False, [False] * 2), (True, [True] * 2), ranks=2)
def zero3_save_16bit_model(value, folder):
    with engine(2, zero_stage=3, zero3_save_16bit_model=value) as (_, model, _):
        return model.save_16bit_model(str(folder / str(torch.distributed.get_rank())))


@effect("DeepSpeedPlugin.transformer_moe_cls_names", ([], [0, 0]), (["Linear"], [2, 2]), ranks=2)
def transformer_moe_cls_names(value, folder):
    """How many modules are gathered as one."""
    from deepspeed.utils import z3_leaf_module

    with engine(2, zero_stage=3, transformer_moe_cls_names=value) as (_, model, _):
        return sum(z3_leaf_module(m) for m in model.module.modules())


@effect("DeepSpeedPlugin.torch_autocast", (False, ["torch.bfloat16"] * 2), (True, ["torch.float32"] * 2), ranks=2)
def torch_autocast(value, folder):
    """What the weights are converted to."""
    with engine(2, mixed_precision="bf16", torch_autocast=value) as (_, model, _):
        return str(next(model.parameters()).dtype)


def made(**options):
    DeepSpeedPlugin(**options)
    return "made"


@effect("DeepSpeedPlugin.enable_msamp", (False, "made"), (True, "UnsupportedError"))
def enable_msamp(value, folder):
    return made(enable_msamp=value)


@effect("DeepSpeedPlugin.msamp_opt_level", ("O1", "made"), ("O2", "UnsupportedError"))
def msamp_opt_level(value, folder):
    return made(msamp_opt_level=value)
