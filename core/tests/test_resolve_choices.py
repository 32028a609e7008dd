"""Which device, backend, precision and trackers are chosen: decision tables."""

import types
from dataclasses import dataclass

import pytest

from drivetrain._builtin import plugin as builtin
from drivetrain._engine.plan import Arguments
from drivetrain._engine.resolve import resolve
from drivetrain.config import Options
from drivetrain.errors import (
    ConfigurationError,
    EnvironmentDetectionError,
    PluginNotFoundError,
    UnsupportedError,
)
from drivetrain.specs import (
    BackendSpec,
    Capability,
    Detection,
    DeviceSpec,
    PrecisionSpec,
    ProcessInfo,
    Score,
    TrackerSpec,
)
from drivetrain.testing.catalog import MemoryRegistry, devices

TWO = ProcessInfo(world_size=2, local_world_size=2, cluster="test", reason="a test")
HERE = __name__


@dataclass
class ManyOptions(Options):
    bucket: int = 25


@dataclass
class ShardOptions(Options):
    stage: int = 2


@dataclass
class EngineOptions(Options):
    name: str = "x"


EVERYTHING = frozenset(Capability)
MANY = BackendSpec(
    name="many", capabilities=frozenset({Capability.DISTRIBUTED, Capability.COMPILE}), options=f"{HERE}:ManyOptions"
)
SHARD = BackendSpec(
    name="shard",
    capabilities=frozenset({Capability.DISTRIBUTED}),
    devices=("cuda", "xpu"),
    precisions=("fp32", "bf16"),
    options=f"{HERE}:ShardOptions",
    accepts=("shard_plugin",),
)
ENGINE = BackendSpec(
    name="engine", capabilities=EVERYTHING, options=f"{HERE}:EngineOptions", accepts=("engine_plugin",)
)


def detect(request):
    """What plugins with these backends would say."""
    if request.process.is_distributed:
        yield Detection("many", Score.POSSIBLE, f"{request.process.world_size} processes")
    if request.process.is_distributed and request.device == "cuda":
        yield Detection("shard", 50, "several GPUs")
    if "EngineOptions" in request.option_types:
        yield Detection("engine", Score.REQUESTED, "EngineOptions were given")


PLUGIN = types.SimpleNamespace(
    __name__="backends",
    drivetrain_register_backends=lambda: [ENGINE, SHARD, MANY],
    drivetrain_detect_backend=detect,
)


def plan(arguments=None, *, registry=None, environ=None, available=None, process=None, discovered=(), **given):
    registry = registry or MemoryRegistry([builtin, PLUGIN])
    arguments = arguments or Arguments.collect(process=process, **given)
    availability = devices(registry, *discovered, **(available or {}))
    return resolve(arguments, registry=registry, environ=environ or {}, availability=availability)


def names(result):
    return result.device.name, result.backend.name, result.precision.name


# -- what is chosen ----------------------------------------------------------------------------------------------------

