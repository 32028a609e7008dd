"""The plan in live ranks, with the real registry."""

import os

import pytest

from drivetrain._engine.availability import detect_devices
from drivetrain._engine.plan import Arguments
from drivetrain._engine.resolve import resolve
from drivetrain._plugins import get_registry
from drivetrain.checkpoint.project import ProjectConfiguration
from drivetrain.errors import ConfigurationError


def make_plan(**given):
    registry = get_registry()
    return resolve(
        Arguments.collect(**given),
        registry=registry,
        environ=os.environ,
        availability=detect_devices(registry.specs("device").values()),
    )


def test_ranks_make_the_same_plan_and_know_who_they_are(ranks):
    def look():
        before = dict(os.environ)
        plan = make_plan(cpu=True, mixed_precision="bf16", project_dir=f"runs/{os.environ['RANK']}")
        assert dict(os.environ) == before
        return plan.process, plan.device.name, plan.precision.name, plan.backend.capabilities, plan.fingerprint()

    results = ranks.run(look)
    assert [process.rank for process, *_ in results] == [0, 1]
    assert {process.world_size for process, *_ in results} == {2}
    assert {process.rendezvous for process, *_ in results} == {"env://"}
    assert {(device, precision) for _, device, precision, _, _ in results} == {("cpu", "bf16")}
    assert results[0][-1] == results[1][-1]


def test_builtin_trackers_and_formats_have_options_that_resolve(monkeypatch):
    monkeypatch.setenv("DRIVETRAIN_JSONL_RUN_NAME", "first")
    monkeypatch.setenv("DRIVETRAIN_TRACKING_FINISH_TIMEOUT", "7")
    plan = make_plan(cpu=True, log_with="jsonl", project_dir="runs")
    assert plan.notes == ()
    assert plan.options_of(plan.trackers[0]).run_name == "first"
    assert plan.options["TrackingOptions"].finish_timeout == 7.0


def test_a_project_configuration_says_where_the_project_is(monkeypatch):
    monkeypatch.setenv("DRIVETRAIN_PROJECT_DIR", "elsewhere")
    config = ProjectConfiguration(project_dir="here", total_limit=2)
    plan = make_plan(cpu=True, project_config=config)
    assert (plan.settings.project_dir, plan.settings.logging_dir) == ("here", "here")
    assert plan.options["ProjectConfiguration"] is config
    with pytest.raises(ConfigurationError, match=r"project_dir='argument' .* contradict each other"):
        make_plan(cpu=True, project_config=config, project_dir="argument")
    monkeypatch.setenv("DRIVETRAIN_PROJECT_TOTAL_LIMIT", "3")
    assert make_plan(cpu=True).options["ProjectConfiguration"].total_limit == 3
    assert make_plan(cpu=True, project_config=config).options["ProjectConfiguration"].total_limit == 2


@pytest.mark.parametrize(
    ("given", "project", "logs"),
    [
        ({"project_dir": "a"}, "a", "a"),
        ({"project_dir": "a", "logging_dir": "b"}, "a", "b"),
        ({"logging_dir": "b"}, None, "b"),
        ({"project_dir": "a", "project_config": ProjectConfiguration(total_limit=1)}, "a", "a"),
        ({"project_config": ProjectConfiguration(project_dir="a", logging_dir="b")}, "a", "b"),
        ({"project_config": ProjectConfiguration(project_dir="a"), "logging_dir": "b"}, "a", "b"),
        ({}, None, None),
    ],
)
def test_settings_and_project_configuration_name_the_same_directories(given, project, logs):
    plan = make_plan(cpu=True, **given)
    configuration = plan.option(ProjectConfiguration)
    assert (plan.settings.project_dir, plan.settings.logging_dir) == (project, logs)
    assert (configuration.project_dir, configuration.logging_dir) == (project, logs)


def test_directories_from_the_environment_reach_the_project_configuration(monkeypatch):
    monkeypatch.setenv("DRIVETRAIN_LOGGING_DIR", "logs")
    plan = make_plan(cpu=True, project_config=ProjectConfiguration(project_dir="here"))
    assert plan.options["ProjectConfiguration"].logging_dir == plan.settings.logging_dir == "logs"
    assert str(plan.origins["ProjectConfiguration.logging_dir"]) == "DRIVETRAIN_LOGGING_DIR"


def test_launch_settings_in_the_same_file_are_no_surprise(tmp_path):
    path = tmp_path / "drivetrain.toml"
    path.write_text("[launch]\nnum_processes = 2\n[local]\nshutdown_timeout = 5\n[tracking]\nfinish_timeout = 5.0\n")
    assert make_plan(cpu=True, config_file=path).notes == ()
