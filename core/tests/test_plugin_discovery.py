"""What becomes of each plugin: every way to be broken is reported as that, and all the others work."""

import sys
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivetrain._plugins import Registry, Status
from drivetrain.errors import PluginError, PluginNotFoundError
from drivetrain.testing.distributions import entry_points_in, write_plugin

TRACKER = """
    from drivetrain.hookspecs import hookimpl
    from drivetrain.specs import TrackerSpec

    DRIVETRAIN_API = 1

    @hookimpl
    def drivetrain_register_trackers():
        return [TrackerSpec(name={name!r}, target="toy:Toy", **{options!r})]
"""


def tracker(name, **options):
    return TRACKER.format(name=name, options=options)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with installed distributions."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def discover(site, **environ):
    return Registry.discover(environ=environ, entry_points=entry_points_in(site))


def one(site, name="toy", **environ):
    """The record of the plugin; a good plugin beside it must work."""
    write_plugin(site, "good", tracker("good"))
    registry = discover(site, **environ)
    assert registry.get("tracker", "good").name == "good"
    assert registry.plugin("good").status is Status.OK
    return registry.plugin(name)


def test_a_good_plugin(site):
    module = write_plugin(site, "toy", tracker("toy"), version="2.5", requires=["drivetrain>=0.1", "pluggy>=1"])
    record = one(site)
    assert (record.status, record.distribution, record.version, record.api) == (Status.OK, "toy-plugin", "2.5", 1)
    assert record.location == str(site / f"{module}.py")
    assert record.kinds == ("tracker",)
    assert record.reason == ""
    assert record.cause is None


