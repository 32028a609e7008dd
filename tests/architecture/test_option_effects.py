"""Every option has an effect that can be seen, or is refused; and its value comes from where it was written.

Options classes are found through the registry and fields through their schema: a new one without a probe fails.
"""

from __future__ import annotations

import inspect
import json
import typing

import msgspec
import pytest

from drivetrain import Accelerator
from drivetrain._engine.availability import detect_devices
from drivetrain._engine.collecting import Sections
from drivetrain._engine.plan import Arguments
from drivetrain._engine.resolve import resolve
from drivetrain._lazy import load_target
from drivetrain._plugins import get_registry
from drivetrain.config import read_config_file, resolve_options, variable
from drivetrain.config.sections import OTHER_SECTIONS
from drivetrain.config.settings import CoreSettings
from drivetrain.errors import ConfigurationError

from .option_probes import (  # noqa: F401
    PROBES,
    core_settings,
    data_loader,
    ddp,
    deepspeed,
    fsdp,
    handlers,
    keywords,
    kubernetes,
    launching,
    look,
    meshes,
    mpi,
    precisions,
    projects,
    slurm,
    tracker_systems,
    trackers,
)


def sections():
    """Section by options class, of core and of the repository's installed plugins."""
    found = Sections(get_registry())
    return {
        cls: name for name in found.names() for cls in found.classes(name) if cls.__module__.startswith("drivetrain")
    }


SECTIONS = {CoreSettings: "", **sections()}
FIELDS = [(cls, name) for cls in SECTIONS for name in cls.hints()]
KEYWORDS = {
    *(k for k, p in inspect.signature(Accelerator.__init__).parameters.items() if p.kind is p.KEYWORD_ONLY),
    *get_registry().accepts(),
} - set(CoreSettings.hints())


def test_every_option_has_a_probe():
    wanted = {f"{cls.__name__}.{name}" for cls, name in FIELDS} | {f"Accelerator.{k}" for k in KEYWORDS}
    assert sorted(wanted - set(PROBES)) == []
    assert sorted(set(PROBES) - wanted) == []


def test_two_cases_of_each_probe_see_different_things():
    for probe in PROBES.values():
        first, second = probe.cases
        assert first.value != second.value, probe.option
        assert first.seen != second.seen, probe.option


@pytest.mark.parametrize("option", [o for o, p in PROBES.items() if p.ranks == 1])
def test_effect(option, tmp_path):
    probe = PROBES[option]
    assert look(probe, tmp_path) == [case.seen for case in probe.cases]


@pytest.mark.parametrize("option", [o for o, p in PROBES.items() if p.ranks == 2])
def test_effect_on_ranks(option, ranks, tmp_path):
    probe = PROBES[option]
    by_rank = ranks.run(look, probe, tmp_path)
    assert [list(seen) for seen in zip(*by_rank, strict=True)] == [case.seen for case in probe.cases]


# -- where values come from ------------------------------------------------------------------------------------------------

#: Values to write for fields of which not every value goes with the other fields' defaults.
WRITTEN = {
    "CoreSettings.backend": "ddp",
    "CoreSettings.device": "cpu",
    "CoreSettings.mixed_precision": "bf16",
    "CoreSettings.log_with": ["jsonl"],
    "CoreSettings.dynamo_backend": "eager",
    "CoreSettings.checkpoint_format": "safetensors",
    "GradScalerKwargs.backoff_factor": 0.25,
    "AORecipeKwargs.emulate": True,
    "DataLoaderConfiguration.even_batches": "repeat",
    "DataLoaderConfiguration.strategy": "contiguous",
    "DataLoaderConfiguration.prefetch": 0,
    "PlanningOptions.device_memory": "8GB",
    "PlanningOptions.headroom": 0.5,
    "ProfileKwargs.schedule_option": {"wait": 1},
    "DistributedDataParallelKwargs.dim": 0,
    "DistributedDataParallelKwargs.check_reduction": False,
    "DistributedDataParallelKwargs.comm_hook": "bf16",
    "DistributedDataParallelKwargs.comm_wrapper": "no",
    "DistributedDataParallelKwargs.comm_state_option": {},
    "FullyShardedDataParallelPlugin.auto_wrap_policy": "NO_WRAP",
    "FullyShardedDataParallelPlugin.backward_prefetch": "NO_PREFETCH",
    "FullyShardedDataParallelPlugin.mixed_precision_policy": {"param_dtype": "bfloat16"},
    "FullyShardedDataParallelPlugin.ignored_modules": ["text"],
    "FullyShardedDataParallelPlugin.fsdp_version": 2,
    "FullyShardedDataParallelPlugin.limit_all_gathers": True,
    "FullyShardedDataParallelPlugin.use_orig_params": True,
    "DeepSpeedPlugin.hf_ds_config": {"zero_optimization": {"stage": 3}},
    "DeepSpeedPlugin.zero_stage": 3,
    "DeepSpeedPlugin.offload_param_device": "none",
    "DeepSpeedPlugin.offload_optimizer_nvme_path": "auto",
    "DeepSpeedPlugin.offload_param_nvme_path": "auto",
    "DeepSpeedPlugin.zero3_init_flag": False,
    "DeepSpeedPlugin.zero3_save_16bit_model": False,
    "DeepSpeedPlugin.enable_msamp": False,
    "DeepSpeedPlugin.msamp_opt_level": "O1",
    "ParallelismConfig.cp_backend": "torch",
    "ParallelismConfig.sp_backend": "fsdp",
    "ParallelismConfig.cp_comm_strategy": "allgather",
    "ParallelismConfig.tp_plan": {},
    "ActivationCheckpointing.budget": 0.5,
    "LocalOptions.rdzv_conf": {"timeout": 5},
}
IN_PYTHON_ONLY = {
    "ProfileKwargs.on_trace_ready",
    "FullyShardedDataParallelPlugin.param_init_fn",
    "AORecipeKwargs.config",
    "AORecipeKwargs.module_filter_func",
}
#: What an options class needs for its spec to be chosen.
CHOSEN_BY = {
    "DistributedDataParallelKwargs": {"backend": "ddp"},
    "FullyShardedDataParallelPlugin": {"backend": "fsdp"},
    "DeepSpeedPlugin": {"backend": "deepspeed"},
    "ParallelismConfig": {"backend": "fsdp"},
    "AORecipeKwargs": {"mixed_precision": "fp8"},
    "PureBF16Kwargs": {"mixed_precision": "pure-bf16"},
    "JsonlOptions": {"log_with": "jsonl", "project_dir": "here"},
    "TensorBoardOptions": {"log_with": "tensorboard", "project_dir": "here"},
    "CometOptions": {"log_with": "comet", "project_dir": "here"},
    "MlflowOptions": {"log_with": "mlflow", "project_dir": "here"},
    "NeptuneOptions": {"log_with": "neptune", "project_dir": "here"},
    "WandbOptions": {"log_with": "wandb", "project_dir": "here"},
    "log_with": {"project_dir": "here"},
}


