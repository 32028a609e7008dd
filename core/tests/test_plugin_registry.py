import sys
import timeit
import types
import warnings

import pytest

import drivetrain
from drivetrain._plugins import Registry, Status, get_registry
from drivetrain._plugins.registry import MissingExportError
from drivetrain.errors import ConfigurationError, PluginError, PluginNotFoundError, UnsupportedError
from drivetrain.specs import Detection, Request, TrackerSpec
from drivetrain.testing.distributions import entry_points_in, write_plugin

TOY = """
    from drivetrain.hookspecs import hookimpl
    from drivetrain.specs import BackendSpec, Detection, PrecisionSpec, TrackerSpec

    DRIVETRAIN_API = 1

    @hookimpl
    def drivetrain_register_trackers():
        return [
            TrackerSpec(
                name="toy",
                target="toy_code:Tracker",
                options="toy_code:ToyOptions",
                accepts=("toy_plugin",),
                exports=("ToyOptions", "Renamed=toy_code:Tracker", "gone"),
            ),
            TrackerSpec(name="broken-target", target="toy_code:NoSuchClass"),
        ]

    @hookimpl
    def drivetrain_register_precisions():
        return [PrecisionSpec(name="toy16", aliases=("t16",), target="toy_code:Precision")]

    @hookimpl
    def drivetrain_register_backends():
        return [BackendSpec(name="toy", target="toy_code:Backend"), BackendSpec(name="needy", target="toy_code:B", requires=("no-such-thing",))]

    @hookimpl
    def drivetrain_detect_backend(request):
        if request.backend == "fail":
            raise RuntimeError("boom")
        return [Detection("toy", 150, "a toy"), Detection("needy", 200, "needy"), Detection("single", 300, "not mine")]

    @hookimpl
    def drivetrain_before_save(accelerator, directory):
        from drivetrain.errors import UnsupportedError

        raise {"ours": UnsupportedError, "other": KeyError}[directory]("boom")
"""

