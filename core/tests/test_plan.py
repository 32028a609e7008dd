"""The plan as a whole: files and variables, notes, rows, data, fingerprint, purity."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from drivetrain._builtin import plugin as builtin
from drivetrain._engine.plan import Arguments
from drivetrain._engine.report import plan_text
from drivetrain._engine.resolve import resolve
from drivetrain.config import GradScalerKwargs, Options, ProfileKwargs
from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.specs import BackendSpec, Capability, Detection, Score
from drivetrain.testing.catalog import MemoryRegistry, devices


@dataclass
class ToyOptions(Options):
    bucket_size: int = 25


TOY = BackendSpec(name="my-toy", capabilities=frozenset(Capability), options=f"{__name__}:ToyOptions")
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def rank(number, world=2):
    return {
        "RANK": str(number),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(number),
        "LOCAL_WORLD_SIZE": str(world),
        **MEETING,
    }


def plan(*, environ=None, available=None, version="1.0", **given):
    said = [Detection("my-toy", Score.POSSIBLE, "toys")] if "RANK" in (environ or {}) else []
    registry = MemoryRegistry([builtin], specs=[TOY], detections=said, version=version)
    return resolve(
        Arguments.collect(**given),
        registry=registry,
        environ=environ or {},
        availability=devices(registry, **(available or {})),
    )


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path):
    def write(text):
        path = tmp_path / "drivetrain.toml"
        path.write_text(text)
        return str(path)

    return write


def test_the_argument_names_the_file_before_the_variable(write):
    path = write('mixed_precision = "bf16"\n[my-toy]\nbucket-size = 7\n')
    result = plan(config_file=path, environ={"DRIVETRAIN_CONFIG_FILE": "/absent.toml"})
    assert result.precision.name == "bf16"
    assert str(result.origins["mixed_precision"]) == f"{path}:1"
    assert result.settings.config_file == path
    by_variable = plan(environ={"DRIVETRAIN_CONFIG_FILE": path, **rank(0)})
    assert by_variable.options_of(TOY).bucket_size == 7
    assert str(by_variable.origins["ToyOptions.bucket_size"]) == f"{path}:3"


def test_unknown_keys_in_a_known_section_are_errors_even_if_the_spec_is_not_used(write):
    path = write("[my-toy]\nbuket_size = 7\n")
    with pytest.raises(
        ConfigurationError, match=r"drivetrain.toml:2: \[my_toy\].*'buket_size'. Did you mean 'bucket_size'"
    ):
        plan(config_file=path)
    with pytest.raises(ConfigurationError, match=r"\[single\] has no setting 'x'"):
        plan(config_file=write("[single]\nx = 1"))
    with pytest.raises(ConfigurationError, match=r":2: \[grad_scaler\].*init_scale"):
        plan(config_file=write("[grad_scaler]\ninit_scal = 1.0"))


def test_sections_of_plugins_that_are_not_installed_are_noted(write):
    path = write("[absent]\nx = 1\n")
    result = plan(config_file=path)
    (note,) = result.notes
    assert note.startswith(f"{path}:1: no installed plugin has the section [absent], so it has no effect here.")


# -- notes -------------------------------------------------------------------------------------------------------------


def test_accelerates_variables_are_named_in_one_note_with_ours():
    environ = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_USE_SOMETHING": "true",
        "ACCELERATE_ELSE": "1",
    }
    result = plan(environ=environ)
    assert result.precision.name == "fp32"
    assert result.settings.gradient_accumulation_steps == 1
    (note,) = result.notes
    for pair in (
        "ACCELERATE_MIXED_PRECISION (use DRIVETRAIN_MIXED_PRECISION)",
        "ACCELERATE_USE_CPU (use DRIVETRAIN_CPU)",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS (use DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS)",
        "ACCELERATE_USE_SOMETHING (use DRIVETRAIN_BACKEND)",
        "ACCELERATE_ELSE,",
    ):
        assert pair in note


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("DRIVETRAIN_MIXED_PRECISON", "nothing reads it. Did you mean DRIVETRAIN_MIXED_PRECISION?"),
        ("DRIVETRAIN_GRAD_SCALER_INITIAL_SCALE", "nothing reads it. Did you mean DRIVETRAIN_GRAD_SCALER_INIT_SCALE?"),
        ("DRIVETRAIN_MY_TOY_BUCKET", "nothing reads it. Did you mean DRIVETRAIN_MY_TOY_BUCKET_SIZE?"),
        ("DRIVETRAIN_QQQ", "nothing reads it."),
        ("DRIVETRAIN_PLUGINS", None),
        ("DRIVETRAIN_DISABLE_PLUGINS", None),
        ("DRIVETRAIN_MY_TOY_BUCKET_SIZE", None),
        ("DRIVETRAIN_PROJECT_DIR", None),
        ("OTHER_MIXED_PRECISON", None),
    ],
)
def test_variables_that_nothing_reads_are_noted(name, note):
    notes = plan(environ={name: "1"}).notes
    assert notes == () if note is None else notes == (f"{name} is set, but {note}",)


def test_more_processes_than_devices_are_noted():
    assert "share 2 cuda devices" in plan(environ=rank(0, 4), available={"cuda": 2}).notes[0]
    # a launcher that shows each process its own device
    assert plan(environ=rank(0, 4), available={"cuda": 1}).notes == ()


# -- what the plan says ------------------------------------------------------------------------------------------------


def test_rows_say_what_why_and_from_where():
    rows = {
        (row.part, row.name): row
        for row in plan(
            mixed_precision="bf16",
            environ={"DRIVETRAIN_DEBUG": "on"},
            kwargs_handlers=[GradScalerKwargs(init_scale=2.0)],
        ).rows()
    }
    assert rows["chosen", "backend"].value == "single (drivetrain._builtin.plugin 1.0)"
    assert rows["chosen", "backend"].why == "one process"
    assert rows["chosen", "process"].value == "one process"
    assert (rows["settings", "mixed_precision"].value, rows["settings", "mixed_precision"].why) == ("bf16", "argument")
    assert (rows["settings", "debug"].value, rows["settings", "debug"].why) == ("yes", "DRIVETRAIN_DEBUG")
    assert rows["settings", "cpu"].why == "default"
    assert rows["options", "GradScalerKwargs.init_scale"].value == "2.0"
    assert rows["rejected", "device cuda"].why == "not on this machine"


def test_text_fits_the_width_and_holds_every_row():
    text = plan_text(plan(kwargs_handlers=[GradScalerKwargs()], environ={"ACCELERATE_USE_CPU": "1"}), width=80)
    assert max(map(len, text.splitlines())) <= 80
    for title in ("Chosen", "Settings", "Options", "Not chosen", "Notes"):
        assert title in text.splitlines()
    assert "  GradScalerKwargs  all  default" in text.splitlines()
    assert max(map(len, plan_text(plan(), width=60).splitlines())) <= 60


def test_data_is_json():
    data = plan(
        kwargs_handlers=[ProfileKwargs(on_trace_ready=print)], rng_types=["torch"], project_dir="runs"
    ).to_dict()
    assert json.loads(json.dumps(data)) == data
    assert data["settings"]["rng_types"] == {"value": ["torch"], "origin": "argument"}
    assert data["process"]["world_size"] == 1
    assert data["options"]["ProfileKwargs"]["on_trace_ready"]["value"] == "builtins.print"


@dataclass
class CloudOptions(Options):
    api_key: str | None = None
    address: str = ""
    max_tokens: int = 3


def test_secrets_are_not_shown():
    cloud = BackendSpec(name="cloud", capabilities=frozenset(Capability), options=f"{__name__}:CloudOptions")
    registry = MemoryRegistry([builtin], specs=[cloud])
    options = CloudOptions(api_key="hunter2", address="https://me:hunter2@host", max_tokens=7)
    result = resolve(Arguments.collect(backend=options), registry=registry, environ={}, availability=devices(registry))
    assert result.options_of(cloud).api_key == "hunter2"
    shown = json.dumps(result.to_dict()) + plan_text(result)
    assert "hunter2" not in shown
    assert result.to_dict()["options"]["CloudOptions"]["max_tokens"]["value"] == 7


# -- equal on all ranks ------------------------------------------------------------------------------------------------


def test_fingerprints_are_equal_on_all_ranks_and_ignore_paths():
    plans = [plan(environ=rank(i, 3), mixed_precision="bf16", project_dir=f"/node{i}") for i in range(3)]
    assert len({json.dumps(p.fingerprint(), sort_keys=True) for p in plans}) == 1
    assert [p.process.rank for p in plans] == [0, 1, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"version": "1.1"},
        {"mixed_precision": "fp16"},
        {"gradient_accumulation_steps": 2},
        {"available": {"cuda": 2}},
        {"backend": ToyOptions(bucket_size=26)},
        {"environ": {**rank(0), "DRIVETRAIN_MY_TOY_BUCKET_SIZE": "26"}},
        {"environ": rank(0, 4)},
    ],
)
def test_fingerprints_differ_where_ranks_must_not(change):
    base = plan(environ=rank(0), backend=ToyOptions())
    other = plan(**{"environ": rank(0), "backend": ToyOptions(), **change})
    if "backend" not in change and "DRIVETRAIN_MY_TOY_BUCKET_SIZE" in change.get("environ", {}):
        assert other.options_of(TOY).bucket_size == 26
    assert base.fingerprint() != other.fingerprint()


def test_fingerprints_hold_no_addresses():
    one = plan(kwargs_handlers=[ProfileKwargs(on_trace_ready=lambda p: None)])
    two = plan(kwargs_handlers=[ProfileKwargs(on_trace_ready=lambda p: None)])
    assert one.fingerprint() == two.fingerprint()


# -- purity ------------------------------------------------------------------------------------------------------------


def test_resolving_is_repeatable_and_changes_nothing():
    environ = {**rank(1), "DRIVETRAIN_DEBUG": "1"}
    before, real = dict(environ), dict(os.environ)
    handler = GradScalerKwargs(init_scale=4.0)
    first = plan(environ=environ, kwargs_handlers=[handler])
    second = plan(environ=environ, kwargs_handlers=[handler])
    assert first.to_dict() == second.to_dict()
    assert environ == before
    assert dict(os.environ) == real
    assert handler.to_kwargs() == {"init_scale": 4.0}


PURE = """
import sys, os
from drivetrain._builtin import plugin
from drivetrain._engine.plan import Arguments
from drivetrain._engine.report import plan_text
from drivetrain._engine.resolve import resolve
from drivetrain.config import GradScalerKwargs
from drivetrain.testing.catalog import MemoryRegistry, devices
before = dict(os.environ)
registry = MemoryRegistry([plugin])
arguments = Arguments.collect(mixed_precision="bf16", kwargs_handlers=[GradScalerKwargs()], project_dir="x")
plan = resolve(arguments, registry=registry, environ=os.environ, availability=devices(registry, cuda=1))
plan_text(plan), plan.to_dict(), plan.fingerprint()
assert dict(os.environ) == before
assert "torch" not in sys.modules, "torch"
"""


def test_resolving_imports_no_torch():
    subprocess.run([sys.executable, "-c", PURE], check=True)


def test_the_cost_of_resolving_is_printed(capsys):
    plan()
    start = time.perf_counter()
    for _ in range(20):
        plan(mixed_precision="bf16", environ=rank(0))
    milliseconds = (time.perf_counter() - start) / 20 * 1e3
    with capsys.disabled():
        print(f"\nresolve: {milliseconds:.2f} ms")


def test_every_refusal_is_an_error_of_ours():
    for given in ({"device": "x"}, {"backend": "x"}, {"mixed_precision": "x"}, {"log_with": "x"}):
        with pytest.raises(DrivetrainError):
            plan(**given)