def another(hint, default):
    """A value of the type that isn't the default."""
    if typing.get_origin(hint) is typing.Annotated:
        return another(typing.get_args(hint)[0], default)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return next(a for a in arguments if a != default)
    if typing.get_origin(hint) in (list, tuple):
        return [another(arguments[0], default)]
    if typing.get_origin(hint) is dict:
        return {"a": another(arguments[1], None) if arguments else 1}
    if arguments:
        return another(next(a for a in arguments if a is not type(None)), default)
    number = default if isinstance(default, int | float) else 0
    simple = {bool: lambda: not default, int: lambda: int(number) + 1, float: lambda: number + 1.0}
    return simple.get(hint, lambda: "text")()


def written(cls, name):
    if f"{cls.__name__}.{name}" in WRITTEN:
        return WRITTEN[f"{cls.__name__}.{name}"]
    return another(cls.hints()[name], getattr(cls(), name))


def as_text(value):
    if isinstance(value, list):
        return ",".join(map(as_text, value))
    return value if isinstance(value, str) else json.dumps(value)


def as_toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {as_toml(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def plain(value):
    """As JSON holds it: lists, and the values of enums."""
    return msgspec.json.decode(msgspec.json.encode(value))


def resolved(cls, name, environ):
    """The field's value and origin, with these variables."""
    if SECTIONS[cls] in ("launch", *get_registry().specs("launcher")):
        path = environ.get("DRIVETRAIN_CONFIG_FILE")
        file = read_config_file(path) if path else read_config_file("/dev/null")
        result = resolve_options(cls, section=SECTIONS[cls], environ=environ, file=file)
        return getattr(result.value, name), result.origins[name]
    registry = get_registry()
    given = CHOSEN_BY.get(cls.__name__, CHOSEN_BY.get(name, {}))
    plan = resolve(
        Arguments.collect(**given),
        registry=registry,
        environ=environ,
        availability=detect_devices(registry.specs("device").values()),
    )
    if cls is CoreSettings:
        return getattr(plan.settings, name), plan.origins[name]
    return getattr(plan.options[cls.__name__], name), plan.origins[f"{cls.__name__}.{name}"]


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=lambda x: getattr(x, "__name__", x))
def test_value_comes_from_the_environment(cls, name, tmp_path):
    key = variable(name, SECTIONS[cls])
    if f"{cls.__name__}.{name}" in IN_PYTHON_ONLY:
        with pytest.raises(ConfigurationError, match="can only be given in Python"):
            resolved(cls, name, {key: "text"})
        return
    value = written(cls, name)
    if name == "config_file":
        (tmp_path / value).touch()
        value = str(tmp_path / value)
    if key == variable("dynamo_backend"):  # one variable for the setting and for the same field of TorchDynamoPlugin
        cls, name = CoreSettings, "dynamo_backend"
    found, origin = resolved(cls, name, {key: as_text(value)})
    assert (plain(found), str(origin)) == (value, key)


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=lambda x: getattr(x, "__name__", x))
def test_value_comes_from_the_file(cls, name, tmp_path):
    if f"{cls.__name__}.{name}" in {*IN_PYTHON_ONLY, "CoreSettings.config_file"}:
        return
    value = written(cls, name)
    path = tmp_path / "drivetrain.toml"
    section = f"[{SECTIONS[cls]}]\n" if SECTIONS[cls] else ""
    path.write_text(f"{section}{name} = {as_toml(value)}\n")
    found, origin = resolved(cls, name, {"DRIVETRAIN_CONFIG_FILE": str(path)})
    line = 2 if section else 1
    assert (plain(found), str(origin)) == (value, f"{path}:{line}")


def test_sections_that_others_read_are_probed_too():
    assert all(load_target(target) in SECTIONS for target in OTHER_SECTIONS.values())
