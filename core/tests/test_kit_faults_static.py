"""Each promise of PluginConformance is shown to be checked: a plugin that breaks it fails the test of that promise."""

import pytest

from drivetrain._plugins import Registry
from drivetrain.testing.distributions import entry_points_in, write_plugin
from drivetrain.testing.static import PluginConformance

HEAD = """
from drivetrain.hookspecs import hookimpl
from drivetrain.specs import BackendSpec, ClusterSpec, Detection, Score, TrackerSpec

DRIVETRAIN_API = 1
"""

GOOD = (
    HEAD
    + """
@hookimpl
def drivetrain_register_trackers():
    return [
        TrackerSpec(
            name="planted", summary="writes nothing", target="{package}.tracker:Planted", options="{package}.options:PlantedOptions"
        )
    ]
"""
)

TRACKER = """
from drivetrain.interfaces import Tracker


class Planted(Tracker):
    pass
"""

OPTIONS = """
from dataclasses import dataclass
from drivetrain.config import Options


@dataclass
class PlantedOptions(Options):
    \"\"\"Settings.

    Args:
        size: How large.
    \"\"\"

    size: int = 3
"""


@pytest.fixture
def make_kit(tmp_path, monkeypatch):
    """A kit for a plugin with these sources, in a package of its own."""
    made = []

    def make(entry=GOOD, tracker=TRACKER, options=OPTIONS, **files):
        package = f"planted_{tmp_path.name.rpartition('_')[2]}_{abs(hash(tmp_path))}_{len(made)}"
        made.append(package)
        folder = tmp_path / package
        folder.mkdir()
        source = entry.replace("{package}", package)
        write_plugin(
            folder,
            "planted",
            source,
            module=f"{package}.plugin",
            files={
                f"{package}/__init__.py": "",
                f"{package}/tracker.py": tracker,
                f"{package}/options.py": options.replace('\\"', '"'),
                **{f"{package}/{name}.py": text for name, text in files.items()},
            },
        )
        monkeypatch.syspath_prepend(str(folder))

        class Kit(PluginConformance):
            plugin = "planted"
            registry = Registry.discover(environ={}, entry_points=entry_points_in(folder))

        return Kit()

    return make


@pytest.mark.parametrize("name", [name for name in dir(PluginConformance) if name.startswith("test_")])
def test_a_good_plugin_passes(make_kit, name):
    getattr(make_kit(), name)()


BACKEND = """
@hookimpl
def drivetrain_register_backends():
    return [BackendSpec(name="planted", summary="trains nothing", target="drivetrain.interfaces:Backend")]


@hookimpl
def drivetrain_detect_backend(request):
    return [Detection("planted", Score.FALLBACK, "always")]
"""


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("test_it_is_found_and_loads", "raise ImportError('planted')", "has the status 'failed'"),
        ("test_it_is_found_and_loads", "DRIVETRAIN_API = 1", "offers nothing"),
        ("test_it_is_found_and_loads", GOOD.replace("register_trackers()", "register_trackers(x=1)"), "failed"),
        ("test_it_is_found_and_loads", GOOD.replace("register_trackers", "register_trackerz"), "failed"),
        ("test_its_api_number", GOOD.replace("DRIVETRAIN_API = 1", "DRIVETRAIN_API = 99"), "DRIVETRAIN_API is 99"),
        ("test_its_api_number", GOOD.replace("DRIVETRAIN_API = 1", ""), "DRIVETRAIN_API is None"),
        ("test_its_entry_module_is_light", GOOD + "import torch", "imports .*'torch'"),
        ("test_its_entry_module_is_light", GOOD + "from drivetrain.interfaces import Backend", "imports .*'torch'"),
        ("test_what_it_names_can_be_imported_and_fits", GOOD.replace(":Planted", ":Absent"), "can't be imported"),
        (
            "test_what_it_names_can_be_imported_and_fits",
            GOOD.replace(".tracker:Planted", ".options:PlantedOptions"),
            "derive",
        ),
        ("test_every_spec_has_a_summary", GOOD.replace("writes nothing", ""), "has no summary"),
        ("test_every_spec_has_a_summary", GOOD.replace("writes nothing", "x" * 101), "one short line"),
        (
            "test_hooks_answer_alike_each_time",
            GOOD.replace('"writes nothing"', "str(next(NUMBERS))") + "NUMBERS = iter(range(99))",
            "two answers",
        ),
        (
            "test_hooks_answer_alike_each_time",
            GOOD.replace(
                "    return", "    import os, time; os.environ['PLANTED_NOW'] = str(time.monotonic_ns())\n    return"
            ),
            "changed os.environ",
        ),
        (
            "test_hooks_answer_alike_each_time",
            HEAD + BACKEND.replace('Detection("planted"', 'Detection("ddp"'),
            "which it doesn't offer",
        ),
        ("test_hooks_answer_alike_each_time", HEAD + BACKEND.replace('"always"', '" "'), "gives no reason"),
        (
            "test_clusters_say_how_to_know_them",
            HEAD
            + "@hookimpl\ndef drivetrain_register_clusters():\n    return [ClusterSpec(name='p', summary='s', rank=('R',))]",
            "without a world size",
        ),
        ("test_it_uses_public_modules_alone", GOOD + "import drivetrain._plugins", "imports drivetrain._plugins"),
        ("test_it_uses_public_modules_alone", GOOD + "from drivetrain import _lazy", "imports drivetrain._lazy"),
    ],
)
def test_entry_modules(make_kit, monkeypatch, name, entry, message):
    monkeypatch.setenv("PLANTED_NOW", "before")  # so that it is put back afterwards
    with pytest.raises(AssertionError, match=message):
        getattr(make_kit(entry), name)()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "test_options_have_plain_types",
            OPTIONS.replace("size: int = 3", "size: object = 3"),
            r"plain types: \['size'\]",
        ),
        (
            "test_options_have_plain_types",
            OPTIONS.replace("size: int = 3", "size: Unknown = 3"),
            "plain types|isn't defined",
        ),
        (
            "test_options_are_documented",
            OPTIONS.replace("size: How large.", "some: thing"),
            r"says nothing about \['size'\]",
        ),
        (
            "test_what_it_names_can_be_imported_and_fits",
            OPTIONS.replace("(Options)", ""),
            "isn't a dataclass that derives",
        ),
        ("test_what_it_names_can_be_imported_and_fits", OPTIONS.replace(" = 3", ""), "without a default"),
        ("test_what_it_names_can_be_imported_and_fits", OPTIONS.replace(" = 3", " = '3'"), "don't fit the schema"),
    ],
)
def test_options(make_kit, name, options, message):
    if "Unknown" in options:
        options = "from __future__ import annotations\n" + options
    with pytest.raises(AssertionError, match=message):
        getattr(make_kit(options=options), name)()


def test_private_modules_anywhere_in_the_package(make_kit):
    with pytest.raises(AssertionError, match=r"tracker\.py imports drivetrain\._engine\.plan"):
        make_kit(
            tracker=TRACKER + "from drivetrain._engine.plan import PreparePlan"
        ).test_it_uses_public_modules_alone()
