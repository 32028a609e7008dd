"""map_tensors and its relatives: each kind of container keeps its type, its values and its sharing."""

import dataclasses
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Mapping, MutableMapping
from types import MappingProxyType
from typing import NamedTuple, TypedDict

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from drivetrain.parallel.structure import (
    TensorInformation,
    concatenate,
    convert_outputs_to_fp32,
    convert_to_fp32,
    find_batch_size,
    find_device,
    get_data_structure,
    get_shape,
    honor_type,
    ignorant_find_batch_size,
    initialize_tensors,
    is_namedtuple,
    is_tensor_information,
    is_torch_tensor,
    listify,
    map_tensors,
    pad_input_tensors,
    recursively_apply,
    send_to_device,
    slice_tensors,
)

X = torch.tensor([1.0, 2.0])
Point = namedtuple("Point", "x label")


class Typed(NamedTuple):
    x: torch.Tensor
    n: int = 3


class Batch(TypedDict):
    x: torch.Tensor


@dataclasses.dataclass
class Plain:
    x: torch.Tensor
    label: str = "a"
    size: int = dataclasses.field(init=False, default=7)

    def __post_init__(self):
        self.made = getattr(self, "made", 0) + 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    label: str


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    label: str


class Dict(dict):
    def __init__(self, data=(), *, note=None):
        super().__init__(data)
        self.note = note


class List(list):
    note = None


class Encoding(UserDict):
    """As tokenizers return it: attribute access, and a `to` that moves it in place."""

    def __init__(self, data=None, encodings=None):
        super().__init__(data)
        self.encodings = encodings

    def __getattr__(self, name):
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class MovableEncoding(Encoding):
    def to(self, device):
        self.data = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.data.items()}
        return self


class Output(OrderedDict):
    """As models return it: a dataclass that is a mapping too; items and attributes are the same."""

    def __init__(self, logits=None, loss=None):
        super().__init__()
        if isinstance(logits, dict):
            for key, value in logits.items():
                self[key] = value
        else:
            self["logits"], self["loss"] = logits, loss

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class InnerMapping(MutableMapping):
    """Keeps its content in an attribute: a shallow copy would share it."""

    def __init__(self, content):
        self.content = dict(content)

    def __getitem__(self, key):
        return self.content[key]

    def __setitem__(self, key, value):
        self.content[key] = value

    def __delitem__(self, key):
        del self.content[key]

    def __iter__(self):
        return iter(self.content)

    def __len__(self):
        return len(self.content)


