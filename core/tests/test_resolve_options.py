"""Options objects: whose they are, where their values come from, what is refused or noted."""

import types
from dataclasses import dataclass

import pytest

from drivetrain._builtin import plugin as builtin
from drivetrain._engine.plan import Arguments
from drivetrain._engine.resolve import resolve
from drivetrain.config import (
    AutocastKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    Options,
    TorchDynamoPlugin,
)
from drivetrain.errors import ConfigurationError
from drivetrain.specs import BackendSpec, Capability, Detection, ProcessInfo, Score
from drivetrain.testing.catalog import MemoryRegistry, devices

HERE = __name__
TWO = ProcessInfo(world_size=2, local_world_size=2, cluster="test", reason="a test")


@dataclass
class ManyKwargs(Options):
    bucket_cap_mb: int = 25
    static_graph: bool = False


class PlainPlugin:
    """Options of a plugin's own making."""

    def __init__(self, stage=2):
        self.stage = stage


MANY = BackendSpec(
    name="many",
    capabilities=frozenset({Capability.DISTRIBUTED, Capability.COMPILE}),
    options=f"{HERE}:ManyKwargs",
    accepts=("many_plugin",),
)
ENGINE = BackendSpec(
    name="engine",
    capabilities=frozenset(Capability),
    options=f"{HERE}:PlainPlugin",
    accepts=("engine_plugin",),
)
PLUGIN = types.SimpleNamespace(
    __name__="many",
    drivetrain_register_backends=lambda: [MANY, ENGINE],
    drivetrain_detect_backend=lambda request: (
        [Detection("many", Score.POSSIBLE, "processes")] if request.process.is_distributed else None
    ),
)


def plan(*, environ=None, process=None, available=None, **given):
    registry = MemoryRegistry([builtin, PLUGIN])
    return resolve(
        Arguments.collect(process=process, **given),
        registry=registry,
        environ=environ or {},
        availability=devices(registry, **(available or {})),
    )


def test_handlers_come_through_by_class_name_field_by_field(tmp_path):
    path = tmp_path / "d.toml"
    path.write_text("[grad_scaler]\ngrowth_interval = 7\ninit_scale = 1.0\nbackoff_factor = 0.25\n")
    result = plan(
        kwargs_handlers=[GradScalerKwargs(init_scale=8.0), AutocastKwargs(cache_enabled=False)],
        environ={"DRIVETRAIN_GRAD_SCALER_BACKOFF_FACTOR": "0.75", "DRIVETRAIN_CONFIG_FILE": str(path)},
    )
    scaler = result.options["GradScalerKwargs"]
    assert (scaler.init_scale, scaler.growth_interval, scaler.backoff_factor) == (8.0, 7, 0.75)
    origins = {field: str(result.origins[f"GradScalerKwargs.{field}"]) for field in scaler.to_dict()}
    assert origins == {
        "init_scale": "GradScalerKwargs(...)",
        "growth_factor": "default",
        "backoff_factor": "DRIVETRAIN_GRAD_SCALER_BACKOFF_FACTOR",
        "growth_interval": f"{path}:2",
        "enabled": "default",
    }
    assert result.options["AutocastKwargs"].cache_enabled is False
    assert "ProfileKwargs" not in result.options


def test_option_gives_defaults_for_what_nobody_mentions():
    assert plan().option(GradScalerKwargs).init_scale == 65536.0
    assert plan().options == {}


def test_a_subclass_of_a_handler_stands_for_its_parent():
    class Mine(GradScalerKwargs):
        pass

    mine = Mine(init_scale=2.0)
    assert plan(kwargs_handlers=[mine]).options["GradScalerKwargs"] is mine
    with pytest.raises(ConfigurationError, match="Two GradScalerKwargs or its subclasses"):
        plan(kwargs_handlers=[mine, GradScalerKwargs()])