CODE = """
    from dataclasses import dataclass
    from drivetrain.config import Options

    @dataclass
    class ToyOptions(Options):
        size: int = 3

    class Tracker: ...
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    write_plugin(tmp_path, "toy", TOY, files={"toy_code.py": CODE})
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture
def registry(site):
    return Registry.discover(environ={}, entry_points=entry_points_in(site))


def test_specs_by_name_and_alias(registry):
    assert registry.get("tracker", "toy").target == "toy_code:Tracker"
    assert registry.get("precision", "t16") is registry.get("precision", "toy16")
    assert registry.get("precision", "no").name == "fp32"
    assert registry.provider("precision", "t16").name == "toy"
    assert registry.provider("backend", "needy").name == "toy"
    assert registry.provider("backend", "single").name == "builtin"
    assert list(registry.specs("precision")) == sorted(registry.specs("precision"))
    assert "t16" not in registry.specs("precision")


def test_the_registry_cannot_be_changed(registry):
    with pytest.raises(TypeError):
        registry.specs("tracker")["x"] = TrackerSpec(name="x")
    with pytest.raises(AttributeError):
        registry.anything = 1
    with pytest.raises(AttributeError):
        registry.records[0].status = Status.OK


def test_an_unknown_name_lists_what_there_is_and_the_closest(registry):
    with pytest.raises(
        PluginNotFoundError,
        match=r"There is no tracker 'toi'. Did you mean 'toy'\? There are: broken-target, jsonl, toy\.",
    ):
        registry.get("tracker", "toi")
    with pytest.raises(PluginNotFoundError) as caught:
        registry.get("backend", "dpp")
    assert "install" not in str(caught.value), "a typo must never become an install command"


def test_a_known_name_says_what_to_install(registry):
    with pytest.raises(
        PluginNotFoundError, match=r'backend \'ddp\' isn\'t installed. Install it: pip install "drivetrain\[ddp\]"'
    ):
        registry.get("backend", "ddp")
    with pytest.raises(PluginNotFoundError, match="belongs to drivetrain-megatron, which isn't released yet") as caught:
        registry.get("backend", "megatron")
    assert "pip" not in str(caught.value)


def test_what_could_be_installed(registry, tmp_path):
    assert {'pip install "drivetrain[ddp]"', 'pip install "drivetrain[fsdp]"'} <= set(registry.installable("backend"))
    assert 'pip install "drivetrain[tensorboard]"' in registry.installable("tracker")
    assert registry.installable("checkpoint-format") == []
    write_plugin(tmp_path, "ddp", "", distribution="drivetrain-ddp", version="0.1.0")
    assert Registry.discover(environ={}, entry_points=entry_points_in(tmp_path)).installable("backend") == [
        command for command in registry.installable("backend") if "[ddp]" not in command
    ]


def test_a_disabled_first_party_plugin_is_not_offered_for_installation(tmp_path):
    write_plugin(tmp_path, "ddp", "", distribution="drivetrain-ddp", version="0.1.0")
    environ = {"DRIVETRAIN_DISABLE_PLUGINS": "ddp"}
    registry = Registry.discover(environ=environ, entry_points=entry_points_in(tmp_path))
    for ask in (lambda: registry.get("backend", "ddp"), lambda: registry.export("DistributedDataParallelKwargs")):
        with pytest.raises(PluginError, match=r"drivetrain-ddp 0.1.0.* has status 'disabled'"):
            ask()


def test_what_broken_plugins_might_offer_is_said(site):
    write_plugin(site, "wonky", "import no_such_thing")
    registry = Registry.discover(environ={}, entry_points=entry_points_in(site))
    with pytest.raises(PluginNotFoundError, match="What these broken plugins offer isn't known: wonky"):
        registry.get("tracker", "mystery")


def test_loading_a_target(registry):
    assert registry.load("tracker", "toy").__name__ == "Tracker"
    with pytest.raises(
        PluginError,
        match=r"tracker 'broken-target' of plugin 'toy' \(toy-plugin 1.0\) can't be loaded: .*AttributeError",
    ):
        registry.load("tracker", "broken-target")


# -- options, keywords, exported names -------------------------------------------------------------------------------------


def test_keywords(registry):
    assert registry.accepts() == {"toy_plugin": ("tracker", "toy")}
    assert registry.accepted_by("toy_plugin") == ("tracker", registry.get("tracker", "toy"))
    with pytest.raises(
        PluginNotFoundError, match=r"keyword 'megatron_lm_plugin' isn't available. It belongs to drivetrain-megatron"
    ):
        registry.accepted_by("megatron_lm_plugin")
    with pytest.raises(TypeError, match="unexpected keyword argument 'mixed_precison'"):
        registry.accepted_by("mixed_precison")


def test_exported_names(registry):
    assert registry.exports()["Renamed"] == ("tracker", "toy")
    assert registry.export("ToyOptions")().size == 3
    assert registry.export("Renamed").__name__ == "Tracker"
    with pytest.raises(PluginError, match="importing 'toy_code:gone' raised AttributeError"):
        registry.export("gone")
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        registry.export("NoSuchName")


def test_a_missing_export_is_an_import_error_that_says_what_to_install(registry):
    with pytest.raises(
        MissingExportError,
        match=r"name 'DDPCommunicationHookType' isn't available. Install it: pip install \"drivetrain\[ddp\]\"",
    ) as caught:
        registry.export("DDPCommunicationHookType")
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, PluginNotFoundError)
    assert not isinstance(caught.value, AttributeError), "from ... import would replace its message"


def test_a_core_name_cannot_be_exported(site, monkeypatch):
    monkeypatch.setattr(drivetrain, "__all__", ["Accelerator"], raising=False)
    source = TOY.replace('"gone"', '"Accelerator"').replace('"toy"', '"toy2"').replace("toy16", "x").replace("t16", "y")
    write_plugin(site, "shadow", source)
    registry = Registry.discover(environ={}, entry_points=[p for p in entry_points_in(site) if p.name == "shadow"])
    assert registry.plugin("shadow").reason == (
        "the exported name 'Accelerator' belongs to drivetrain itself, but plugin 'shadow' (shadow-plugin 1.0) offers it"
    )
    assert "Accelerator" not in registry.exports()


def test_specs_of_options_objects(registry):
    assert registry.spec_of_options(object()) is None
    options = registry.export("ToyOptions")
    assert registry.spec_of_options(options()) == ("tracker", registry.get("tracker", "toy"))
    child = type("Child", (options,), {})
    assert registry.spec_of_options(child()) == ("tracker", registry.get("tracker", "toy"))


def test_options_that_several_specs_share_do_not_choose_one(site):
    source = TOY.replace(
        'TrackerSpec(name="broken-target", target="toy_code:NoSuchClass")',
        'TrackerSpec(name="other", target="toy_code:T", options="toy_code:ToyOptions", accepts=("toy_plugin",), exports=("ToyOptions",))',
    )
    write_plugin(site, "toy", source)
    (site / "toy_plugin-1.0.dist-info" / "entry_points.txt").write_text(
        "[drivetrain.plugins]\ntoy = toy_plugin_entry\n"
    )
    registry = Registry.discover(environ={}, entry_points=entry_points_in(site))
    assert registry.plugin("toy").status is Status.OK, "one plugin's specs may share an options class"
    assert registry.accepts()["toy_plugin"] == ("tracker", "toy")
    with pytest.raises(ConfigurationError, match="several specs: tracker 'other', tracker 'toy'"):
        registry.spec_of_options(registry.export("ToyOptions")())


# -- hooks -----------------------------------------------------------------------------------------------------------------


def test_detections_of_usable_backends_of_their_own_plugin(registry):
    with pytest.warns(
        UserWarning, match=r"plugin 'toy' \(toy-plugin 1.0\) detected the backend 'single', which isn't its own"
    ):
        found = registry.detect_backends(Request())
    assert found == [Detection("single", 0, "one process"), Detection("toy", 150, "a toy")]


def test_a_failing_detection_is_warned_about_and_the_others_are_heard(registry):
    with pytest.warns(UserWarning, match=r"plugin 'toy' .* failed to detect backends: RuntimeError: boom"):
        found = registry.detect_backends(Request(backend="fail"))
    assert [d.name for d in found] == ["single"]


def test_other_ranks_are_silent(site):
    registry = Registry.discover(environ={"RANK": "1"}, entry_points=entry_points_in(site))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.detect_backends(Request(backend="fail"))
        registry.warn_broken()


def test_an_event_that_fails_names_the_plugin(registry):
    with pytest.raises(
        PluginError, match=r"plugin 'toy' \(toy-plugin 1.0\) failed in drivetrain_before_save: KeyError"
    ) as caught:
        registry.notify("drivetrain_before_save", accelerator=None, directory="other")
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(UnsupportedError, match="boom"):
        registry.notify("drivetrain_before_save", accelerator=None, directory="ours")


def test_an_event_without_listeners_costs_next_to_nothing(registry):
    seconds = min(
        timeit.repeat(
            lambda: registry.notify("drivetrain_before_load", accelerator=None, directory="d"), number=1000, repeat=5
        )
    )
    assert seconds / 1000 < 5e-6
    with pytest.raises(AssertionError, match="is not an event hook"):
        registry.notify("drivetrain_before_lunch")


def test_hooks_of_plugins_that_may_not_run_are_not_called(site):
    source = "from drivetrain.hookspecs import hookimpl\nDRIVETRAIN_API = 1\n@hookimpl\ndef drivetrain_after_start(accelerator):\n    raise KeyError"
    write_plugin(site, "needy", source, requires=["no-such-thing"])
    registry = Registry.discover(environ={}, entry_points=[p for p in entry_points_in(site) if p.name == "needy"])
    registry.notify("drivetrain_after_start", accelerator=None)


# -- warnings and the process's registry -----------------------------------------------------------------------------------


def test_broken_plugins_warn_once(site):
    write_plugin(site, "wonky", "import no_such_thing")
    write_plugin(site, "off", "import no_such_thing")
    registry = Registry.discover(environ={"DRIVETRAIN_DISABLE_PLUGINS": "off,tyo"}, entry_points=entry_points_in(site))
    with pytest.warns(UserWarning) as caught:
        registry.warn_broken()
    messages = [str(warning.message) for warning in caught]
    assert messages == [
        "DRIVETRAIN_DISABLE_PLUGINS names plugins that aren't installed: 'tyo'. Did you mean 'toy'?",
        "plugin 'wonky' (wonky-plugin 1.0) has status 'failed' and is left out: ModuleNotFoundError: No module named "
        "'no_such_thing'. Run `drivetrain plugins show wonky` for more.",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry.warn_broken()


def test_the_inventory_is_plain_and_complete(registry):
    assert registry.inventory() == {"builtin (drivetrain)": "0.1.0, ok", "toy (toy-plugin)": "1.0, ok"}


def test_the_processs_registry_is_one():
    assert get_registry() is get_registry()


def test_a_plugin_may_import_submodules_of_drivetrain(site):
    """``from drivetrain import submodule`` asks for the attribute first, and so for an exported name."""
    from drivetrain._plugins.process import _process_registry

    source = """
        from drivetrain._plugins import get_registry
        DRIVETRAIN_API = 1

        class Package:
            def __getattr__(self, name):
                return get_registry().export(name)

        assert not hasattr(Package(), "submodule")
    """
    write_plugin(site, "curious", source)
    _process_registry.cache_clear()
    try:
        assert get_registry().plugin("curious").reason == ""
    finally:
        _process_registry.cache_clear()


def test_targets_of_modules_that_were_not_imported_are_not_searched(registry):
    assert "toy_code" not in sys.modules
    assert registry.spec_of_options(types.SimpleNamespace()) is None
    assert "toy_code" not in sys.modules
