import datetime
import enum
import subprocess
import sys

import pytest
import torch

from drivetrain.config import (
    AutocastKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from drivetrain.config.sections import CORE_OPTIONS
from drivetrain.errors import ConfigurationError


def test_defaults_are_those_that_scripts_know():
    assert AutocastKwargs().to_dict() == {"enabled": True, "cache_enabled": None}
    assert GradScalerKwargs().to_dict() == {
        "init_scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "enabled": True,
    }
    assert InitProcessGroupKwargs().to_dict() == {"backend": None, "init_method": None, "timeout": None}
    assert GradientAccumulationPlugin(2).to_dict() == {
        "num_steps": 2,
        "adjust_scheduler": True,
        "sync_with_dataloader": True,
        "sync_each_batch": False,
    }


def test_given_values_reach_torch_even_if_they_equal_the_default():
    assert InitProcessGroupKwargs(backend="nccl").to_kwargs() == {"backend": "nccl"}
    assert GradScalerKwargs(init_scale=65536.0).to_kwargs() == {"init_scale": 65536.0}
    torch.amp.GradScaler("cpu", **GradScalerKwargs(init_scale=8.0, growth_interval=5).to_kwargs())
    with torch.autocast("cpu", dtype=torch.bfloat16, **AutocastKwargs(cache_enabled=False).to_kwargs()):
        assert not torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("timeout", [90, 90.0, datetime.timedelta(seconds=90)])
def test_timeouts_are_seconds_or_timedeltas(timeout):
    options = InitProcessGroupKwargs(timeout=timeout)
    assert options.timeout == 90.0
    assert options.to_kwargs() == {"timeout": datetime.timedelta(seconds=90)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GradScalerKwargs(init_scale=0), "init_scale"),
        (lambda: GradScalerKwargs(growth_factor=0.5), "growth_factor"),
        (lambda: GradScalerKwargs(backoff_factor=2), "backoff_factor"),
        (lambda: GradScalerKwargs(growth_interval=0), "growth_interval"),
        (lambda: AutocastKwargs(enabled="yes"), "enabled"),
        (lambda: InitProcessGroupKwargs(timeout="soon"), "timeout"),
        (lambda: InitProcessGroupKwargs(timeout=-1), "timeout=-1.0 must be above 0"),
        (lambda: InitProcessGroupKwargs(timeout=True), "timeout"),
        (lambda: GradientAccumulationPlugin(num_steps=0), "num_steps"),
        (lambda: ProfileKwargs(activities=["cp"]), "activities"),
        (lambda: ProfileKwargs(schedule_option={"activ": 1}), "Did you mean 'active'"),
        (lambda: TorchDynamoPlugin(mode="fast"), "mode"),
        (lambda: TorchDynamoPlugin(mode="default", options={"a": 1}), "exclude each other"),
    ],
)
def test_wrong_values_are_refused_when_the_object_is_made(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_profiler_is_built_and_records():
    traces = []
    options = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 2, "repeat": 1},
        on_trace_ready=lambda profiler: traces.append(profiler.key_averages()),
        record_shapes=True,
    )
    with options.build() as profiler:
        for _ in range(5):
            torch.ones(8, 8) @ torch.ones(8, 8)
            profiler.step()
    assert len(traces) == 1
    products = [event for event in traces[0] if event.key == "aten::mm"]
    assert sum(event.count for event in products) == 2


def test_the_default_profiler_covers_what_is_there():
    assert torch.profiler.ProfilerActivity.CPU in ProfileKwargs().build().activities


def test_an_activity_that_this_torch_lacks_is_an_error(monkeypatch):
    monkeypatch.delattr(torch.profiler.ProfilerActivity, "MTIA")
    with pytest.raises(ConfigurationError, match="no profiler activity 'mtia'"):
        ProfileKwargs(activities=["mtia"]).build()


class DynamoBackend(str, enum.Enum):
    INDUCTOR = "INDUCTOR"


@pytest.mark.parametrize("backend", ["inductor", "INDUCTOR", DynamoBackend.INDUCTOR])
def test_compiler_backends_in_any_spelling(backend):
    options = TorchDynamoPlugin(backend=backend, dynamic=None, use_regional_compilation=True)
    assert options.enabled
    assert options.to_kwargs() == {"backend": "inductor"}


def test_compile_takes_the_keywords():
    options = TorchDynamoPlugin(backend="eager", fullgraph=True, dynamic=False, mode="default")
    assert torch.compile(lambda x: x + 1, **options.to_kwargs())(torch.ones(1)).item() == 2
    assert not TorchDynamoPlugin(backend="inductor", disable=True).enabled
    assert not TorchDynamoPlugin().enabled
    assert not TorchDynamoPlugin(backend="NO").enabled


def test_sections_and_keywords_are_distinct():
    assert len({option.target for option in CORE_OPTIONS.values()}) == len(CORE_OPTIONS)
    keywords = [option.keyword for option in CORE_OPTIONS.values() if option.keyword]
    assert len(set(keywords)) == len(keywords)


def test_importing_the_configuration_leaves_torch_out():
    code = (
        "import sys, drivetrain.config as c, drivetrain._builtin.plugin, drivetrain._engine.resolve, drivetrain.cli.explain,"
        "drivetrain.cli.env; [getattr(c, n) for n in c.__all__]; sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
