"""Options of mixed precisions, and what happens when a value isn't finite."""

from __future__ import annotations

import itertools
import warnings

import torch
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

from drivetrain import Accelerator, AORecipeKwargs, PrecisionKwargs, PureBF16Kwargs

from . import effect
from .scene import quiet, step, training


@effect("PrecisionKwargs.output_dtype", ("float32", "torch.float32"), ("compute", "torch.bfloat16"))
def output_dtype(value, folder):
    with training(mixed_precision="bf16", kwargs_handlers=[PrecisionKwargs(output_dtype=value)]) as (_, model, _):
        return str(model(torch.ones(2, 4)).dtype)


@effect("PrecisionKwargs.keep_in_fp32", (["used"], "torch.float32"), (["spare"], "torch.bfloat16"))
def keep_in_fp32(value, folder):
    with training(mixed_precision="bf16", kwargs_handlers=[PrecisionKwargs(keep_in_fp32=value)]) as (_, model, _):
        model(torch.ones(2, 4))
        return model.notes["dtype"]


@effect("PureBF16Kwargs.weights", ("master", True), ("stochastic", False))
def weights(value, folder):
    handler = PureBF16Kwargs(weights=value)
    with training(mixed_precision="pure-bf16", kwargs_handlers=[handler]) as (accelerator, model, optimizer):
        step(accelerator, model, optimizer)
        return "master_weight" in optimizer.state[model.used.weight]


@effect("CoreSettings.on_nonfinite", ("raise", "NonfiniteError"), ("skip", (0, True)))
def on_nonfinite(value, folder):
    with training(on_nonfinite=value) as (accelerator, model, optimizer), quiet():
        step(accelerator, model, optimizer, loss=lambda y: y.mean() * float("nan"))
        return accelerator.step, accelerator.optimizer_step_was_skipped


@effect("CoreSettings.step_scheduler_per_process", (True, [4, 4]), (False, [2, 2]), ranks=2)
def step_scheduler_per_process(value, folder):
    with training(step_scheduler_per_process=value) as (accelerator, model, optimizer):
        scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda n: 1.0))
        for _ in range(2):
            step(accelerator, model, optimizer, scheduler=scheduler)
        return scheduler.scheduler.last_epoch


# -- float8 ----------------------------------------------------------------------------------------------------------------


def float8(*widths, **options):
    """A prepared model of linear layers; sizes from one to the next."""
    with quiet():
        handler = AORecipeKwargs(**{"emulate": True, "min_features": 16, **options})
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler])
        layers = (torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        return accelerator.prepare(torch.nn.Sequential(*layers))


def converted(model):
    return [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]


def config_of(**options):
    (name,) = converted(model := float8(16, 16, 16, 16, **options))
    return model.get_submodule(name).config


@effect("AORecipeKwargs.recipe", ("tensorwise", "TENSORWISE"), ("rowwise", "AXISWISE"))
def recipe(value, folder):
    return config_of(recipe=value).cast_config_weight.scaling_granularity.name


@effect("AORecipeKwargs.emulate", (True, True), (False, "ConfigurationError"))
def emulate(value, folder):
    return config_of(emulate=value).emulate


@effect("AORecipeKwargs.pad_inner_dim", (True, True), (False, False))
def pad_inner_dim(value, folder):
    return config_of(pad_inner_dim=value).pad_inner_dim


@effect("AORecipeKwargs.enable_fsdp_float8_all_gather", (True, True), (False, False))
def enable_fsdp_float8_all_gather(value, folder):
    model = float8(16, 16, 16, 16, enable_fsdp_float8_all_gather=value)
    return hasattr(model[1].weight, "fsdp_pre_all_gather")


@effect("AORecipeKwargs.config", (True, True), (False, False))
def config(value, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = Float8LinearConfig(emulate=True, round_scales_to_power_of_2=value)
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=config)])
        model = accelerator.prepare(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))))
    return model[1].config.round_scales_to_power_of_2


@effect("AORecipeKwargs.module_filter_func", ("0", ["0"]), ("1", ["1"]))
def module_filter_func(value, folder):
    with quiet():
        handler = AORecipeKwargs(emulate=True, module_filter_func=lambda module, name: name == value)
        accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler])
        return converted(accelerator.prepare(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(2)))))


@effect("AORecipeKwargs.skip_first_and_last", (True, ["1"]), (False, ["0", "1", "2"]))
def skip_first_and_last(value, folder):
    return converted(float8(16, 16, 16, 16, skip_first_and_last=value))


@effect("AORecipeKwargs.min_features", (16, ["1"]), (32, []))
def min_features(value, folder):
    return converted(float8(16, 16, 16, 16, min_features=value))


@effect("AORecipeKwargs.skip_modules", (["1"], ["2"]), (["2"], ["1"]))
def skip_modules(value, folder):
    return converted(float8(16, 16, 16, 16, 16, skip_modules=value))
