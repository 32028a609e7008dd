import collections
import datetime as dt
import enum
import functools
import math
import pathlib
import struct
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from drivetrain.checkpoint.plain import decode, dumps, encode, loads
from drivetrain.checkpoint.tensors import to_bytes
from drivetrain.errors import CheckpointError


def round_trip(value, **kwargs):
    encoded = encode(value, **kwargs)
    tree = loads(dumps(encoded.tree))
    inline = loads(dumps(encoded.inline))
    return decode(tree, {k: v.clone() for k, v in encoded.tensors.items()}.__getitem__, inline)


def same(a, b):
    """Exact equality: types, bits of floats, order of dictionaries."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and not isinstance(a, np.generic):
        return struct.pack(">d", a) == struct.pack(">d", b)
    if isinstance(a, complex) and not isinstance(a, np.generic):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and to_bytes(a) == to_bytes(b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        extra = a.default_factory == b.default_factory if isinstance(a, collections.defaultdict) else True
        return extra and len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, (list, tuple, collections.deque)):
        extra = a.maxlen == b.maxlen if isinstance(a, collections.deque) else True
        return extra and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, (dt.datetime, dt.time)):
        return a == b and a.fold == b.fold and repr(a.tzinfo) == repr(b.tzinfo)
    return a == b


DTYPES = [
    "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool complex64 complex128 complex32",
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2",
]
DTYPES = [getattr(torch, name) for line in DTYPES for name in line.split() if hasattr(torch, name)]


def tensor_of(dtype, shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        data &= 1
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


tensors = st.builds(
    tensor_of,
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 9),
)
zones = (
    st.none()
    | st.timezones().map(lambda _: dt.timezone.utc)
    | st.builds(dt.timezone, st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)), st.just("here"))
)
hashable_leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**30, 10**60)
    | st.floats()
    | st.text()
    | st.text(alphabet=st.characters(min_codepoint=0xD7FF, max_codepoint=0xE000))
    | st.binary()
    | st.complex_numbers()
    | st.datetimes(timezones=st.none()).map(lambda d: d.replace(fold=1))
    | st.builds(lambda d, z: d.replace(tzinfo=z), st.datetimes(), zones)
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.sampled_from(
        [torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), pathlib.Path("a/b")]
    )
    | st.lists(st.integers(0, 5), max_size=3).map(torch.Size)
    | st.builds(range, st.integers(-5, 5), st.integers(-5, 5), st.sampled_from([-2, 1, 3]))
)
hashables = st.recursive(
    hashable_leaves,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
array_types = hnp.scalar_dtypes() | hnp.unicode_string_dtypes() | hnp.byte_string_dtypes()
leaves = (
    hashables
    | tensors
    | hnp.arrays(array_types, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    | hnp.from_dtype(np.dtype("f4")).map(np.float32)
    | st.binary(min_size=5000, max_size=5001)
    | st.binary().map(bytearray)
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.just("$tensor"), inner, max_size=3)
        | st.dictionaries(hashables, inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(collections.OrderedDict)
        | st.dictionaries(hashables, inner, max_size=2).map(lambda d: collections.defaultdict(list, d))
        | st.dictionaries(st.integers(), st.integers(), max_size=2).map(collections.Counter)
        | st.lists(inner, max_size=3).map(lambda v: collections.deque(v, maxlen=5))
        | st.sets(hashables, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values, st.sampled_from([0, 16, 10**6]))
def test_any_plain_value_comes_back_bit_for_bit(value, inline_limit):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert same(round_trip(value, inline_limit=inline_limit), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (3, 2)])
@pytest.mark.parametrize("inline_limit", [0, 10**6])
def test_tensors_of_every_dtype_and_shape(dtype, shape, inline_limit):
    value = tensor_of(dtype, shape)
    assert same(round_trip([value], inline_limit=inline_limit), [value])


def test_special_floats_keep_their_bits():
    signalling = struct.unpack(">d", bytes.fromhex("fff0000000000001"))[0]
    for value in [math.nan, -math.nan, signalling, math.inf, -math.inf, -0.0, 5e-324, 1e308, 1.0, 1e16]:
        assert same(round_trip(value), value)


def test_a_tensor_met_twice_is_stored_once_and_comes_back_as_one():
    weight = torch.randn(3)
    encoded = encode({"a": weight, "b": [weight], "c": weight.view(3), "d": weight[:2], "e": weight.clone()})
    assert set(encoded.tensors) == {"state.a", "state.d", "state.e"}
    back = round_trip({"a": weight, "b": [weight]}, inline_limit=100)
    assert back["a"] is back["b"][0]


def test_non_contiguous_conjugated_and_parameter_tensors():
    base = torch.randn(3, 4, dtype=torch.complex64)
    for value in [base.T, base.conj(), base[:, ::2], torch.randn(4).expand(3, 4), base.conj().imag]:
        assert torch.equal(round_trip(value), value.resolve_conj().resolve_neg())
        assert torch.equal(round_trip(value, inline_limit=10**6), value)
    back = round_trip(torch.nn.Parameter(torch.ones(2)))
    assert type(back) is torch.Tensor
    assert not back.requires_grad


def test_tensors_whose_paths_look_alike_do_not_mix():
    value = {
        "a.b": torch.tensor([1.0]),
        "a": {"b": torch.tensor([2.0])},
        "x": {1: torch.tensor(3), "1": torch.tensor(4)},
    }
    assert same(round_trip(value), value)


class Color(enum.Enum):
    RED = 1


class Sub(dict):
    pass


Point = collections.namedtuple("Point", "x y")
cycle = []
cycle.append(cycle)
deep = []
for _ in range(300):
    deep = [deep]


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        ({"lr_lambdas": [lambda e: e]}, "scheduler[0].lr_lambdas[0]", "a lambda"),
        ({"fn": math.sin}, "scheduler[0].fn", "a function (math.sin)"),
        ([functools.partial(print)], "scheduler[0][0]", "functools.partial"),
        ({"kind": Color.RED}, "scheduler[0].kind", "store the enum's value"),
        (({"p": Point(1, 2)},), "scheduler[0][0].p", "named tuple into a dictionary"),
        ({"my key": object()}, "scheduler[0]['my key']", "builtins.object"),
        ({3: object}, "scheduler[0][3]", "a class (builtins.object)"),
        ({(1, Color.RED): 1}, "key (1, <Color.RED: 1>) of scheduler[0]", "enum"),
        (Sub(a=1), "scheduler[0]", "builtin type"),
        (torch.Generator(), "scheduler[0]", "get_state()"),
        (torch.nn.Linear(1, 1), "scheduler[0]", "state_dict()"),
        (torch.eye(2).to_sparse(), "scheduler[0]", "sparse"),
        (torch.empty(2, device="meta"), "scheduler[0]", "meta device"),
        (np.array([object()]), "scheduler[0]", "NumPy array of object"),
        (np.zeros(1, dtype=[("a", "i4")]), "scheduler[0]", "NumPy array"),
        (collections.defaultdict(lambda: 1), "scheduler[0]", "a defaultdict of a lambda"),
        (cycle, "scheduler[0][0]", "contains itself"),
        (deep, "scheduler[0][0]", "nested more than 200"),
    ],
    ids=str,
)
def test_anything_else_is_refused_with_its_path(value, path, words):
    with pytest.raises(CheckpointError) as caught:
        encode(value, path="scheduler[0]")
    assert str(caught.value).startswith(path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "tree",
    [
        {"$import": "os:system"},
        {"$tuple": 3},
        {"$float": "zz"},
        {"$torch.dtype": "system"},
        {"$ndarray": ["O", [1], "x"]},
        {"$npscalar": ["|O", "AAAAAAAAAAA="]},
        {"$defaultdict": ["eval", []]},
        {"$timedelta": [10**30]},
    ],
    ids=str,
)
def test_what_is_unknown_or_damaged_is_refused_and_nothing_else_is_built(tree):
    with pytest.raises(CheckpointError):
        decode(tree, lambda name: torch.zeros(1))


def test_damaged_json_and_inline_tensors_are_refused():
    with pytest.raises(CheckpointError, match="not JSON"):
        loads(b"{")
    with pytest.raises(CheckpointError, match="bytes, not"):
        decode({"$tensor": "a"}, {}.__getitem__, {"a": {"dtype": "float32", "shape": [2], "data": "AAAA"}})


def _optimizers():
    import inspect

    for name, kind in vars(torch.optim).items():
        if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
            yield pytest.param(kind, id=name)


@pytest.mark.parametrize("kind", list(_optimizers()))
def test_state_of_every_torch_optimizer(kind):
    def build():
        torch.manual_seed(0)
        sparse = kind is torch.optim.SparseAdam
        model = torch.nn.Embedding(4, 3, sparse=True) if sparse else torch.nn.Linear(4, 3, bias=kind.__name__ != "Muon")
        return model, kind(model.parameters(), lr=0.1)

    def step(model, optimizer):
        def closure():
            optimizer.zero_grad()
            loss = (
                model(torch.tensor([1, 2]) if isinstance(model, torch.nn.Embedding) else torch.ones(2, 4))
                .square()
                .sum()
            )
            loss.backward()
            return loss

        optimizer.step(closure)

    model, optimizer = build()
    step(model, optimizer)
    step(model, optimizer)
    state = optimizer.state_dict()
    back = round_trip(state)
    assert same(back, state)
    other, fresh = build()
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(back)
    step(model, optimizer)
    step(other, fresh)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def _schedulers():
    s = torch.optim.lr_scheduler
    yield "LambdaLR", lambda o: s.LambdaLR(o, lambda e: 0.9**e)
    yield "MultiplicativeLR", lambda o: s.MultiplicativeLR(o, lambda e: 0.9)
    yield "StepLR", lambda o: s.StepLR(o, 2)
    yield "MultiStepLR", lambda o: s.MultiStepLR(o, [2, 4])
    yield "ConstantLR", lambda o: s.ConstantLR(o)
    yield "LinearLR", lambda o: s.LinearLR(o)
    yield "ExponentialLR", lambda o: s.ExponentialLR(o, 0.9)
    yield "PolynomialLR", lambda o: s.PolynomialLR(o)
    yield "CosineAnnealingLR", lambda o: s.CosineAnnealingLR(o, 10)
    yield "CosineAnnealingWarmRestarts", lambda o: s.CosineAnnealingWarmRestarts(o, 3)
    yield "SequentialLR", lambda o: s.SequentialLR(o, [s.ConstantLR(o), s.ExponentialLR(o, 0.9)], [2])
    yield "ChainedScheduler", lambda o: s.ChainedScheduler([s.ConstantLR(o), s.ExponentialLR(o, 0.9)])
    yield "ReduceLROnPlateau", lambda o: s.ReduceLROnPlateau(o)
    yield "CyclicLR", lambda o: s.CyclicLR(o, 0.1, 0.2, cycle_momentum=False)
    yield "CyclicLR_exp", lambda o: s.CyclicLR(o, 0.1, 0.2, mode="exp_range", cycle_momentum=False)
    yield "OneCycleLR", lambda o: s.OneCycleLR(o, 0.2, total_steps=20)
    yield "SWALR", lambda o: torch.optim.swa_utils.SWALR(o, 0.05)


def test_all_torch_schedulers_are_covered():
    s = torch.optim.lr_scheduler
    kinds = {n for n in s.__all__ if issubclass(getattr(s, n), s.LRScheduler)} - {"LRScheduler"}
    assert kinds <= {name for name, _ in _schedulers()}


@pytest.mark.parametrize(("name", "make"), [pytest.param(n, m, id=n) for n, m in _schedulers()])
@pytest.mark.filterwarnings("ignore")
def test_state_of_every_torch_scheduler(name, make):
    def build():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        return optimizer, make(optimizer)

    def step(optimizer, scheduler):
        optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return optimizer.param_groups[0]["lr"]

    optimizer, scheduler = build()
    for _ in range(3):
        step(optimizer, scheduler)
    back, fresh = build()
    back.load_state_dict(round_trip(optimizer.state_dict(), path="optimizer[0]"))
    fresh.load_state_dict(round_trip(scheduler.state_dict(), path="scheduler[0]"))
    assert [step(back, fresh) for _ in range(8)] == [step(optimizer, scheduler) for _ in range(8)]
