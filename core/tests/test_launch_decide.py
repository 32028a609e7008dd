"""What `drivetrain launch` decides: how many processes and why, which variables ranks get, what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from drivetrain._builtin import plugin
from drivetrain.errors import ConfigurationError, PluginNotFoundError, UnsupportedError
from drivetrain.launch._decide import _DEBUG, Command, decide
from drivetrain.launch.options import LaunchOptions
from drivetrain.specs import BackendSpec, Capability, Detection, LauncherSpec, Score
from drivetrain.testing.catalog import MemoryRegistry, devices

FAR = BackendSpec(
    name="far",
    target="far:Far",
    capabilities=frozenset({Capability.DISTRIBUTED}),
    launch_environment={"FAR_MODE": "fast", "FAR_SEED": "1"},
)
SEVERAL = MemoryRegistry([plugin], specs=[FAR], detections=[Detection("far", Score.POSSIBLE, "several processes")])
ALONE = MemoryRegistry([plugin], commands=['pip install "drivetrain[far]"'])


def _decide(
    given=None,
    settings=None,
    *,
    registry=SEVERAL,
    environ=None,
    local=None,
    per_machine=None,
    sections=None,
    words=("x.py",),
    **counts,
):
    return decide(
        Command(words=words, per_machine=per_machine),
        LaunchOptions(**(given or {})),
        settings or {},
        local,
        sections,
        registry=registry,
        environ=environ or {},
        availability=devices(registry, **counts),
    )


def test_without_any_setting_there_is_one_process_per_accelerator():
    decision = _decide(cuda=4)
    assert decision.request.num_processes == 4
    assert decision.plan.device.name == "cuda"
    assert decision.reasons == ("4 processes, one for each cuda device found. For another number: --num-processes N.",)


def test_without_an_accelerator_there_is_one_process_and_the_way_to_more_is_said():
    decision = _decide()
    assert decision.request.num_processes == 1
    (reason,) = decision.reasons
    assert "no accelerator was found" in reason and "--num-processes N" in reason


def test_the_cpu_that_was_asked_for():
    decision = _decide(settings={"cpu": True}, cuda=4)
    assert decision.request.num_processes == 1
    assert "it was asked for" in decision.reasons[0]
    assert decision.request.environment["DRIVETRAIN_CPU"] == "true"


def test_one_process_per_accelerator_of_each_machine():
    given = {"num_machines": 2, "machine_rank": 1, "main_process_ip": "a", "main_process_port": 29500}
    decision = _decide(given, cuda=4)
    assert decision.request.num_processes == 8
    assert "4 processes on each machine" in decision.reasons[0]


def test_a_number_that_was_given_needs_no_words():
    decision = _decide({"num_processes": 2}, {"cpu": True})
    assert (decision.request.num_processes, decision.reasons) == (2, ())


@pytest.mark.parametrize(("text", "total"), [("3", 3), ("auto", 2), ("gpu", 2)])
def test_torchruns_number_per_machine(text, total):
    assert _decide(per_machine=text, cuda=2).request.num_processes == total


def test_torchruns_number_per_machine_is_multiplied():
    given = {"num_machines": 2, "main_process_ip": "a", "main_process_port": 29500}
    assert _decide(given, per_machine="3").request.num_processes == 6


def test_the_strongest_source_wins(tmp_path):
    file = tmp_path / "drivetrain.toml"
    file.write_text("[launch]\nnum-processes = 3\nmax_restarts = 2\n[local]\nshutdown_timeout = 5.0\n")
    environ = {"DRIVETRAIN_CONFIG_FILE": str(file)}
    decision = _decide(environ=environ, settings={"cpu": True})
    assert (decision.request.num_processes, decision.request.max_restarts) == (3, 2)
    assert decision.request.options == {"shutdown_timeout": 5.0}
    environ["DRIVETRAIN_LAUNCH_NUM_PROCESSES"] = "4"
    environ["DRIVETRAIN_LOCAL_SHUTDOWN_TIMEOUT"] = "6"
    decision = _decide(environ=environ, settings={"cpu": True})
    assert (decision.request.num_processes, decision.request.options) == (4, {"shutdown_timeout": 6.0})
    decision = _decide({"num_processes": 5}, environ=environ, settings={"cpu": True}, local={"shutdown_timeout": 7.0})
    assert (decision.request.num_processes, decision.request.options) == (5, {"shutdown_timeout": 7.0})


def test_an_unknown_key_of_the_file_is_named_with_its_line_and_the_nearest(tmp_path):
    file = tmp_path / "drivetrain.toml"
    file.write_text("[launch]\nnum_proceses = 3\n")
    with pytest.raises(ConfigurationError, match=r"drivetrain\.toml:2.*num_proceses.*num_processes"):
        _decide(settings={"config_file": str(file)})


def test_flags_reach_the_ranks_as_variables():
    settings = {"mixed_precision": "bf16", "gradient_accumulation_steps": 4, "debug": True, "cpu": True}
    decision = _decide({"num_processes": 2, "num_cpu_threads_per_process": 3}, settings)
    assert {k: v for k, v in decision.request.environment.items() if k not in _DEBUG} == {
        "DRIVETRAIN_MIXED_PRECISION": "bf16",
        "DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS": "4",
        "DRIVETRAIN_DEBUG": "true",
        "DRIVETRAIN_CPU": "true",
        "OMP_NUM_THREADS": "3",
        "FAR_MODE": "fast",
        "FAR_SEED": "1",
    }


def test_debugging_has_libraries_say_more_unless_the_user_has_said_how_much(tmp_path):
    decision = _decide({"num_processes": 2}, {"debug": True}, environ={"NCCL_DEBUG": "INFO"})
    wanted = {k: v for k, v in _DEBUG.items() if k != "NCCL_DEBUG"}
    assert wanted.items() <= decision.request.environment.items()
    assert "NCCL_DEBUG" not in decision.request.environment
    (tmp_path / "drivetrain.toml").write_text("debug = true\n")
    decision = _decide({"num_processes": 2}, {"config_file": str(tmp_path / "drivetrain.toml")})
    assert decision.request.environment["DRIVETRAIN_DEBUG"] == "true"


def test_settings_of_sections_travel_as_variables_and_a_launchers_go_to_it():
    decision = _decide({"num_processes": 2}, sections={"ddp": {"bucket_cap_mb": "3"}, "local": {"role": "x"}})
    assert decision.request.environment["DRIVETRAIN_DDP_BUCKET_CAP_MB"] == "3"
    assert decision.request.options == {"role": "x"}
    registry = MemoryRegistry([plugin], specs=[LauncherSpec(name="moon", target="moon:Launcher")])
    with pytest.raises(ConfigurationError, match="--moon-phase is a setting of the launcher 'moon'.*--on moon"):
        _decide({"num_processes": 1}, sections={"moon": {"phase": "3"}}, registry=registry)


def test_a_range_of_machines():
    given = {"num_machines": 4, "min_machines": 1, "main_process_ip": "a", "main_process_port": 29500}
    request = _decide(given, per_machine="2").request
    assert (request.num_processes, request.num_machines, request.min_machines, request.elastic) == (8, 4, 1, True)
    with pytest.raises(ConfigurationError, match="make no range"):
        _decide({**given, "min_machines": 5}, per_machine="2")


def test_the_config_file_is_found_from_any_directory(tmp_path, monkeypatch):
    (tmp_path / "here.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    decision = _decide({"num_processes": 1}, {"config_file": "here.toml"})
    assert Path(decision.request.environment["DRIVETRAIN_CONFIG_FILE"]) == tmp_path / "here.toml"


def test_what_the_backend_needs_is_set_unless_the_user_has_set_it():
    decision = _decide({"num_processes": 2}, environ={"FAR_SEED": "7"})
    assert decision.request.environment == {"FAR_MODE": "fast"}


def test_a_world_without_a_distributed_backend_stops_with_the_install_command():
    with pytest.raises(PluginNotFoundError, match=r'2 processes.*pip install "drivetrain\[far\]"'):
        _decide({"num_processes": 2}, registry=ALONE)


def test_one_process_needs_no_backend():
    assert _decide({"num_processes": 1}, registry=ALONE).request.num_processes == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"mixed_precision": "bf17"}, "precision 'bf17'"), ({"backend": "fra"}, "backend 'fra'")],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_name_that_nothing_knows(settings, message, ranks):
    with pytest.raises(PluginNotFoundError, match=message):
        _decide({"num_processes": ranks}, settings)


def test_a_backend_that_can_not_serve_several_processes():
    with pytest.raises(UnsupportedError, match="one process, and there are 2"):
        _decide({"num_processes": 2}, {"backend": "single"})


def test_chosen_devices_are_made_visible_and_counted():
    decision = _decide({"gpu_ids": "0,2"}, cuda=4)
    assert decision.request.num_processes == 2
    assert decision.request.environment["CUDA_VISIBLE_DEVICES"] == "0,2"
    with pytest.raises(ConfigurationError, match="nothing to choose from on cpu"):
        _decide({"gpu_ids": "0"})


def test_more_processes_than_devices_is_said():
    assert _decide({"num_processes": 3}, cuda=2).reasons == ("3 processes share 2 devices (cuda) on this machine.",)


@pytest.mark.parametrize(
    ("given", "per_machine", "message"),
    [
        ({"num_processes": 2}, "2", "given twice"),
        ({}, "two", "at least 1, or auto, gpu or cpu"),
        ({}, "gpu", "no accelerator was found"),
        ({"num_processes": 0}, None, "at least 1"),
        ({"num_machines": 0}, None, "at least 1"),
        ({"num_processes": 2, "num_machines": 2}, None, "where to meet"),
        ({"machine_rank": 2}, None, "between 0 and 0"),
    ],
)
def test_numbers_that_make_no_sense(given, per_machine, message):
    with pytest.raises(ConfigurationError, match=message):
        _decide(given, per_machine=per_machine)


def test_another_launcher():
    other = LauncherSpec(name="moon", target="moon:Launcher")
    registry = MemoryRegistry([plugin], specs=[other])
    decision = _decide({"on": "moon", "num_processes": 1}, registry=registry)
    assert decision.launcher is other
    with pytest.raises(ConfigurationError, match="'moon' has no settings, so rdzv_id"):
        _decide({"on": "moon", "num_processes": 1}, registry=registry, local={"rdzv_id": "x"})
    with pytest.raises(PluginNotFoundError, match="launcher 'mars'"):
        _decide({"on": "mars"}, registry=registry)
