"""Every setting that text can say is a flag of `drivetrain launch`, and its value arrives in the worker."""

from __future__ import annotations

import functools
import os
import shutil

import click
import pytest
from click.testing import CliRunner

from drivetrain._plugins import get_registry
from drivetrain.cli._flags import _is_bool
from drivetrain.cli.launch import launch
from drivetrain.config import variable
from drivetrain.config.settings import CoreSettings
from drivetrain.errors import ConfigurationError

from .test_option_effects import FIELDS, SECTIONS, as_text, plain, resolved, written

#: Fields of launching itself: they say how to start workers, and are probed by what is then started.
OF_THE_LAUNCHER = ("launch", *get_registry().specs("launcher"))
#: Their flags bear no section's name.
PLAIN = ("", "launch", "local")


def arguments(cls, name, value):
    """The flag and its value as one types them."""
    flag = f"{SECTIONS[cls]}-{name}".strip("-").replace("_", "-")
    if _is_bool(cls.hints()[name]):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", as_text(value)]


def in_python_only(cls, name):
    """Whether no text can say a value (other than none)."""
    try:
        cls.convert(name, "\0", strict=False)
    except ConfigurationError as error:
        return str(error).endswith("can only be given in Python")
    return False


TYPED = [
    (cls, name)
    for cls, name in FIELDS
    if not in_python_only(cls, name)
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
    wanted = name if section in PLAIN else f"{section}__{name}"
    if in_python_only(cls, name):
        assert wanted not in names()
    elif variable(name, section) != variable("dynamo_backend"):
        assert wanted in names()


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """``worker(cls)``: what was given for each field, and the variables of a worker that was launched with all those flags."""
    folder = tmp_path_factory.mktemp("worker")
    given = values(folder)

    @functools.cache
    def launched(cls):
        flags = [word for (c, n), value in given.items() if c is cls for word in arguments(c, n, value)]
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
        assert result.exit_code == 0, result.output
        return dict(line.split("=", 1) for line in target.read_text().splitlines() if "=" in line)

    return lambda cls: (given, launched(cls))


@pytest.mark.parametrize(("cls", "name"), TYPED, ids=lambda x: getattr(x, "__name__", x))
def test_the_value_arrives_in_the_worker(worker, cls, name):
    given, found = worker(cls)
    value = given[cls, name]
    key = variable(name, SECTIONS[cls])
    text = found[key]
    seen, origin = resolved(cls, name, {key: text})
    assert (plain(seen), str(origin)) == (value, key)
    assert os.environ.get(key) is None
