"""Every setting that text can say is a flag of `drivetrain launch`, and its value arrives in the worker."""

from __future__ import annotations

import os
import shutil

import click
import pytest
from click.testing import CliRunner

from drivetrain.cli._flags import _is_bool
from drivetrain.cli.launch import launch
from drivetrain.config import variable
from drivetrain.config.settings import CoreSettings

from .test_option_effects import FIELDS, IN_PYTHON_ONLY, SECTIONS, as_text, plain, resolved, written

#: Fields of launching itself: they say how to start workers, and are probed by what is then started.
OF_THE_LAUNCHER = ("launch", "local")


def arguments(cls, name, value):
    """The flag and its value as one types them."""
    flag = f"{SECTIONS[cls]}-{name}".strip("-").replace("_", "-")
    if _is_bool(cls.hints()[name]):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", as_text(value)]


TYPED = [
    (cls, name)
    for cls, name in FIELDS
    if f"{cls.__name__}.{name}" not in IN_PYTHON_ONLY
    and SECTIONS[cls] not in OF_THE_LAUNCHER
    and (cls is CoreSettings or variable(name, SECTIONS[cls]) != variable("dynamo_backend"))  # one variable, one flag
]


def values(tmp_path):
    """A value other than the default for every field, by field."""
    found = {(cls, name): written(cls, name) for cls, name in TYPED}
    file = tmp_path / "given.toml"
    file.touch()
    found[CoreSettings, "config_file"] = str(file)
    return found


def names():
    return {p.name for p in launch.get_params(click.Context(launch))}


@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=lambda x: getattr(x, "__name__", x))
def test_every_setting_is_a_flag(cls, name):
    section = SECTIONS[cls]
    wanted = name if section in ("", *OF_THE_LAUNCHER) else f"{section}__{name}"
    if f"{cls.__name__}.{name}" in IN_PYTHON_ONLY:
        assert wanted not in names()
    elif variable(name, section) != variable("dynamo_backend"):
        assert wanted in names()


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """The variables of a worker that was launched with a flag for every setting."""
    folder = tmp_path_factory.mktemp("worker")
    given = values(folder)
    # All at once would contradict itself: a launch per options class.
    found = {}
    for cls in SECTIONS:
        flags = [word for (c, n), value in given.items() if c is cls for word in arguments(c, n, value)]
        if not flags:
            continue
        target = folder / cls.__name__
        command = [
            "--quiet",
            "--num-processes",
            "1",
            *flags,
            "--no-python",
            shutil.which("sh"),
            "-c",
            f"env > {target}",
        ]
        result = CliRunner().invoke(launch, command)
        assert result.exit_code == 0, (cls, result.output)
        lines = target.read_text().splitlines()
        found[cls] = dict(line.split("=", 1) for line in lines if "=" in line)
    return given, found


@pytest.mark.parametrize(("cls", "name"), TYPED, ids=lambda x: getattr(x, "__name__", x))
def test_the_value_arrives_in_the_worker(worker, cls, name):
    given, found = worker
    value = given[cls, name]
    key = variable(name, SECTIONS[cls])
    text = found[cls][key]
    seen, origin = resolved(cls, name, {key: text})
    assert (plain(seen), str(origin)) == (value, key)
    assert os.environ.get(key) is None
