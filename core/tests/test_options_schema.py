import copy
import datetime
import enum
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.config import Options, nearest, seconds
from drivetrain.config.parsing import parse_text
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    import no_such_module


class Color(enum.Enum):
    RED = "red"
    DARK_BLUE = "dark-blue"


@dataclass
class Toy(Options):
    size: int = 3
    ratio: float = 0.5
    name: str = "toy"
    flag: bool = False
    limit: int | None = None
    names: list[str] = field(default_factory=list)
    pair: tuple[int, int] = (1, 2)
    mode: Literal["fast", "slow"] = "fast"
    either: bool | Literal["repeat"] = True
    table: dict[str, int] = field(default_factory=dict)
    positive: Annotated[int, msgspec.Meta(ge=1)] = 1
    color: Color = Color.RED
    callback: Callable[[int], int] | None = None
    anything: Any = None
    foreign: "no_such_module.Thing | None" = None


@pytest.mark.parametrize(
    ("text", "hint", "expected"),
    [
        *((t, bool, True) for t in ("1", "true", "TRUE", "Yes", "on", " on ")),
        *((t, bool, False) for t in ("0", "false", "No", "off", "OFF")),
        ("7", int, 7),
        ("-2", int, -2),
        ("1e-3", float, 0.001),
        ("5", float, 5.0),
        ("a, b,c", list[str], ["a", "b", "c"]),
        ("1,2", tuple[int, ...], (1, 2)),
        ("1,2", tuple[int, int], (1, 2)),
        ("[1, 2]", tuple[int, ...], (1, 2)),
        ('["a,b", "c"]', list[str], ["a,b", "c"]),
        ("", list[str], []),
        ("a,b,a", set[str], {"a", "b"}),
        ('{"a": 1}', dict[str, int], {"a": 1}),
        ("none", int | None, None),
        ("NULL", str | None, None),
        ("3", int | None, 3),
        ("1", int | bool, 1),
        ("true", int | bool, True),
        ("repeat", bool | Literal["repeat"], "repeat"),
        ("off", bool | Literal["repeat"], False),
        ("12", str, "12"),
        ("12", int | str, 12),
        ("twelve", int | str, "twelve"),
        ("SLOW", Literal["fast", "slow"], "slow"),
        ("dark_blue", Color, Color.DARK_BLUE),
        ("red", Color, Color.RED),
        ("4", Annotated[int, msgspec.Meta(ge=1)], 4),
    ],
)
def test_text_is_read_as_the_fields_type(text, hint, expected):
    value = parse_text(text, hint)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("text", "hint", "message"),
    [
        ("maybe", bool, "expected 1/0, true/false, yes/no or on/off"),
        ("2", bool, "expected 1/0"),
        ("3.5", int, "expected an integer"),
        ("a", float, "expected a number"),
        ("1,2,3", tuple[int, int], "expected 2 values separated by commas"),
        ("1,x", list[int], "expected an integer"),
        ("{a}", dict[str, int], "expected a JSON object"),
        ('{"a": "b"}', dict[str, int], "int"),
        ("other", Literal["fast", "slow"], "expected one of fast, slow"),
        ("0", Annotated[int, msgspec.Meta(ge=1)], ">= 1"),
        ("x", Callable[[int], int], "only be given in Python"),
        ("x", Callable[[int], int] | None, "expected none; other values can only be given in Python"),
    ],
)
def test_text_of_a_wrong_form_says_what_was_expected(text, hint, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_text(text, hint)


@given(st.integers() | st.floats(allow_nan=False) | st.booleans())
def test_scalars_survive_the_way_through_text(value):
    assert parse_text(str(value), type(value)) == value


def test_what_is_given_is_remembered_even_if_it_equals_the_default():
    assert Toy().explicit() == {}
    assert Toy(3, name="toy").explicit() == {"size": 3, "name": "toy"}
    assert Toy(3).to_kwargs() == {"size": 3}
    toy = Toy()
    toy.ratio = 0.25
    assert toy.explicit() == {"ratio": 0.25}
    assert Toy().explicit() == {}


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_remember_too(clone):
    assert clone(Toy(size=3)).explicit() == {"size": 3}


def test_a_replaced_copy_counts_the_changes_as_given_and_leaves_the_original():
    toy = Toy(size=3)
    other = toy.replaced(name="x")
    assert other.explicit() == {"size": 3, "name": "x"}
    assert toy.name == "toy"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": "3"}, "Toy: Expected `int`, got `str` - at `$.size`"),
        ({"size": True}, "Toy: Expected `int`, got `bool` - at `$.size`"),
        ({"flag": 1}, "$.flag"),
        ({"names": ["a", 1]}, "$.names"),
        ({"names": "a"}, "$.names"),
        ({"pair": (1,)}, "$.pair"),
        ({"mode": "medium"}, "$.mode"),
        ({"either": "again"}, "$.either"),
        ({"table": {"a": "b"}}, "$.table"),
        ({"positive": 0}, "$.positive"),
        ({"limit": 1.5}, "$.limit"),
    ],
)
def test_validate_names_class_and_field(values, message):
    with pytest.raises(ConfigurationError) as caught:
        Toy(**values).validate()
    assert str(caught.value).startswith("Toy: ")
    assert message in str(caught.value)


def test_validate_accepts_what_fits_and_leaves_objects_to_their_users():
    Toy(size=5, ratio=1, limit=None, names=["a"], either="repeat", table={"a": 1}).validate()
    Toy(callback=print, anything=object(), foreign=object(), color=Color.DARK_BLUE).validate()


def test_from_mapping():
    toy = Toy.from_mapping({"size": 4, "names": ["a"], "ratio": 2})
    assert (toy.size, toy.names, toy.ratio) == (4, ["a"], 2.0)
    assert toy.explicit() == {"size": 4, "names": ["a"], "ratio": 2.0}
    with pytest.raises(ConfigurationError, match=r"Toy has no setting 'sise'. Did you mean 'size'\?"):
        Toy.from_mapping({"sise": 4})
    with pytest.raises(ConfigurationError, match=r"Toy.size: Expected `int`, got `str`"):
        Toy.from_mapping({"size": "4"})
    assert Toy.from_mapping({"size": "4", "pair": "3,4", "color": "dark-blue"}, strict=False).pair == (3, 4)


@dataclass
class Child(Toy):
    extra: int = 1
    derived: int = field(default=0, init=False)


def test_subclasses_add_fields_and_derived_ones_cannot_be_given():
    child = Child(extra=2)
    assert child.explicit() == {"extra": 2}
    assert "derived" in child.to_dict()
    assert "derived" not in Child.hints()
    with pytest.raises(ConfigurationError, match="no setting 'derived'"):
        Child.from_mapping({"derived": 1})
    assert set(Toy.hints()) < set(Child.hints())


def test_annotations_that_cannot_be_evaluated_count_as_anything():
    assert Toy.hints()["foreign"] is Any
    assert Toy.hints()["size"] is int


def test_nearest_and_seconds():
    assert nearest("zise", ["size", "name"]) == " Did you mean 'size'?"
    assert nearest("q", ["size", "name"]) == " Known: name, size."
    assert nearest("q", []) == " Known: none."
    assert seconds(datetime.timedelta(hours=1)) == 3600.0
    assert seconds(2) == 2.0
    assert seconds(None) is None