class Stubborn(Mapping):
    """Can't be made from its items."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __getitem__(self, key):
        return {"a": self.a, "b": self.b}[key]

    def __iter__(self):
        return iter("ab")

    def __len__(self):
        return 2


CONTAINERS = {
    "dict": {"x": X, "label": "a"},
    "defaultdict": defaultdict(list, x=X, label="a"),
    "OrderedDict": OrderedDict(x=X, label="a"),
    "UserDict": UserDict(x=X, label="a"),
    "Encoding": Encoding({"x": X, "label": "a"}, encodings=["e"]),
    "Output": Output(logits=X, loss="a"),
    "InnerMapping": InnerMapping({"x": X, "label": "a"}),
    "MappingProxyType": MappingProxyType({"x": X, "label": "a"}),
    "ChainMap": ChainMap({"x": X, "label": "a"}),
    "Counter": Counter({"x": X, "label": "a"}),
    "TypedDict": Batch(x=X),
    "Dict": Dict({"x": X, "label": "a"}, note="kept"),
    "list": [X, "a", None],
    "List": List([X, "a"]),
    "UserList": UserList([X, "a"]),
    "deque": deque([X, "a"], maxlen=2),
    "tuple": (X, "a", 1),
    "namedtuple": Point(X, "a"),
    "NamedTuple": Typed(X),
    "return_types": torch.max(torch.tensor([[1.0, 2.0]]), dim=1),
    "dataclass": Plain(X),
    "frozen": Frozen(X, "a"),
    "slotted": Slotted(X, "a"),
}


def leaves(value):
    found = []
    map_tensors(lambda t: found.append(t) or t, value)
    return found


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_keeps_its_type_and_its_values(name):
    value = CONTAINERS[name]
    before = [t.clone() for t in leaves(value)]
    result = map_tensors(torch.neg, {"outer": [value]})["outer"][0]
    assert type(result) is type(value)
    assert result is not value
    assert [t.tolist() for t in leaves(result)] == [(-t).tolist() for t in before]
    assert [t.tolist() for t in leaves(value)] == [t.tolist() for t in before], "the input must not change"
    others = [
        v
        for v in (value.values() if isinstance(value, Mapping) else getattr(value, "__iter__", list)())
        if isinstance(v, str)
    ]
    kept = [
        v
        for v in (result.values() if isinstance(result, Mapping) else getattr(result, "__iter__", list)())
        if isinstance(v, str)
    ]
    assert kept == others


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_map_that_changes_nothing_returns_the_object_itself(name):
    assert map_tensors(lambda t: t, CONTAINERS[name]) is CONTAINERS[name]
    assert send_to_device(CONTAINERS[name], "cpu") is CONTAINERS[name]


def test_what_else_a_container_holds_is_kept():
    assert map_tensors(torch.neg, CONTAINERS["defaultdict"]).default_factory is list
    assert map_tensors(torch.neg, CONTAINERS["Dict"]).note == "kept"
    assert map_tensors(torch.neg, CONTAINERS["Encoding"]).encodings == ["e"]
    assert map_tensors(torch.neg, CONTAINERS["deque"]).maxlen == 2
    noted = List([X])
    noted.note = "kept"
    assert map_tensors(torch.neg, noted).note == "kept"
    output = map_tensors(torch.neg, CONTAINERS["Output"])
    assert output.logits is output["logits"]
    assert output.logits.tolist() == [-1, -2]


def test_dataclasses_are_copied_not_made_anew():
    plain = Plain(X)
    plain.size = 9
    plain.extra = "kept"
    result = map_tensors(torch.neg, plain)
    assert (result.size, result.extra, result.made) == (9, "kept", 1)
    assert (plain.x.tolist(), result.x.tolist()) == ([1, 2], [-1, -2])
    assert map_tensors(torch.neg, Slotted(X, "a")).label == "a"


def test_order_of_keys_is_kept():
    assert list(map_tensors(torch.neg, {"b": X, 1: X, "a": X})) == ["b", 1, "a"]


def test_a_tensor_or_container_that_occurs_twice_stays_shared():
    inner = [X]
    result = map_tensors(torch.neg, {"a": X, "b": X, "c": inner, "d": inner})
    assert result["a"] is result["b"] is result["c"][0]
    assert result["c"] is result["d"]
    moved = send_to_device({"input": X, "label": X}, "meta")
    assert moved["input"] is moved["label"]


@pytest.mark.parametrize("make", [list, dict, Dict, List])
@pytest.mark.parametrize(
    "function", [lambda d: map_tensors(torch.neg, d), find_batch_size, lambda d: send_to_device(d, "meta"), find_device]
)
def test_a_container_that_contains_itself_is_an_error(make, function):
    loop = make()
    if isinstance(loop, list):
        loop.extend(["text", loop])
    else:
        loop.update(text="text", me=loop)
    with pytest.raises(ValueError, match="contains itself"):
        function([loop])


def test_a_mapping_that_cannot_be_rebuilt_says_what_to_do():
    assert map_tensors(lambda t: t, Stubborn(X, 1)).a is X
    with pytest.raises(TypeError, match=r"Stubborn can't be made anew.*to\(device\)"):
        map_tensors(torch.neg, Stubborn(X, 1))


def test_sets_of_tensors_are_mapped():
    assert {t.item() for t in map_tensors(torch.neg, {torch.tensor(1), torch.tensor(2), "a"} - {"a"})} == {-1, -2}
    assert isinstance(map_tensors(torch.neg, frozenset([X])), frozenset)


@pytest.mark.parametrize(
    "value", ["text", b"bytes", None, 3, 2.5, 1j, range(3), torch.float32, X.shape, object, int, torch.nn.Linear(1, 1)]
)
def test_other_objects_are_kept(value):
    assert map_tensors(torch.neg, [value])[0] is value
    assert send_to_device([value, X], "cpu")[0] is value


def test_tensor_subclasses_and_parameters_are_leaves():
    parameter = torch.nn.Parameter(torch.ones(2))
    assert map_tensors(lambda t: t, [parameter])[0] is parameter
    assert send_to_device({"p": parameter}, "meta")["p"].device.type == "meta"


# -- send_to_device --------------------------------------------------------------------------------------------------------


def test_send_to_device_moves_only_tensors():
    batch = {"x": X, "id": "a", "nested": (X, [None])}
    moved = send_to_device(batch, torch.device("meta"))
    assert (moved["x"].device.type, moved["id"], moved["nested"][1]) == ("meta", "a", [None])
    assert batch["x"] is X


@pytest.mark.parametrize("skip_keys", ["label", ["label"], ("label", "other")])
def test_send_to_device_skips_keys_at_any_depth(skip_keys):
    moved = send_to_device({"x": X, "label": X, "deep": [{"label": X, "x": X}]}, "meta", skip_keys=skip_keys)
    assert moved["label"] is X
    assert moved["deep"][0]["label"] is X
    assert (moved["x"].device.type, moved["deep"][0]["x"].device.type) == ("meta", "meta")


def test_objects_with_a_to_method_move_themselves():
    packed = pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 1]))
    moved = send_to_device({"packed": packed}, "meta")["packed"]
    assert isinstance(moved, PackedSequence)
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu"

    moved = send_to_device([MovableEncoding({"x": X, "id": "a"})], "meta")[0]
    assert isinstance(moved, MovableEncoding)
    assert (moved.x.device.type, moved.id) == ("meta", "a")
    skipped = send_to_device(MovableEncoding({"x": X, "y": X}), "meta", skip_keys="y")
    assert (type(skipped), skipped.x.device.type, skipped.y.device.type) == (MovableEncoding, "meta", "cpu")


def test_a_to_method_without_non_blocking_is_called_without_it():
    calls = []

    class Positional:
        def to(self, device):
            calls.append(device)
            return self

    class Both:
        def to(self, device, non_blocking=False):
            calls.append((device, non_blocking))
            return self

    class Broken:
        def to(self, device, non_blocking=False):
            raise TypeError("planted")

    send_to_device([Positional(), Both()], "cpu", non_blocking=True)
    assert calls == [torch.device("cpu"), (torch.device("cpu"), True)]
    with pytest.raises(TypeError, match="planted"):
        send_to_device(Broken(), "cpu", non_blocking=True)


def test_convert_to_fp32_and_its_wrapper():
    out = convert_to_fp32({"a": X.half(), "b": [X.bfloat16(), X.double(), torch.tensor(1)], "c": "text"})
    assert [out["a"].dtype, *[t.dtype for t in out["b"]]] == [torch.float32, torch.float32, torch.float64, torch.int64]
    packed = pack_padded_sequence(torch.ones(3, 2, 4).half(), torch.tensor([3, 1]))
    assert convert_to_fp32(packed).data.dtype == torch.float32
    assert torch.equal(convert_to_fp32(packed).batch_sizes, packed.batch_sizes)

    class Model:
        def forward(self, x):
            """Double it."""
            return Output(logits=x.half() * 2)

    model = Model()
    wrapped = convert_outputs_to_fp32(model.forward)
    assert wrapped.__doc__ == "Double it."
    assert wrapped.__wrapped__ == model.forward
    assert wrapped(X).logits.dtype == torch.float32


def test_convert_outputs_breaks_no_compiled_graph():
    def forward(x):
        return {"a": x.half() * 2, "b": [x.bfloat16(), None]}

    compiled = torch.compile(convert_outputs_to_fp32(forward), backend="eager", fullgraph=True)
    assert compiled(X)["a"].tolist() == [2, 4]


# -- shapes and small helpers ----------------------------------------------------------------------------------------------


def test_data_structure_and_back():
    data = {"x": torch.ones(2, 3), "deep": (torch.tensor(1), "a")}
    structure = get_data_structure(data)
    assert structure["x"] == TensorInformation(torch.Size([2, 3]), torch.float32)
    assert is_tensor_information(structure["deep"][0])
    assert not is_tensor_information(data["x"])
    made = initialize_tensors(structure)
    assert (made["x"].shape, made["deep"][0].dtype, made["deep"][1]) == ((2, 3), torch.int64, "a")
    assert get_shape(data) == {"x": [2, 3], "deep": ([], "a")}


def test_batch_size_and_device():
    assert find_batch_size({"id": ["a"], "scale": torch.tensor(2.0), "x": [torch.ones(4, 2)]}) == 4
    for empty in ([], {}, ()):
        with pytest.raises(ValueError, match="no batch size"):
            find_batch_size(empty)
    for other in ("text", 3, {"a": "b"}, torch.tensor(1.0)):
        with pytest.raises(TypeError, match="no batch size"):
            find_batch_size(other)
        assert ignorant_find_batch_size(other) is None
    assert ignorant_find_batch_size([]) is None
    assert ignorant_find_batch_size([X]) == 2
    assert find_device({"a": ["b", torch.empty(1, device="meta")]}) == torch.device("meta")
    assert find_device("text") is None


def test_slices_and_listify():
    data = {"x": torch.arange(6).view(3, 2), "scale": torch.tensor(2.0), "id": "a"}
    part = slice_tensors(data, slice(1, 3), process_index=0, num_processes=2)
    assert listify(part) == {"x": [[2, 3], [4, 5]], "scale": 2.0, "id": "a"}
    assert listify(torch.tensor([1.5], dtype=torch.bfloat16)) == [1.5]


def test_concatenate():
    a = {"x": torch.ones(1, 2), "n": Point(torch.tensor(1), "l"), "names": ["a"], "none": None}
    b = {"none": None, "x": torch.zeros(2, 2), "n": Point(torch.tensor(2), "l"), "names": ["b", "c"]}
    result = concatenate([a, b])
    assert result["x"].tolist() == [[1, 1], [0, 0], [0, 0]]
    assert (result["n"].x.tolist(), result["n"].label) == ([1, 2], "l")
    assert result["names"] == ["a", "b", "c"]
    assert result["none"] is None
    assert concatenate([torch.ones(2, 1), torch.ones(2, 2)], dim=1).shape == (2, 3)
    assert concatenate(([X], [X]))[0].shape == (4,)


@pytest.mark.parametrize(
    "data",
    [[1, 2], ["a", "b"], [{"x": X}, {"y": X}], [[X], [X, X]], [[X], (X,)], [X, "a"], [{X}, {X}]],
)
def test_concatenate_refuses_what_differs(data):
    with pytest.raises(TypeError, match="concatenated"):
        concatenate(data)


def test_concatenate_nothing():
    with pytest.raises(ValueError, match="empty"):
        concatenate([])


@pytest.mark.parametrize(("size", "processes", "padded"), [(3, 2, 4), (4, 2, 4), (1, 4, 4), (5, 4, 8), (0, 3, 0)])
def test_pad_input_tensors(size, processes, padded):
    data = {"x": torch.ones(size, 2), "other": torch.ones(size + 1), "scale": torch.tensor(1.0)}
    result = pad_input_tensors(data, size, processes)
    assert result["x"].shape == (padded, 2)
    assert result["x"].sum() == 2 * size
    assert result["x"][:size].eq(1).all()
    assert result["other"] is data["other"]
    assert pad_input_tensors(torch.ones(2, size), size, processes, dim=1).shape == (2, padded)


def test_recursively_apply_passes_arguments_and_can_be_strict():
    assert recursively_apply(torch.add, [X, "a"], X, alpha=2)[0].tolist() == [3, 6]
    with pytest.raises(TypeError, match="neg can't be applied to a str"):
        recursively_apply(torch.neg, {"x": X, "id": "a"}, error_on_other_type=True)
    doubled = recursively_apply(lambda n: 2 * n, {"n": [1, "a", 1]}, test_type=lambda v: isinstance(v, int))
    assert doubled == {"n": [2, "a", 2]}


def test_types():
    assert is_torch_tensor(X)
    assert not is_torch_tensor([X])
    assert is_namedtuple(Point(1, 2))
    assert not is_namedtuple(torch.max(torch.ones(1, 1), dim=0))
    assert honor_type(Point(1, 2), iter([3, 4])) == Point(3, 4)
    assert honor_type([], iter([3])) == [3]
