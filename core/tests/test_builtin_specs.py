import importlib.util
import inspect

from drivetrain._builtin import plugin
from drivetrain.hookspecs import PROJECT, SPEC_MODULES
from drivetrain.specs import API_VERSION, Capability, DeviceSpec, ProcessInfo, Request, Score


def hooks():
    return {name: value for name, value in vars(plugin).items() if getattr(value, f"{PROJECT}_impl", None)}


def specs():
    for name, hook in hooks().items():
        if name.startswith("drivetrain_register_"):
            yield from hook()


def test_it_speaks_the_present_api_and_implements_existing_hooks_with_their_arguments():
    assert plugin.DRIVETRAIN_API == API_VERSION
    known = {}
    for module in SPEC_MODULES:
        members = vars(importlib.import_module(f"drivetrain.hookspecs.{module}"))
        known.update({n: v for n, v in members.items() if getattr(v, f"{PROJECT}_spec", None) is not None})
    assert hooks().keys() <= known.keys()
    for name, hook in hooks().items():
        assert list(inspect.signature(hook).parameters) == list(inspect.signature(known[name]).parameters)


def test_names_are_unique_in_their_kind_and_everything_has_a_summary():
    seen = [(type(spec), spec.name) for spec in specs()]
    assert len(set(seen)) == len(seen)
    for spec in specs():
        assert spec.summary
        assert "\n" not in spec.summary
        assert spec.name == spec.name.lower()


def test_targets_have_the_form_of_targets():
    for spec in specs():
        if spec.target:
            module, _, attribute = spec.target.partition(":")
            assert module.startswith("drivetrain.")
            assert attribute.isidentifier()
    default = DeviceSpec(name="x", torch_type="x", communication_backend="").target
    assert importlib.util.find_spec(default.partition(":")[0]) is not None


def test_the_single_backend_applies_to_one_process_and_gives_way():
    (detection,) = plugin.drivetrain_detect_backend(Request())
    assert (detection.name, detection.score) == ("single", Score.FALLBACK)
    assert plugin.drivetrain_detect_backend(Request(process=ProcessInfo(world_size=2))) is None
    (spec,) = plugin.drivetrain_register_backends()
    assert Capability.DISTRIBUTED not in spec.capabilities
    assert not any(c.value.startswith("owns-") for c in spec.capabilities)


def test_commands_are_click_commands_named_like_their_targets():
    for spec in plugin.drivetrain_register_commands():
        if not spec.hidden:  # the others stand for something that has a name of its own
            assert spec.target == f"drivetrain.cli.{spec.name}:{spec.name}"