def test_the_chosen_backends_options_are_there_even_if_nobody_mentions_them():
    result = plan(process=TWO, environ={"DRIVETRAIN_MANY_BUCKET_CAP_MB": "50"})
    assert result.options_of(result.backend) == ManyKwargs(bucket_cap_mb=50)
    assert str(result.origins["ManyKwargs.bucket_cap_mb"]) == "DRIVETRAIN_MANY_BUCKET_CAP_MB"
    assert plan(process=TWO).options_of(MANY) == ManyKwargs()


@pytest.mark.parametrize("where", ["kwargs_handlers", "backend", "many_plugin"])
def test_a_backends_options_are_taken_wherever_they_may_stand(where):
    options = ManyKwargs(static_graph=True)
    given = {where: [options] if where == "kwargs_handlers" else options}
    assert plan(process=TWO, **given).options_of(MANY) is options


def test_options_of_a_plugins_own_making_are_passed_on_untouched():
    options = PlainPlugin(stage=3)
    result = plan(engine_plugin=options)
    assert result.backend is ENGINE
    assert result.options["PlainPlugin"] is options
    assert result.fingerprint()["options"]["PlainPlugin"] == {"stage": 3}
    assert isinstance(plan(backend="engine").options["PlainPlugin"], PlainPlugin)


def test_options_of_what_is_not_used_are_noted_and_left_out():
    result = plan(kwargs_handlers=[ManyKwargs(static_graph=True)])
    assert result.backend.name == "single"
    assert "ManyKwargs" not in result.options
    assert result.notes == ("ManyKwargs was given for the backend 'many', which isn't used here, so it has no effect.",)


def test_an_engine_that_owns_precision_makes_autocast_options_moot():
    result = plan(engine_plugin=PlainPlugin(), kwargs_handlers=[AutocastKwargs(enabled=False)])
    assert "owns precision" in result.notes[0]


class Stranger:
    pass


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (
            {"kwargs_handlers": [GradScalerKwargs(), GradScalerKwargs()]},
            ConfigurationError,
            "Two GradScalerKwargs were",
        ),
        ({"kwargs_handlers": [Stranger()]}, ConfigurationError, "holds a Stranger, which neither core nor"),
        ({"kwargs_handlers": [{"init_scale": 1.0}]}, ConfigurationError, "holds a dict"),
        ({"kwargs_handlers": [GradScalerKwargs]}, ConfigurationError, "Pass an object of it: GradScalerKwargs()"),
        ({"kwargs_handlers": GradScalerKwargs()}, ConfigurationError, "takes a list of options objects, not a Grad"),
        (
            {"kwargs_handlers": [ManyKwargs()], "backend": ManyKwargs()},
            ConfigurationError,
            "in kwargs_handlers and in b",
        ),
        ({"kwargs_handlers": [ManyKwargs()], "many_plugin": ManyKwargs()}, ConfigurationError, "Two ManyKwargs"),
        ({"backend": GradScalerKwargs()}, ConfigurationError, "the options of one, not a GradScalerKwargs"),
        ({"backend": Stranger()}, ConfigurationError, "the options of one, not a Stranger"),
        ({"many_plugin": GradScalerKwargs()}, ConfigurationError, "many_plugin= takes a ManyKwargs, not a GradScaler"),
        ({"many_plugin": Stranger()}, ConfigurationError, "many_plugin= takes a ManyKwargs, not a Stranger"),
        (
            {"dynamo_plugin": GradScalerKwargs()},
            ConfigurationError,
            "takes a TorchDynamoPlugin, not a GradScalerKwargs",
        ),
        ({"dynamo_plugin": "inductor"}, ConfigurationError, "takes a TorchDynamoPlugin, not a str"),
        (
            {"mixed_precison": "bf16"},
            TypeError,
            "unexpected keyword argument 'mixed_precison'. Did you mean 'mixed_prec",
        ),
        ({"zzzzzz": 1}, TypeError, "Accelerator() got an unexpected keyword argument 'zzzzzz'."),
        ({"gradient_accumulation_steps": "two"}, ConfigurationError, "gradient_accumulation_steps"),
    ],
)
def test_refusals(given, error, text):
    with pytest.raises(error) as caught:
        plan(**given)
    assert text in str(caught.value)


