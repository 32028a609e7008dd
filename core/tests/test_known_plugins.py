"""The data file of first-party plugins agrees with the packages, and with itself."""

import json
import sys
from itertools import chain
from pathlib import Path

import pytest

import drivetrain._plugins.known as known_module
from drivetrain._plugins import KINDS, Registry, Status, find_known, kind_of, known_plugins

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


def project(path):
    return tomllib.loads((ROOT / path / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_fields_of_the_file_are_all_read():
    entries = json.loads(Path(known_module.__file__).with_name("known_plugins.json").read_text(encoding="utf-8"))
    fields = {"distribution", "extra", "available", "summary", "specs", "exports", "accepts", "distributed_types"}
    for name, entry in entries.items():
        assert set(entry) == fields, name


def test_one_rule_gives_every_name():
    for name, plugin in known_plugins().items():
        assert plugin.name == name
        assert plugin.distribution == f"drivetrain-{name}"
        assert plugin.extra in (None, name)
        assert set(plugin.specs) <= set(KINDS)
        assert plugin.summary.endswith(".")


def test_a_released_plugin_is_in_this_repository_and_an_extra_of_core():
    extras = project("core")["optional-dependencies"]
    for name, plugin in known_plugins().items():
        if plugin.available:
            assert project(f"plugins/{name}")["name"] == plugin.distribution
            assert name in project(f"plugins/{name}")["entry-points"]["drivetrain.plugins"]
        if plugin.extra is not None:
            assert any(requirement.startswith(plugin.distribution) for requirement in extras[plugin.extra])


def test_every_plugin_of_the_repository_is_known():
    for folder in (ROOT / "plugins").iterdir():
        if (folder / "pyproject.toml").exists():
            assert folder.name in known_plugins()


@pytest.mark.parametrize("what", ["exports", "accepts", "distributed_types"])
def test_no_name_belongs_to_two_plugins(what):
    names = list(chain.from_iterable(getattr(plugin, what) for plugin in known_plugins().values()))
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("space", "name", "plugin"),
    [
        ("export", "DistributedDataParallelKwargs", "ddp"),
        ("export", "DeepSpeedPlugin", "deepspeed"),
        ("export", "FullyShardedDataParallelPlugin", "fsdp"),
        ("export", "MegatronLMPlugin", "megatron"),
        ("export", "AORecipeKwargs", "torchao"),
        ("accept", "deepspeed_plugin", "deepspeed"),
        ("accept", "fsdp_plugin", "fsdp"),
        ("precision", "fp8", "torchao"),
        ("device", "xla", "xla"),
        ("launcher", "slurm", "slurm"),
    ],
)
def test_accelerates_names_lead_to_their_plugins(space, name, plugin):
    assert find_known(space, name).name == plugin


def test_what_is_not_released_has_no_install_command():
    commands = {name: plugin.install_command for name, plugin in known_plugins().items() if plugin.install_command}
    released = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
    assert commands == {name: f'pip install "drivetrain[{name}]"' for name in released}


def test_what_first_party_plugins_offer_is_what_the_file_says():
    for record in Registry.discover(environ={}).records:
        known = known_plugins().get(record.name)
        if known is None or record.status is not Status.OK:
            continue
        offered = {}
        for spec in record.specs:
            offered.setdefault(kind_of(spec), []).extend((spec.name, *getattr(spec, "aliases", ())))
        assert {kind: set(names) for kind, names in offered.items()} == {k: set(v) for k, v in known.specs.items()}
        exports = {export.partition("=")[0] for spec in record.specs for export in spec.exports}
        assert exports == set(known.exports)
        assert {keyword for spec in record.specs for keyword in spec.accepts} == set(known.accepts)
        assert known.available
