import enum
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.config import ConfigFile, CoreSettings, Options, Source, resolve_core, resolve_options
from drivetrain.errors import ConfigurationError


@dataclass
class Toy(Options):
    size: int = 0
    name: str = "default"
    flag: bool = False
    ratio: float = 0.0
    limit: int | None = None


VALUES = {
    "size": st.integers(-5, 5),
    "name": st.sampled_from(["a", "b", "default"]),
    "flag": st.booleans(),
    "ratio": st.floats(-2, 2),
    "limit": st.integers(0, 3),
}
# For each field and source: a value, or None for a source that says nothing.
SAID = st.fixed_dictionaries(
    {field: st.tuples(*(st.none() | values for _ in range(3))) for field, values in VALUES.items()}
)


@settings(max_examples=300, deadline=None)
@given(SAID)
def test_the_strongest_source_that_says_something_wins_in_each_field_by_itself(said):
    explicit = {field: values[0] for field, values in said.items() if values[0] is not None}
    environ = {f"DRIVETRAIN_MY_TOY_{f.upper()}": str(v[1]) for f, v in said.items() if v[1] is not None}
    section = {field: values[2] for field, values in said.items() if values[2] is not None}
    file = ConfigFile("toy.toml", {}, {"my_toy": section}, {("my_toy", "size"): 7})
    given_object = Toy(**explicit) if explicit else None
    result = resolve_options(Toy, section="my-toy", given=given_object, environ=environ, file=file)
    defaults = Toy()
    for field in VALUES:
        value, origin = getattr(result.value, field), result.origins[field]
        variable = f"DRIVETRAIN_MY_TOY_{field.upper()}"
        if field in explicit:
            assert (value, origin.source) == (explicit[field], Source.EXPLICIT)
        elif variable in environ:
            assert (value, origin.source, origin.detail) == (said[field][1], Source.ENVIRONMENT, variable)
        elif field in section:
            where = "toy.toml:7" if field == "size" else "toy.toml"
            assert (value, origin.source, origin.detail) == (section[field], Source.FILE, where)
        else:
            assert (value, origin.source) == (getattr(defaults, field), Source.DEFAULT)
    given_fields = {field for field, origin in result.origins.items() if origin.source > Source.DEFAULT}
    assert result.value.explicit().keys() >= given_fields


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {
            "cpu": st.tuples(*(st.none() | st.booleans() for _ in range(3))),
            "mixed_precision": st.tuples(*(st.none() | st.sampled_from(["no", "bf16", "fp16"]) for _ in range(3))),
            "gradient_accumulation_steps": st.tuples(*(st.none() | st.integers(1, 9) for _ in range(3))),
            "step_scheduler_with_optimizer": st.tuples(*(st.none() | st.booleans() for _ in range(3))),
        }
    )
)
def test_core_settings_follow_the_same_rule(said):
    explicit = {f: v[0] for f, v in said.items() if v[0] is not None}
    environ = {f"DRIVETRAIN_{f.upper()}": str(v[1]) for f, v in said.items() if v[1] is not None}
    in_file = {f: v[2] for f, v in said.items() if v[2] is not None}
    result = resolve_core(explicit, environ=environ, file=ConfigFile("f.toml", in_file))
    for field, values in said.items():
        strongest = next((i for i, v in enumerate(values) if v is not None), None)
        expected = getattr(CoreSettings(), field) if strongest is None else values[strongest]
        source = (Source.EXPLICIT, Source.ENVIRONMENT, Source.FILE, Source.DEFAULT)[
            3 if strongest is None else strongest
        ]
        assert getattr(result.value, field) == expected
        assert result.origins[field].source is source


def test_an_object_to_which_nothing_is_added_stays_the_same_object():
    toy = Toy(size=1)
    assert resolve_options(Toy, section="toy", given=toy, environ={}, file=ConfigFile()).value is toy
    covered = {"DRIVETRAIN_TOY_SIZE": "5"}
    assert resolve_options(Toy, section="toy", given=toy, environ=covered, file=ConfigFile()).value is toy


def test_what_is_added_leaves_the_users_object_alone_and_keeps_its_class():
    class Mine(Toy):
        pass

    toy = Mine(size=1)
    result = resolve_options(Toy, section="toy", given=toy, environ={"DRIVETRAIN_TOY_NAME": "x"}, file=ConfigFile())
    assert type(result.value) is Mine
    assert (result.value.size, result.value.name, toy.name) == (1, "x", "default")


def test_an_empty_variable_says_nothing():
    assert resolve_core({}, environ={"DRIVETRAIN_CPU": " "}, file=ConfigFile()).value.cpu is False


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"DRIVETRAIN_TOY_SIZE": "big"}, r"DRIVETRAIN_TOY_SIZE='big': Toy.size: expected an integer"),
        ({"DRIVETRAIN_TOY_FLAG": "perhaps"}, r"DRIVETRAIN_TOY_FLAG='perhaps'.*yes/no"),
    ],
)
def test_a_bad_variable_is_named(environ, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve_options(Toy, section="toy", environ=environ, file=ConfigFile())


def test_a_bad_value_in_the_file_is_named_with_its_line():
    file = ConfigFile("f.toml", {}, {"toy": {"size": "big"}}, {("toy", "size"): 3})
    with pytest.raises(ConfigurationError, match=r"f.toml:3: Toy.size: Expected `int`, got `str`"):
        resolve_options(Toy, section="toy", environ={}, file=file)


class Precision(enum.Enum):
    BF16 = "bf16"


class Logger(str, enum.Enum):
    ALL = "all"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("mixed_precision", Precision.BF16, "bf16"),
        ("mixed_precision", "BF16", "bf16"),
        ("dynamo_backend", "INDUCTOR", "inductor"),
        ("log_with", "jsonl", ("jsonl",)),
        ("log_with", Logger.ALL, ("all",)),
        ("log_with", [Logger.ALL, "jsonl"], ("all", "jsonl")),
        ("rng_types", ["torch", "cuda"], ("torch", "cuda")),
        ("project_dir", Path("runs"), "runs"),
    ],
)
def test_arguments_are_understood_as_people_write_them(name, value, expected):
    assert getattr(resolve_core({name: value}, environ={}, file=ConfigFile()).value, name) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gradient_accumulation_steps", 0),
        ("gradient_accumulation_steps", "2"),
        ("gradient_accumulation_steps", True),
        ("cpu", 1),
        ("mixed_precision", 16),
        ("log_with", [3]),
        ("nonsense", 1),
    ],
)
def test_wrong_arguments_are_errors_that_name_the_setting(name, value):
    with pytest.raises(ConfigurationError, match=name):
        resolve_core({name: value}, environ={}, file=ConfigFile())


@dataclass
class Login(Options):
    api_key: int = 0
    port: int = 0


def test_a_malformed_secret_is_not_repeated():
    with pytest.raises(ConfigurationError, match=r"DRIVETRAIN_TOY_API_KEY='\(left out\)'") as caught:
        resolve_options(Login, section="toy", environ={"DRIVETRAIN_TOY_API_KEY": "hunter2"}, file=ConfigFile())
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="DRIVETRAIN_TOY_PORT='many'"):
        resolve_options(Login, section="toy", environ={"DRIVETRAIN_TOY_PORT": "many"}, file=ConfigFile())