CHOSEN = {
    "nothing asked": ({}, ("cpu", "single", "fp32")),
    "a GPU is there": ({"available": {"cuda": 1}}, ("cuda", "single", "fp32")),
    "the best of several": ({"available": {"xpu": 1, "cuda": 1}}, ("cuda", "single", "fp32")),
    "cpu=True": ({"available": {"cuda": 1}, "cpu": True}, ("cpu", "single", "fp32")),
    "cpu by variable": ({"available": {"cuda": 1}, "environ": {"DRIVETRAIN_CPU": "yes"}}, ("cpu", "single", "fp32")),
    "cpu=False beats the variable": (
        {"available": {"cuda": 1}, "cpu": False, "environ": {"DRIVETRAIN_CPU": "1"}},
        ("cuda", "single", "fp32"),
    ),
    "a device by name": ({"available": {"cuda": 1, "xpu": 1}, "device": "xpu"}, ("xpu", "single", "fp32")),
    "device= beats DRIVETRAIN_CPU": (
        {"available": {"cuda": 1}, "device": "cuda", "environ": {"DRIVETRAIN_CPU": "1"}},
        ("cuda", "single", "fp32"),
    ),
    "cpu=True beats DRIVETRAIN_DEVICE": (
        {"available": {"cuda": 1}, "cpu": True, "environ": {"DRIVETRAIN_DEVICE": "cuda"}},
        ("cpu", "single", "fp32"),
    ),
    "precision": ({"mixed_precision": "bf16"}, ("cpu", "single", "bf16")),
    "precision's alias": ({"mixed_precision": "no"}, ("cpu", "single", "fp32")),
    "precision by variable": ({"environ": {"DRIVETRAIN_MIXED_PRECISION": "fp16"}}, ("cpu", "single", "fp16")),
    "two processes": ({"process": TWO}, ("cpu", "many", "fp32")),
    "the higher score": ({"process": TWO, "available": {"cuda": 2}}, ("cuda", "many", "fp32")),
    "backend by name": ({"process": TWO, "available": {"cuda": 2}, "backend": "shard"}, ("cuda", "shard", "fp32")),
    "backend by variable": ({"environ": {"DRIVETRAIN_BACKEND": "engine"}}, ("cpu", "engine", "fp32")),
    "backend=auto beats the variable": (
        {"backend": "auto", "environ": {"DRIVETRAIN_BACKEND": "engine"}},
        ("cpu", "single", "fp32"),
    ),
    "backend by options": ({"backend": EngineOptions()}, ("cpu", "engine", "fp32")),
    "backend by options, two processes": ({"process": TWO, "backend": ManyOptions()}, ("cpu", "many", "fp32")),
    "backend by its keyword": ({"engine_plugin": EngineOptions()}, ("cpu", "engine", "fp32")),
    "backend by its keyword, GPU": (
        {"process": TWO, "available": {"cuda": 2}, "shard_plugin": ShardOptions()},
        ("cuda", "shard", "fp32"),
    ),
    "backend by a handler that its plugin takes as a wish": (
        {"kwargs_handlers": [EngineOptions()]},
        ("cpu", "engine", "fp32"),
    ),
    "a handler of a backend that doesn't apply is no wish": (
        {"kwargs_handlers": [ManyOptions()]},
        ("cpu", "single", "fp32"),
    ),
    "the device follows the backend": (
        {"available": {"cuda": 1, "npu": 1, "xpu": 1}, "backend": "npu-only"},
        ("npu", "npu-only", "fp32"),
    ),
    "a device of one process is passed over": ({"process": TWO, "available": {"mps": 1}}, ("cpu", "many", "fp32")),
    "a device of one process alone": ({"available": {"mps": 1}}, ("mps", "single", "fp32")),
    "compiling needs a backend that can": ({"process": TWO, "dynamo_backend": "inductor"}, ("cpu", "many", "fp32")),
}
NPU_ONLY = BackendSpec(name="npu-only", capabilities=EVERYTHING, devices=("npu",))


@pytest.mark.parametrize("case", CHOSEN)
def test_choices(case):
    given, expected = CHOSEN[case]
    registry = MemoryRegistry([builtin, PLUGIN], specs=[NPU_ONLY])
    assert names(plan(registry=registry, **given)) == expected


def test_a_device_that_torch_alone_knows():
    chip = DeviceSpec(name="chip", torch_type="chip", communication_backend="", priority=50)
    result = plan(discovered=[chip], available={"chip": 1})
    assert result.device is chip
    assert {c.kind: c.plugin for c in result.choices}["device"] == ""
    assert plan(discovered=[chip], available={"chip": 1, "cuda": 1}).device.name == "cuda"
    assert plan(discovered=[chip], available={"chip": 1, "cuda": 1}, device="chip").device is chip


