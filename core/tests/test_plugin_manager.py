import types
import warnings

import pytest

from drivetrain._plugins.manager import HookManager
from drivetrain._plugins.record import KINDS, register_hook
from drivetrain.errors import PluginError
from drivetrain.hookspecs import hookimpl
from drivetrain.specs import BackendSpec, CommandSpec, Detection, Request, TrackerSpec

TOY = TrackerSpec(name="toy", target="toy.tracker:Toy")


def module(**functions):
    made = types.ModuleType("toy_plugin")
    vars(made).update(functions)
    return made


def trackers(result):
    @hookimpl
    def drivetrain_register_trackers():
        if isinstance(result, Exception):
            raise result
        return result

    return module(drivetrain_register_trackers=drivetrain_register_trackers)


def test_every_kind_has_its_hook():
    manager = HookManager()
    assert {register_hook(kind) for kind in KINDS} == {hook for hook in manager.hooks if "_register_" in hook}


def test_specs_are_collected_by_kind_and_in_the_plugins_order():
    one, two = (TrackerSpec(name=name, target="toy:T") for name in ("z", "a"))

    @hookimpl
    def drivetrain_register_trackers():
        yield one
        yield two

    @hookimpl
    def drivetrain_register_commands():
        return (CommandSpec(name="do", target="toy:do"),)

    plugin = module(
        drivetrain_register_trackers=drivetrain_register_trackers,
        drivetrain_register_commands=drivetrain_register_commands,
    )
    manager = HookManager()
    manager.register("toy", plugin)
    assert [spec.name for spec in manager.collect(plugin)] == ["z", "a", "do"]


def test_only_the_asked_plugin_is_called():
    manager = HookManager()
    bad, good = trackers(RuntimeError("boom")), trackers([TOY])
    manager.register("bad", bad)
    manager.register("good", good)
    assert manager.collect(good) == (TOY,)
    with pytest.raises(RuntimeError, match="boom"):
        manager.collect(bad)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned None; return a list"),
        (TOY, "must return an iterable, got TrackerSpec"),
        (7, "must return an iterable, got 7"),
        ("toy", "must return an iterable, got 'toy'"),
        ([TOY, "toy"], "must return TrackerSpec objects, got 'toy'"),
        ([BackendSpec(name="toy", target="toy:T")], "must return TrackerSpec objects, got BackendSpec"),
        ([TOY, TOY], "offers the tracker 'toy' twice"),
        ([TrackerSpec(name="Toy", target="toy:T")], "'Toy' must be made of lower-case letters"),
        ([TrackerSpec(name="toy")], "it names no target"),
        ([TrackerSpec(name="toy", target="toy.tracker")], "isn't of the form 'package.module:Name'"),
        ([TrackerSpec(name="toy", target="toy:T", options="ToyOptions")], "options 'ToyOptions' isn't of the form"),
        ([TrackerSpec(name="toy", target="toy:T", requires=("a>=1"))], r"a comma is missing: \('a>=1',\)"),
        ([TrackerSpec(name="toy", target="toy:T", accepts=("x",))], "accepts keywords but names no options"),
        ([TrackerSpec(name="toy", target="toy:T", options="toy:O", accepts=("a b",))], "'a b' in accepts can't be"),
        ([TrackerSpec(name="toy", target="toy:T", exports=("A:B",))], "'A:B' in exports is neither"),
        ([TrackerSpec(name="toy", target=None)], "target"),
        ([TrackerSpec(name="toy", target="toy:T", kinds=("images",))], None),
    ],
)
def test_wrong_results_of_a_register_hook_are_named(result, message):
    manager = HookManager()
    plugin = trackers(result)
    manager.register("toy", plugin)
    if message is None:
        assert manager.collect(plugin) == tuple(result)
        return
    with pytest.raises(PluginError, match=message):
        manager.collect(plugin)


def test_an_unknown_capability_is_named_with_the_nearest_one():
    @hookimpl
    def drivetrain_register_backends():
        return [BackendSpec(name="toy", target="toy:B", capabilities=frozenset({"distrbuted"}))]

    plugin = module(drivetrain_register_backends=drivetrain_register_backends)
    manager = HookManager()
    manager.register("toy", plugin)
    with pytest.raises(PluginError, match=r"no capability 'distrbuted'. Did you mean 'distributed'"):
        manager.collect(plugin)


def refused(function, **options):
    name = options.pop("attribute", function.__name__)
    with pytest.raises(PluginError) as caught:
        HookManager().register("toy", module(**{name: hookimpl(function, **options)}))
    return str(caught.value)


def test_a_misspelled_hook_is_named_with_the_nearest_one():
    def drivetrain_register_trackrs():
        return []

    assert "no hook 'drivetrain_register_trackrs'. Did you mean 'drivetrain_register_trackers'?" in refused(
        drivetrain_register_trackrs
    )


def test_a_misspelled_specname_is_named():
    def anything():
        return []

    assert "no hook 'drivetrain_register_trakers'" in refused(anything, specname="drivetrain_register_trakers")