# -- settings that are also fields of options --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "environ", "steps", "origin"),
    [
        (
            {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=4)},
            {},
            4,
            "GradientAccumulationPlugin(...)",
        ),
        ({"gradient_accumulation_plugin": GradientAccumulationPlugin(sync_each_batch=True)}, {}, 1, "default"),
        (
            {"gradient_accumulation_plugin": GradientAccumulationPlugin(), "gradient_accumulation_steps": 3},
            {},
            3,
            "argument",
        ),
        (
            {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=4)},
            {"DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS": "7"},
            4,
            "GradientAccumulationPlugin(...)",
        ),
        (
            {"gradient_accumulation_steps": 2},
            {"DRIVETRAIN_GRADIENT_ACCUMULATION_NUM_STEPS": "7"},
            2,
            "argument",
        ),
        ({}, {"DRIVETRAIN_GRADIENT_ACCUMULATION_NUM_STEPS": "7"}, 7, "DRIVETRAIN_GRADIENT_ACCUMULATION_NUM_STEPS"),
        (
            {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2), "gradient_accumulation_steps": 2},
            {},
            2,
            "GradientAccumulationPlugin(...)",
        ),
    ],
)
def test_steps_of_accumulation_agree_in_both_places(given, environ, steps, origin):
    result = plan(environ=environ, **given)
    assert result.settings.gradient_accumulation_steps == steps
    assert str(result.origins["gradient_accumulation_steps"]) == origin
    if "GradientAccumulationPlugin" in result.options:
        assert result.options["GradientAccumulationPlugin"].num_steps == steps


def test_equally_strong_sources_that_differ_are_an_error():
    with pytest.raises(ConfigurationError, match=r"gradient_accumulation_steps=2 .*num_steps=4 .*contradict"):
        plan(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4), gradient_accumulation_steps=2)
    with pytest.raises(ConfigurationError, match="dynamo_backend='eager'"):
        plan(dynamo_plugin=TorchDynamoPlugin(backend="inductor"), dynamo_backend="eager")


def test_the_users_plugin_object_is_not_changed():
    mine = GradientAccumulationPlugin()
    result = plan(gradient_accumulation_plugin=mine, gradient_accumulation_steps=3)
    assert mine.num_steps is None
    assert result.options["GradientAccumulationPlugin"].num_steps == 3


def test_the_compiler_is_one_setting_whichever_way_it_is_said():
    for result in (
        plan(dynamo_backend="INDUCTOR"),
        plan(dynamo_plugin=TorchDynamoPlugin(backend="inductor")),
        plan(environ={"DRIVETRAIN_DYNAMO_BACKEND": "inductor", "DRIVETRAIN_DYNAMO_FULLGRAPH": "1"}),
    ):
        assert result.settings.dynamo_backend == "inductor"
    assert result.options["TorchDynamoPlugin"].to_kwargs() == {"backend": "inductor", "fullgraph": True}
    joined = plan(dynamo_plugin=TorchDynamoPlugin(mode="max-autotune"), dynamo_backend="inductor")
    assert joined.options["TorchDynamoPlugin"].to_kwargs() == {"backend": "inductor", "mode": "max-autotune"}


def test_an_init_method_of_the_users_is_where_processes_meet():
    environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    handler = InitProcessGroupKwargs(init_method="tcp://h:1")
    assert plan(environ=environ, kwargs_handlers=[handler]).process.rendezvous == "tcp://h:1"
    assert (
        plan(environ={**environ, "DRIVETRAIN_PROCESS_GROUP_INIT_METHOD": "tcp://g:2"}).process.rendezvous == "tcp://g:2"
    )