def test_cpu_asks_no_accelerator():
    registry = MemoryRegistry([builtin])
    availability = devices(registry, cuda=4)
    resolve(Arguments.collect(cpu=True), registry=registry, environ={}, availability=availability)
    assert availability._probe.asked == ["cpu"]


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED = {
    "absent device": (
        {"device": "cuda"},
        UnsupportedError,
        "'cuda' (argument) can't be used: not on this machine. Devices here: cpu",
    ),
    "unknown device": ({"device": "gpu"}, PluginNotFoundError, "device 'gpu'"),
    "device and cpu": ({"device": "cuda", "cpu": True}, ConfigurationError, "contradict each other"),
    "device and cpu by variable": (
        {"environ": {"DRIVETRAIN_CPU": "1", "DRIVETRAIN_DEVICE": "cuda"}},
        ConfigurationError,
        "cpu=True (DRIVETRAIN_CPU) and device='cuda' (DRIVETRAIN_DEVICE)",
    ),
    "device of one process": (
        {"process": TWO, "available": {"mps": 1}, "device": "mps"},
        UnsupportedError,
        "serves one process alone, and there are 2",
    ),
    "unknown precision": ({"mixed_precision": "fp8"}, PluginNotFoundError, "precision 'fp8'"),
    "unknown backend": ({"backend": "nothing"}, PluginNotFoundError, "backend 'nothing'"),
    "one process's backend for two": (
        {"process": TWO, "backend": "single"},
        UnsupportedError,
        "'single' was asked for, but it runs one process, and there are 2. Fitting here: engine, many",
    ),
    "backend on a device that it lacks": (
        {"process": TWO, "backend": "shard"},
        UnsupportedError,
        "There is no device on which the backend 'shard' runs. Devices here: cpu.",
    ),
    "backend on a device that was asked for": (
        {"process": TWO, "available": {"cuda": 2}, "backend": "shard", "device": "cpu"},
        UnsupportedError,
        "doesn't run on cpu, only on cuda, xpu",
    ),
    "backend in a precision that it lacks": (
        {"process": TWO, "available": {"cuda": 2}, "backend": "shard", "mixed_precision": "fp16"},
        UnsupportedError,
        "doesn't work in fp16, only in fp32, bf16",
    ),
    "backend that can't compile": (
        {"process": TWO, "available": {"cuda": 2}, "backend": "shard", "dynamo_backend": "inductor"},
        UnsupportedError,
        "can't compile models (dynamo_backend='inductor')",
    ),
    "a keyword's backend that doesn't fit": (
        {"shard_plugin": ShardOptions()},
        UnsupportedError,
        "'shard' was asked for (shard_plugin= was given), but it doesn't run on cpu",
    ),
    "two keywords": (
        {"process": TWO, "available": {"cuda": 2}, "shard_plugin": ShardOptions(), "engine_plugin": EngineOptions()},
        ConfigurationError,
        "engine (engine_plugin= was given) and shard (shard_plugin= was given) fit equally well",
    ),
    "half an environment": ({"environ": {"RANK": "0"}}, EnvironmentDetectionError, "WORLD_SIZE isn't set"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_and_why(case):
    given, error, text = REFUSED[case]
    with pytest.raises(error) as caught:
        plan(**given)
    assert text in str(caught.value)


def test_several_processes_without_a_backend_for_them_stop_with_the_install_command():
    registry = MemoryRegistry([builtin], commands=['pip install "drivetrain[many]"', "pip install other"])
    with pytest.raises(PluginNotFoundError) as caught:
        plan(registry=registry, process=TWO)
    text = str(caught.value)
    assert "There are 2 processes (a test)" in text
    assert "single: it runs one process, and there are 2" in text
    assert 'Install one: pip install "drivetrain[many]"' in text


def test_equal_scores_are_an_error_whatever_the_order_and_say_how_to_choose():
    a, b = (BackendSpec(name=name, capabilities=EVERYTHING) for name in "ab")
    said = [Detection("a", Score.PREFERRED, "it is a"), Detection("b", Score.PREFERRED, "it is b")]
    texts = set()
    for specs in ([a, b], [b, a]):
        for detections in (said, said[::-1]):
            registry = MemoryRegistry([builtin], specs=specs, detections=detections)
            with pytest.raises(ConfigurationError) as caught:
                plan(registry=registry)
            texts.add(str(caught.value))
    (text,) = texts
    assert "a (it is a) and b (it is b) fit equally well" in text
    assert "Accelerator(backend='a')" in text
    assert "DRIVETRAIN_BACKEND=a" in text
    assert plan(registry=registry, backend="b").backend.name == "b"


def test_equal_priorities_of_devices_are_an_error():
    twin = DeviceSpec(name="twin", torch_type="twin", communication_backend="gloo")
    registry = MemoryRegistry([builtin], specs=[twin])
    with pytest.raises(ConfigurationError, match=r"cuda and twin.*same priority.*DRIVETRAIN_DEVICE=cuda"):
        plan(registry=registry, available={"cuda": 1, "twin": 1})
    assert plan(registry=registry, available={"cuda": 1, "twin": 1}, device="twin").device is twin


def test_a_precision_that_the_device_lacks_names_those_that_it_has():
    old = DeviceSpec(name="old", torch_type="old", communication_backend="gloo", dtypes=("float32", "float16"))
    registry = MemoryRegistry([builtin], specs=[old])
    with pytest.raises(
        UnsupportedError, match=r"'bf16' \(argument\) needs bfloat16.*'old'.*Possible on it: fp32, fp16"
    ):
        plan(registry=registry, available={"old": 1}, mixed_precision="bf16")
    assert names(plan(registry=registry, available={"old": 1}, mixed_precision="fp16")) == ("old", "single", "fp16")


def test_one_backend_may_answer_twice_and_its_best_answer_counts():
    said = [Detection("a", 10, "weak"), Detection("a", 150, "strong"), Detection("gone", 300, "not installed")]
    registry = MemoryRegistry([builtin], specs=[BackendSpec(name="a", capabilities=EVERYTHING)], detections=said)
    result = plan(registry=registry)
    assert result.backend.name == "a"
    assert next(c for c in result.choices if c.kind == "backend").reason == "strong"


def test_what_was_not_chosen_is_listed_with_reasons():
    result = plan(process=TWO, available={"cuda": 2})
    rejected = {(r.kind, r.name): r.reason for r in result.rejections}
    assert rejected["backend", "shard"] == "many fits better (several GPUs, score 50)"
    assert rejected["backend", "single"] == "it runs one process, and there are 2"
    assert rejected["backend", "engine"] == "it says that it doesn't apply here"
    assert rejected["device", "cpu"] == "cuda is there and has the higher priority"
    assert rejected["device", "xpu"] == "not on this machine"


# -- trackers ----------------------------------------------------------------------------------------------------------

# The builtin plugin without its tracker, so that these are all.
BARE = types.SimpleNamespace(**{k: v for k, v in vars(builtin).items() if k != "drivetrain_register_trackers"})
TRACKERS = [TrackerSpec(name="files", needs_directory=True), TrackerSpec(name="cloud")]


def track(**given):
    return plan(registry=MemoryRegistry([BARE], specs=TRACKERS), **given)


def test_trackers_by_name_once_each():
    result = track(log_with=["files", "cloud", "files"], project_dir="runs")
    assert [t.name for t in result.trackers] == ["files", "cloud"]
    assert track().trackers == ()
    by_variable = track(environ={"DRIVETRAIN_LOG_WITH": "cloud,files", "DRIVETRAIN_LOGGING_DIR": "l"})
    assert [t.name for t in by_variable.trackers] == ["cloud", "files"]


def test_all_trackers_that_are_possible():
    result = track(log_with="all")
    assert [t.name for t in result.trackers] == ["cloud"]
    assert any(r.name == "files" and "needs a directory" in r.reason for r in result.rejections)
    assert len(track(log_with="all", project_dir="runs").trackers) == 2


def test_a_tracker_without_its_directory_and_an_unknown_one_are_errors():
    with pytest.raises(ConfigurationError, match=r"'files' \(argument\) writes files: pass project_dir="):
        track(log_with="files")
    with pytest.raises(PluginNotFoundError, match="tracker 'nothing'"):
        track(log_with=["nothing"])


def test_trackers_that_are_objects_are_passed_on():
    mine = object()
    result = track(log_with=[mine, "cloud"])
    assert result.tracker_objects == (mine,)
    assert [t.name for t in result.trackers] == ["cloud"]
    assert track(log_with=mine, environ={"DRIVETRAIN_LOG_WITH": "cloud"}).trackers == ()


def test_a_precision_of_a_plugin():
    fp8 = PrecisionSpec(name="fp8", dtypes=("bfloat16",), options=f"{HERE}:EngineOptions")
    registry = MemoryRegistry([builtin], specs=[fp8])
    result = plan(registry=registry, mixed_precision="fp8", environ={"DRIVETRAIN_FP8_NAME": "y"})
    assert result.precision is fp8
    assert result.options_of(fp8).name == "y"