@pytest.mark.parametrize(
    ("source", "status", "reason"),
    [
        ("import no_such_module", Status.FAILED, "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise ValueError('two\\nlines')", Status.FAILED, "ValueError: two lines"),
        ("import sys; sys.exit(3)", Status.FAILED, "SystemExit: 3"),
        ("def broken(:", Status.FAILED, "SyntaxError: invalid syntax"),
        ("", Status.WRONG_API, "add DRIVETRAIN_API = 1"),
        ("DRIVETRAIN_API = '1'", Status.WRONG_API, "must be a number, got '1'"),
        ("DRIVETRAIN_API = True", Status.WRONG_API, "must be a number, got True"),
        ("DRIVETRAIN_API = 2", Status.WRONG_API, "plugin API 2, but drivetrain 0.1.0 supports 1: upgrade drivetrain"),
        ("DRIVETRAIN_API = 0", Status.WRONG_API, "plugin API 0, but drivetrain 0.1.0 supports 1: upgrade toy-plugin"),
        (tracker("toy").replace("_trackers", "_trackrs"), Status.FAILED, "Did you mean 'drivetrain_register_trackers'"),
        (tracker("toy").replace("@hookimpl", ""), Status.FAILED, "put @hookimpl"),
        (tracker("toy").replace("return [", "1 / 0; ["), Status.FAILED, "ZeroDivisionError: division by zero"),
        (tracker("toy", requires=["no-such-thing>=2"]), Status.FAILED, "requires must be a tuple of strings"),
        (tracker("toy", requires=("no-such-thing>=2",)), Status.MISSING_REQUIREMENT, "needs no-such-thing>=2, which"),
        (tracker("toy", requires=("pluggy>=99",)), Status.MISSING_REQUIREMENT, "needs pluggy>=99, but 1."),
        (tracker("toy", requires=("pluggy >=> 1",)), Status.MISSING_REQUIREMENT, "can't be read"),
    ],
)
def test_each_way_to_be_broken_is_reported_as_that(site, source, status, reason):
    write_plugin(site, "toy", source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record = one(site)
    assert record.status is status
    assert reason in record.reason
    assert record.cause is not None
    registry = discover(site)
    with pytest.raises(PluginError, match=r"plugin 'toy' \(toy-plugin 1\.0\)") as caught:
        registry.get("tracker", "toy")
    assert not isinstance(caught.value, PluginNotFoundError)
    assert caught.value.__cause__ is not None
    assert "toy" not in registry.specs("tracker")


def test_a_requirement_of_the_distribution(site):
    write_plugin(site, "toy", tracker("toy"), requires=["no-such-thing>=2", "pluggy<1", "drivetrain>=0.1"])
    record = one(site)
    assert record.status is Status.MISSING_REQUIREMENT
    assert record.reason.startswith("needs no-such-thing>=2, which isn't installed; needs pluggy<1, but 1.")
    assert [spec.name for spec in record.specs] == ["toy"]
    with pytest.raises(PluginError, match="has status 'missing-requirement': needs no-such-thing"):
        discover(site).get("tracker", "toy")


def test_the_missing_requirement_is_named_rather_than_the_failed_import(site):
    write_plugin(site, "toy", "import no_such_thing", requires=["no-such-thing"])
    assert one(site).status is Status.MISSING_REQUIREMENT


def test_requirements_of_extras_and_other_platforms_dont_count(site):
    requires = [
        'no-such-thing; extra == "all"',
        "no-such-thing; python_version < '3'",
        "pluggy[all]>1 ; python_version > '3'",
    ]
    write_plugin(site, "toy", tracker("toy"), requires=requires)
    assert one(site).status is Status.OK


def test_a_marker_that_holds_counts(site):
    write_plugin(site, "toy", tracker("toy"), requires=["no-such-thing; python_version > '3'"])
    assert one(site).reason == "needs no-such-thing, which isn't installed"


def test_the_requirement_on_core_is_checked_against_the_running_core(site):
    write_plugin(site, "toy", tracker("toy"), requires=["drivetrain>=7"])
    assert one(site).reason == "needs drivetrain>=7, but 0.1.0 is installed"


def test_one_spec_may_lack_what_another_does_not_need(site):
    write_plugin(
        site,
        "toy",
        tracker("toy").replace(
            "return [", "return [TrackerSpec(name='rich', target='t:T', requires=('no-such-thing',)), "
        ),
    )
    record = one(site)
    assert record.status is Status.OK
    assert record.problems == {("tracker", "rich"): "needs no-such-thing, which isn't installed"}
    registry = discover(site)
    assert registry.get("tracker", "toy").name == "toy"
    with pytest.raises(PluginError, match=r"tracker 'rich' can't be used: plugin 'toy' .*needs no-such-thing"):
        registry.get("tracker", "rich")


def test_an_entry_point_must_name_a_module(site):
    write_plugin(site, "toy", tracker("toy"))
    info = site / "toy_plugin-1.0.dist-info" / "entry_points.txt"
    info.write_text(info.read_text().replace("_entry", "_entry:Plugin"))
    assert one(site).reason == "its entry point must name a module, got 'toy_plugin_entry:Plugin'"


def test_importing_torch_in_the_entry_module_is_noted(site):
    source = "import sys, types; sys.modules['torch'] = types.ModuleType('torch')\nDRIVETRAIN_API = 1"
    write_plugin(site, "toy", source)
    real = sys.modules.pop("torch", None)
    try:
        assert one(site).notes == ("its entry module imports torch, which makes every start slow",)
    finally:
        del sys.modules["torch"]
        if real is not None:
            sys.modules["torch"] = real


def test_a_plugin_cannot_ask_for_the_registry_while_it_is_discovered(site):
    from drivetrain._plugins import get_registry
    from drivetrain._plugins.process import _process_registry

    write_plugin(site, "toy", "from drivetrain._plugins import get_registry\nget_registry()")
    _process_registry.cache_clear()
    try:
        record = get_registry().plugin("toy")
    finally:
        _process_registry.cache_clear()
    assert record.status is Status.FAILED
    assert "are being discovered" in record.reason


# -- names that are taken --------------------------------------------------------------------------------------------------


def test_a_name_offered_twice_names_both_distributions_and_the_rest_works(site):
    write_plugin(site, "a", tracker("toy"), distribution="dist-a", version="1")
    write_plugin(site, "b", tracker("toy").replace("return [", "return [TrackerSpec(name='own', target='t:T'), "), distribution="dist-b", version="2")  # fmt: skip
    record = one(site, "a")
    assert record.status is Status.CONFLICT
    registry = discover(site)
    with pytest.raises(
        PluginError, match=r"the tracker 'toy' is offered by plugin 'a' \(dist-a 1\) and plugin 'b' \(dist-b 2\)"
    ):
        registry.get("tracker", "toy")
    with pytest.raises(PluginError, match="dist-a 1"):
        registry.provider("tracker", "toy")
    assert registry.plugin("b").status is Status.CONFLICT
    assert registry.get("tracker", "own").name == "own"
    assert registry.provider("tracker", "own").name == "b"
    assert list(registry.specs("tracker")) == ["good", "jsonl", "own"]


def test_disabling_one_by_its_distribution_resolves_it(site):
    write_plugin(site, "a", tracker("toy"), distribution="dist-a")
    write_plugin(site, "b", tracker("toy"), distribution="dist-b")
    registry = discover(site, DRIVETRAIN_DISABLE_PLUGINS="dist_b")
    assert registry.provider("tracker", "toy").name == "a"
    assert registry.plugin("b").status is Status.DISABLED


def test_two_plugins_of_one_name_are_both_left_out(site):
    write_plugin(site, "toy", "raise RuntimeError('must not be imported')", distribution="dist-a")
    write_plugin(site, "toy", "raise RuntimeError('must not be imported')", distribution="dist-b")
    write_plugin(site, "good", tracker("good"))
    registry = discover(site)
    assert [str(r.status) for r in registry.records] == ["ok", "ok", "conflict", "conflict"]
    assert registry.get("tracker", "good")
    for ask in (lambda: registry.plugin("toy"), lambda: registry.get("tracker", "toy")):
        with pytest.raises(PluginError, match=r"the plugin name 'toy' is offered by dist-a 1.0 and dist-b 1.0"):
            ask()
    registry = discover(site, DRIVETRAIN_DISABLE_PLUGINS="dist-a,dist-b")
    assert registry.plugin("toy").status is Status.DISABLED


def test_a_first_party_plugins_name_is_its_own_even_when_it_is_not_installed(site):
    write_plugin(site, "ddp", "raise RuntimeError('must not be imported')", distribution="other")
    record = one(site, "ddp")
    assert record.status is Status.CONFLICT
    assert record.reason == "the plugin name 'ddp' belongs to drivetrain-ddp, but other uses it"


def test_a_first_party_specs_name_is_its_own(site):
    write_plugin(site, "toy", tracker("wandb"))
    assert one(site).status is Status.CONFLICT
    with pytest.raises(PluginError, match="the tracker 'wandb' belongs to drivetrain-wandb, but plugin 'toy'"):
        discover(site).get("tracker", "wandb")


def test_the_first_party_distribution_may_use_its_names(site):
    write_plugin(site, "wandb", tracker("wandb"), distribution="Drivetrain_WandB")
    assert one(site, "wandb").status is Status.OK


def test_nobody_else_is_builtin(site):
    write_plugin(site, "builtin", "raise RuntimeError('must not be imported')", distribution="other")
    write_plugin(site, "good", tracker("good"))
    registry = discover(site)
    assert [(r.distribution, str(r.status)) for r in registry.records] == [
        ("drivetrain", "ok"),
        ("other", "conflict"),
        ("good-plugin", "ok"),
    ]


def precision(name, **options):
    return (
        TRACKER.replace("TrackerSpec", "PrecisionSpec")
        .replace("trackers", "precisions")
        .format(name=name, options=options)
    )


def test_an_alias_that_is_taken_costs_the_alias_only(site):
    write_plugin(site, "a", precision("p", aliases=("both",)))
    write_plugin(site, "b", precision("q", aliases=("both", "mine")))
    registry = discover(site)
    assert registry.get("precision", "p").name == "p"
    assert registry.get("precision", "mine").name == "q"
    with pytest.raises(PluginError, match=r"the precision 'both' is offered by plugin 'a'.*and plugin 'b'"):
        registry.get("precision", "both")


def test_an_alias_that_is_anothers_name(site):
    write_plugin(site, "a", precision("p"))
    write_plugin(site, "b", precision("q", aliases=("p",)))
    registry = discover(site)
    with pytest.raises(PluginError, match="the precision 'p' is offered by"):
        registry.get("precision", "p")
    assert registry.get("precision", "q").name == "q"
    assert "p" not in registry.specs("precision")


def test_exports_and_keywords_offered_twice(site):
    options = {"options": "toy_options:ToyOptions", "exports": ("ToyOptions",), "accepts": ("toy_options",)}
    write_plugin(site, "a", tracker("a", **options))
    write_plugin(site, "b", tracker("b", **options))
    registry = discover(site)
    assert registry.get("tracker", "a").name == "a"
    assert "ToyOptions" not in registry.exports()
    assert "toy_options" not in registry.accepts()
    with pytest.raises(PluginError, match=r"the exported name 'ToyOptions' is offered by plugin 'a'.*and plugin 'b'"):
        registry.export("ToyOptions")
    with pytest.raises(PluginError, match="the keyword of the Accelerator 'toy_options' is offered by"):
        registry.accepted_by("toy_options")


def test_exports_and_keywords_of_first_party_plugins(site):
    options = {
        "options": "toy_options:DeepSpeedPlugin",
        "exports": ("DeepSpeedPlugin",),
        "accepts": ("deepspeed_plugin",),
    }
    write_plugin(site, "toy", tracker("toy", **options))
    record = one(site)
    assert record.status is Status.CONFLICT
    assert "the exported name 'DeepSpeedPlugin' belongs to drivetrain-deepspeed" in record.reason
    assert "the keyword of the Accelerator 'deepspeed_plugin' belongs to drivetrain-deepspeed" in record.reason


# -- the two variables -----------------------------------------------------------------------------------------------------


def test_a_disabled_plugin_is_not_imported(site):
    write_plugin(site, "toy", "raise RuntimeError('must not be imported')")
    record = one(site, DRIVETRAIN_DISABLE_PLUGINS=" toy ,")
    assert record.status is Status.DISABLED
    assert record.reason == "it is named in DRIVETRAIN_DISABLE_PLUGINS"
    with pytest.raises(PluginError, match="has status 'disabled': it is named in DRIVETRAIN_DISABLE_PLUGINS"):
        discover(site, DRIVETRAIN_DISABLE_PLUGINS="toy").get("tracker", "toy")


def test_the_allow_list_lets_in_nothing_else_but_the_builtin_plugin(site):
    write_plugin(site, "toy", tracker("toy"))
    record = one(site, DRIVETRAIN_PLUGINS="good")
    assert record.status is Status.DISABLED
    assert record.reason == "it isn't named in DRIVETRAIN_PLUGINS"
    registry = discover(site, DRIVETRAIN_PLUGINS="builtin")
    assert [str(r.status) for r in registry.records] == ["ok", "disabled", "disabled"]


def test_the_block_list_beats_the_allow_list(site):
    write_plugin(site, "toy", tracker("toy"))
    assert one(site, DRIVETRAIN_PLUGINS="good,toy", DRIVETRAIN_DISABLE_PLUGINS="toy").status is Status.DISABLED


def test_an_empty_list_is_no_list(site):
    write_plugin(site, "toy", tracker("toy"))
    assert one(site, DRIVETRAIN_PLUGINS="").status is Status.OK


def test_unknown_names_in_the_lists_are_one_warning_with_the_closest(site):
    write_plugin(site, "toy", tracker("toy"))
    registry = discover(site, DRIVETRAIN_PLUGINS="toyy,toy,xyz,ddp", DRIVETRAIN_DISABLE_PLUGINS="builtin")
    assert registry.warnings == (
        "DRIVETRAIN_PLUGINS names plugins that aren't installed: 'toyy'. Did you mean 'toy'?; 'xyz'; "
        "'ddp'. Install it: pip install \"drivetrain[ddp]\"",
        "DRIVETRAIN_DISABLE_PLUGINS names the builtin plugin, which can't be disabled",
    )


# -- robustness ------------------------------------------------------------------------------------------------------------


def test_the_order_of_installation_decides_nothing(tmp_path, monkeypatch):
    for name in ("a", "b", "c"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.syspath_prepend(folder)
        write_plugin(folder, name, tracker("toy" if name != "c" else "own"), distribution=f"order-{name}")
    folders = [tmp_path / name for name in ("a", "b", "c")]

    def look(order):
        registry = Registry.discover(environ={}, entry_points=entry_points_in(*order))
        return [(r.name, r.status, r.reason, r.specs) for r in registry.records], dict(registry.specs("tracker"))

    assert look(folders) == look(list(reversed(folders))) == look([folders[1], folders[2], folders[0]])


def test_broken_metadata_of_another_distribution_does_not_hide_the_plugins(site):
    write_plugin(site, "good", tracker("good"))
    write_plugin(site, "toy", tracker("toy"))
    (site / "toy_plugin-1.0.dist-info" / "METADATA").unlink()
    broken = site / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text("[drivetrain.plugins]\nthis is no entry point\n")
    registry = Registry.discover(environ={"DRIVETRAIN_PLUGINS": "good"})
    assert registry.get("tracker", "good")


SNIPPETS = [
    "DRIVETRAIN_API = 1",
    "DRIVETRAIN_API = None",
    "import no_such_module_at_all",
    "from drivetrain.hookspecs import hookimpl",
    "raise SystemExit",
    "__getattr__ = lambda name: 1 / 0",
    "drivetrain_register_trackers = 7",
    "drivetrain_register_trackers = lambda: [None]",
    "hookimpl(drivetrain_register_trackers)",
    "import sys; sys.modules[__name__] = None",
    "import sys; sys.modules[__name__] = 7",
    "class drivetrain_register_trackers: drivetrain_impl = {}",
    "def drivetrain_register_trackers(self, *a, b=1): ...",
    "raise type('Panic', (BaseException,), {})('panicked')",
]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(st.sampled_from(SNIPPETS), max_size=5), data=st.data())
def test_discovery_never_raises(site, lines, data):
    number = len(list(Path(site).glob("fuzz*.py")))
    write_plugin(site, "fuzz", "\n".join(lines), distribution=f"fuzz{number}", version="1")
    points = [p for p in entry_points_in(site) if p.dist.name == f"fuzz{number}"]
    registry = Registry.discover(environ={}, entry_points=points)
    assert [record.name for record in registry.records] == ["builtin", "fuzz"]
    assert registry.plugin("builtin").status is Status.OK