def test_an_optional_hook_may_be_unknown():
    @hookimpl(optionalhook=True)
    def drivetrain_of_the_future():
        return []

    HookManager().register("toy", module(drivetrain_of_the_future=drivetrain_of_the_future))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("drivetrain_register_trackers", "isn't marked as a hook implementation: put @hookimpl"),
        ("drivetrain_register_trackrs", "no hook 'drivetrain_register_trackrs'. Did you mean"),
    ],
)
def test_a_forgotten_marker_is_noticed(name, message):
    plugin = types.ModuleType("toy_plugin")
    exec(f"def {name}(): return []", vars(plugin))
    with pytest.raises(PluginError, match=message):
        HookManager().register("toy", plugin)


def test_hookspecs_and_helpers_in_a_plugin_are_no_hooks():
    from drivetrain.hookspecs.tracking import drivetrain_register_trackers as imported

    plugin = types.ModuleType("toy_plugin")
    exec("def drivetrain_helper(): pass", vars(plugin))
    plugin.drivetrain_register_trackers = imported
    HookManager().register("toy", plugin)


def _default(request=None):
    return []


def _star(*args):
    return []


def _double_star(**kwargs):
    return []


def _keyword_only(*, request):
    return []


def _unknown(reqest):
    return []


def _argument(request):
    return []


@pytest.mark.parametrize(
    ("function", "hook", "message"),
    [
        (_default, "drivetrain_detect_backend", "'request' of drivetrain_detect_backend must have no default"),
        (_star, "drivetrain_detect_backend", r"without '*' and '**', but has '*args'"),
        (_double_star, "drivetrain_detect_backend", "'**kwargs'"),
        (_keyword_only, "drivetrain_detect_backend", "without '*'"),
        (_unknown, "drivetrain_detect_backend", "no argument 'reqest'; it may take request"),
        (_argument, "drivetrain_register_trackers", "no argument 'request'; it takes no argument"),
    ],
)
def test_arguments_that_pluggy_versions_treat_differently_are_refused(function, hook, message):
    assert message in refused(function, specname=hook, attribute=hook)


def test_a_wrapper_of_a_register_hook_is_refused():
    def drivetrain_register_trackers():
        return (yield)

    assert "nothing to wrap" in refused(drivetrain_register_trackers, wrapper=True)


def test_a_refused_plugin_leaves_nothing_behind():
    manager = HookManager()

    @hookimpl
    def drivetrain_after_start(accelerator):
        raise AssertionError("must not be called")

    @hookimpl
    def drivetrain_before_save(accelerator, directory=None):
        raise AssertionError("must not be called")

    plugin = module(drivetrain_after_start=drivetrain_after_start, drivetrain_before_save=drivetrain_before_save)
    with pytest.raises(PluginError, match="must have no default"):
        manager.register("toy", plugin)
    manager.notify("drivetrain_after_start", {"accelerator": None})
    assert manager.listeners("drivetrain_after_start") == ()


def test_a_module_can_be_one_plugin_only():
    manager = HookManager()
    plugin = trackers([TOY])
    manager.register("one", plugin)
    with pytest.raises(PluginError, match="is plugin 'one' already"):
        manager.register("two", plugin)
    assert manager.collect(plugin) == (TOY,)


def detector(name, result):
    @hookimpl
    def drivetrain_detect_backend(request):
        if isinstance(result, Exception):
            raise result
        return result

    made = module(drivetrain_detect_backend=drivetrain_detect_backend)
    made.__name__ = name
    return made


def test_detections_are_attributed_and_sorted_whatever_the_order_of_registration():
    answers = {
        "b": [Detection("b", 100, "b")],
        "a": [Detection("a", 1, "a"), Detection("a2", 2, "a")],
        "none": None,
        "raises": RuntimeError("boom"),
        "wrong": ["x"],
        "score": [Detection("s", "high", "?")],
    }
    for order in (list(answers), list(reversed(answers))):
        manager = HookManager()
        for name in order:
            manager.register(name, detector(name, answers[name]))
        found = dict(manager.detect_backends(Request()))
        assert list(found) == sorted(answers)
        assert found["a"] == answers["a"]
        assert found["b"] == answers["b"]
        assert found["none"] == []
        assert str(found["raises"]) == "boom"
        assert "must return Detection objects, got 'x'" in str(found["wrong"])
        assert "the score of 's' must be an int" in str(found["score"])


def test_events_reach_all_listeners_with_the_arguments_that_they_name():
    heard = []

    @hookimpl
    def drivetrain_before_save(directory):
        heard.append(directory)

    plugin = module(drivetrain_before_save=drivetrain_before_save)
    manager = HookManager()
    manager.register("toy", plugin)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager.notify("drivetrain_before_save", {"accelerator": None, "directory": "d"})
    assert heard == ["d"]
    assert manager.listeners("drivetrain_before_save") == ("toy",)


def test_the_culprit_of_an_exception_is_found():
    def make(fails):
        @hookimpl
        def drivetrain_after_start(accelerator):
            if fails:
                raise ValueError("boom")

        return module(drivetrain_after_start=drivetrain_after_start)

    def helper():
        raise ValueError("deeper")

    @hookimpl
    def drivetrain_after_start(accelerator):
        helper()

    manager = HookManager()
    manager.register("deep", module(drivetrain_after_start=drivetrain_after_start))
    with pytest.raises(ValueError, match="deeper") as caught:
        manager.notify("drivetrain_after_start", {"accelerator": None})
    assert manager.culprit("drivetrain_after_start", caught.value.__traceback__) == "deep"
    assert manager.culprit("drivetrain_after_start", None) is None
