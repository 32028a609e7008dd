"""Plain data as JSON with named tensors beside it: what a checkpoint holds instead of pickles.

`encode` takes a value apart into a tree that JSON can hold and a table of tensors; `decode` puts it together again. Only a
fixed set of types is known, so that reading builds nothing else and runs no code that stands in a file. What isn't plain is
refused when it is saved, with the path of the offending value.

In the tree, ``None``, booleans, finite floats, strings, lists, dictionaries with string keys and integers below 2**63 stand for
themselves; everything else is an object with one key that starts with ``$``.
"""

from __future__ import annotations

import base64
import collections
import datetime as dt
import json
import math
import pathlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from drivetrain.checkpoint.tensors import (
    dtype_from_name,
    dtype_name,
    is_dtensor,
    tensor_from_bytes,
    tensor_identity,
    to_bytes,
)
from drivetrain.errors import CheckpointError
from drivetrain.interfaces.shards import Shards

__all__ = ["Encoded", "decode", "dumps", "encode", "encode_parts", "inline_tensor", "loads"]

_MAX_DEPTH = 200
#: Byte strings and raw arrays above this size go to a tensor instead of base64.
_MAX_BASE64 = 4096
#: Factories of a defaultdict that are known by name.
_FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str}
_FACTORY_NAMES = {factory: name for name, factory in _FACTORIES.items()}
#: NumPy types with a torch type of the same name, stored as that; the others are stored as their bytes.
_NATIVE_ARRAYS = {
    np.dtype(code) for code in ("?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8")
}


@dataclass(slots=True)
class Encoded:
    """A value taken apart.

    Args:
        tree: What JSON can hold.
        tensors: Tensors (whole, DTensors or `Shards`) to be stored in a file of their own, by the path at which each was first met.
        inline: Small tensors, as JSON, by the same kind of name.
    """

    tree: Any = None
    tensors: dict[str, Any] = field(default_factory=dict)
    inline: dict[str, Any] = field(default_factory=dict)


def encode(value: Any, *, path: str = "state", inline_limit: int = 0) -> Encoded:
    """Take plain data apart.

    Known are None, bool, int, float, complex, str, bytes, list, tuple, dict (any plain keys), set, frozenset, OrderedDict,
    defaultdict (of builtin factories), Counter, deque, range, slice, dense tensors, DTensors and `Shards`, NumPy arrays and scalars, ``torch.dtype``,
    ``torch.device``, ``torch.Size``, paths, and dates, times and time spans. Types must match exactly: a subclass would come back as something else.
    Tensors come back on the CPU, without ``requires_grad``; a tensor met twice comes back as one.

    Args:
        value: The data.
        path: How messages and tensor names call the value.
        inline_limit: Tensors of at most this many bytes become part of the JSON.

    Raises:
        CheckpointError: For anything else, with the path of the offending value.

    Example:
        >>> encoded = encode({"lr": 0.1, "betas": (0.9, 0.99), "weight": torch.zeros(2)}, path="optimizer[0]")
        >>> encoded.tree
        {'lr': 0.1, 'betas': {'$tuple': [0.9, 0.99]}, 'weight': {'$tensor': 'optimizer[0].weight'}}
        >>> decode(encoded.tree, encoded.tensors.__getitem__)["betas"]
        (0.9, 0.99)
        >>> encode({"hooks": [print]}, path="scheduler[0]")
        Traceback (most recent call last):
        ...
        drivetrain.errors.CheckpointError: scheduler[0].hooks[0]: a function (builtins.print) can't be saved. Checkpoints hold plain data and tensors only: leave it out of state_dict(), or store what it takes to build it anew.
    """
    encoder = _Encoder(inline_limit)
    encoder.out.tree = encoder.encode(value, path, 0)
    return encoder.out


def encode_parts(parts: Mapping[str, Any], *, inline_limit: int = 0) -> Encoded:
    """Take several values apart into one `Encoded`, whose tree has the parts' names; each name is the path of its value.

    A tensor that several parts share is stored once.

    Example:
        >>> encode_parts({"scheduler[0]": {"last_epoch": 3}, "counters": {"step": 4}}).tree
        {'scheduler[0]': {'last_epoch': 3}, 'counters': {'step': 4}}
    """
    encoder = _Encoder(inline_limit)
    encoder.out.tree = {path: encoder.encode(value, path, 0) for path, value in parts.items()}
    return encoder.out


def decode(tree: Any, tensor: Callable[[str], Any], inline: Mapping[str, Any] | None = None) -> Any:
    """Put together what `encode` took apart.

    Args:
        tree: `Encoded.tree`.
        tensor: Gives the tensor of a name (or a placeholder for it); called once per name.
        inline: `Encoded.inline`.

    Raises:
        CheckpointError: If the tree holds what this version doesn't know.

    Example:
        >>> decode({"$tuple": [1, {"$set": [2]}]}, {}.__getitem__)
        (1, {2})
    """
    return _Decoder(tensor, inline or {}).decode(tree)


def inline_tensor(small: Mapping[str, Any]) -> torch.Tensor:
    """A tensor of `Encoded.inline`.

    Example:
        >>> inline_tensor(encode(torch.tensor(3), inline_limit=8).inline["state"])
        tensor(3)
    """
    try:
        data = base64.b64decode(small["data"], validate=True)
        return tensor_from_bytes(data, dtype_from_name(small["dtype"]), small["shape"])
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"damaged tensor: {error}") from error


def dumps(tree: Any) -> bytes:
    """The tree as JSON text in UTF-8.

    Example:
        >>> dumps({"a": [1, 2.0]})
        b'{"a":[1,2.0]}'
    """
    return json.dumps(tree, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def loads(data: bytes) -> Any:
    """Read what `dumps` wrote.

    Raises:
        CheckpointError: If it isn't JSON.

    Example:
        >>> loads(b'{"a": [1]}')
        {'a': [1]}
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not JSON: {error}") from None


def _refuse(path: str, what: str, hint: str = "") -> CheckpointError:
    hint = hint or "leave it out of state_dict(), or store what it takes to build it anew."
    return CheckpointError(f"{path}: {what} can't be saved. Checkpoints hold plain data and tensors only: {hint}")


def _describe(value: Any) -> str:
    kind = type(value)
    if callable(value) and hasattr(value, "__qualname__") and not isinstance(value, type):
        noun = "a lambda" if value.__name__ == "<lambda>" else "a function"
        return f"{noun} ({value.__module__}.{value.__qualname__})"
    if isinstance(value, type):
        return f"a class ({value.__module__}.{value.__qualname__})"
    return f"an object of {kind.__module__}.{kind.__qualname__}"


_HINTS: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (lambda v: type(v).__mro__[1:2] == (tuple,), "turn the named tuple into a dictionary."),
    (lambda v: hasattr(v, "value") and hasattr(v, "name"), "store the enum's value."),
    (lambda v: isinstance(v, torch.Generator), "store its get_state()."),
    (lambda v: hasattr(v, "state_dict"), "store its state_dict()."),
    (lambda v: isinstance(v, torch.Tensor), "turn it into a plain, dense tensor."),
    (lambda v: isinstance(v, (dict, list, str, int, float)), "turn it into the builtin type that it derives from."),
)


def _key_path(path: str, key: Any) -> str:
    if type(key) is str and key and all(part.isidentifier() or part.isdigit() for part in key.split(".")):
        return f"{path}.{key}"
    return f"{path}[{key!r}]"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


class _Encoder:
    def __init__(self, inline_limit: int) -> None:
        self.out = Encoded()
        self._inline_limit = inline_limit
        self._names: dict[Any, str] = {}
        self._alive: list[Any] = []  # identities in _names stay valid only while their objects live
        self._open: set[int] = set()

    def encode(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind in _CONTAINERS:
            return self._container(value, path, depth)
        method = _LEAVES.get(kind)
        if method is not None:
            return method(self, value, path)
        if isinstance(value, pathlib.PurePath):
            return {"$path": str(value)}
        if isinstance(value, np.generic):
            return self._numpy_scalar(value, path)
        if is_dtensor(value):
            return self._tensor(value, path)
        hint = next((text for test, text in _HINTS if test(value)), "")
        raise _refuse(path, _describe(value), hint)

    # -- containers --------------------------------------------------------------------------------------------------------

    def _container(self, value: Any, path: str, depth: int) -> Any:
        if depth >= _MAX_DEPTH:
            raise _refuse(path, f"data nested more than {_MAX_DEPTH} levels deep", "flatten it.")
        if id(value) in self._open:
            raise _refuse(path, f"a {type(value).__name__} that contains itself", "break the cycle.")
        self._open.add(id(value))
        try:
            return _CONTAINERS[type(value)](self, value, path, depth + 1)
        finally:
            self._open.discard(id(value))

    def _items(self, value: Any, path: str, depth: int) -> list[Any]:
        return [self.encode(item, f"{path}[{i}]", depth) for i, item in enumerate(value)]

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if all(type(k) is str and not k.startswith("$") and not _has_surrogates(k) for k in value):
            return {k: self.encode(v, _key_path(path, k), depth) for k, v in value.items()}
        return {"$dict": self._pairs(value, path, depth)}

    def _pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
        return [
            [self.encode(k, f"key {k!r} of {path}", depth), self.encode(v, _key_path(path, k), depth)]
            for k, v in value.items()
        ]

    def _default_dict(self, value: collections.defaultdict[Any, Any], path: str, depth: int) -> Any:
        factory = value.default_factory
        if factory is not None and factory not in _FACTORY_NAMES:
            raise _refuse(path, f"a defaultdict of {_describe(factory)}", "turn it into a dict.")
        name = None if factory is None else _FACTORY_NAMES[factory]
        return {"$defaultdict": [name, self._pairs(value, path, depth)]}

    def _set(self, value: Any, path: str, depth: int) -> Any:
        items = [self.encode(item, f"{path}{{{item!r}}}", depth) for item in value]
        return {f"${type(value).__name__}": sorted(items, key=dumps)}

    # -- leaves ------------------------------------------------------------------------------------------------------------

    def _int(self, value: int, path: str) -> Any:
        return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}

    def _float(self, value: float, path: str) -> Any:
        return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}

    def _str(self, value: str, path: str) -> Any:
        return {"$str": value.encode("utf-8", "surrogatepass").hex()} if _has_surrogates(value) else value

    def _bytes(self, value: bytes | bytearray, path: str) -> Any:
        tag = f"${type(value).__name__}"
        if len(value) <= _MAX_BASE64:
            return {tag: _base64(bytes(value))}
        data = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        return {tag: self._tensor(data, path)}

    def _time(self, value: dt.datetime | dt.time, path: str) -> Any:
        zone = value.tzinfo
        if zone is not None and type(zone) is not dt.timezone:
            raise _refuse(path, f"a time in a zone of {_describe(zone)}", "convert it to UTC.")
        naive = value.replace(tzinfo=None, fold=0).isoformat()
        offset = None if zone is None else [self.encode(a, path, 0) for a in zone.__getinitargs__()]  # type: ignore[attr-defined]
        return {f"${type(value).__name__}": [naive, value.fold, offset]}

    # -- tensors and arrays ------------------------------------------------------------------------------------------------

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        problem = _unfit(value)
        if problem:
            raise _refuse(path, problem, "turn it into a plain, dense tensor with values.")
        value = value.detach()
        identity = tensor_identity(value)
        name = self._names.get(identity)
        if name is None:
            name = self._names[identity] = self._free_name(path)
            self._alive.append(value)
            if not is_dtensor(value) and value.nbytes <= self._inline_limit:
                self.out.inline[name] = {
                    "dtype": dtype_name(value.dtype),
                    "shape": list(value.shape),
                    "data": _base64(to_bytes(value)),
                }
            else:
                self.out.tensors[name] = value
        return {"$tensor": name}

    def _shards(self, value: Shards, path: str) -> Any:
        identity = tensor_identity(value)
        if identity not in self._names:
            self._names[identity] = name = self._free_name(path)
            self._alive.append(value)
            self.out.tensors[name] = value
        return {"$tensor": self._names[identity]}

    def _free_name(self, path: str) -> str:
        name, count = path, 1
        while name in self.out.tensors or name in self.out.inline:
            count += 1
            name = f"{path}#{count}"
        return name

    def _array(self, value: np.ndarray[Any, Any], path: str) -> Any:
        if value.dtype.hasobject or value.dtype.fields is not None:
            raise _refuse(path, f"a NumPy array of {value.dtype}", "store it as a list, or as one array per field.")
        shape = list(value.shape)
        identity = ("array", id(value))
        if identity not in self._names:
            self._alive.append(value)
            if value.dtype in _NATIVE_ARRAYS:
                data = torch.from_numpy(np.array(value, order="C", copy=True))
            else:
                raw = bytearray(np.ascontiguousarray(value).tobytes())
                data = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
            self._names[identity] = self._tensor(data, path)["$tensor"]
        return {"$ndarray": [value.dtype.str, shape, self._names[identity]]}

    def _numpy_scalar(self, value: np.generic, path: str) -> Any:
        if value.dtype.hasobject or value.dtype.fields is not None:
            raise _refuse(path, f"a NumPy scalar of {value.dtype}")
        return {"$npscalar": [value.dtype.str, _base64(value.tobytes())]}


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= c <= "\udfff" for c in text) if not text.isascii() else False


def _unfit(value: torch.Tensor) -> str:
    """Why a tensor has no plain values, or nothing."""
    if value.layout is not torch.strided:
        return f"a tensor of layout {value.layout}"
    if value.is_meta:
        return "a tensor on the meta device, which has no values,"
    if value.is_quantized or value.is_nested:
        return "a quantized or nested tensor"
    return ""


_CONTAINERS: dict[type, Callable[[_Encoder, Any, str, int], Any]] = {
    list: _Encoder._items,
    tuple: lambda self, v, path, depth: {"$tuple": self._items(v, path, depth)},
    dict: _Encoder._dict,
    collections.OrderedDict: lambda self, v, path, depth: {"$OrderedDict": self._pairs(v, path, depth)},
    collections.Counter: lambda self, v, path, depth: {"$Counter": self._pairs(v, path, depth)},
    collections.defaultdict: _Encoder._default_dict,
    collections.deque: lambda self, v, path, depth: {"$deque": [self._items(v, path, depth), v.maxlen]},
    set: _Encoder._set,
    frozenset: _Encoder._set,
    slice: lambda self, v, path, depth: {"$slice": self._items((v.start, v.stop, v.step), path, depth)},
}
_LEAVES: dict[type, Callable[[_Encoder, Any, str], Any]] = {
    int: _Encoder._int,
    float: _Encoder._float,
    str: _Encoder._str,
    bytes: _Encoder._bytes,
    bytearray: _Encoder._bytes,
    complex: lambda self, v, path: {"$complex": [self._float(v.real, path), self._float(v.imag, path)]},
    range: lambda self, v, path: {"$range": [self._int(n, path) for n in (v.start, v.stop, v.step)]},
    dt.datetime: _Encoder._time,
    dt.time: _Encoder._time,
    dt.date: lambda self, v, path: {"$date": v.isoformat()},
    dt.timedelta: lambda self, v, path: {"$timedelta": [v.days, v.seconds, v.microseconds]},
    torch.dtype: lambda self, v, path: {"$torch.dtype": dtype_name(v)},
    torch.device: lambda self, v, path: {"$torch.device": str(v)},
    torch.Size: lambda self, v, path: {"$torch.Size": list(v)},
    torch.Tensor: _Encoder._tensor,
    torch.nn.Parameter: _Encoder._tensor,
    Shards: _Encoder._shards,
    np.ndarray: _Encoder._array,
}


class _Decoder:
    def __init__(self, tensor: Callable[[str], Any], inline: Mapping[str, Any]) -> None:
        self._fetch = tensor
        self._inline = inline
        self._tensors: dict[str, Any] = {}

    def decode(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.decode(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if len(tree) == 1:
            (tag,) = tree
            if tag.startswith("$"):
                return self._tagged(tag[1:], tree[tag])
        return {key: self.decode(item) for key, item in tree.items()}

    def _tagged(self, tag: str, content: Any) -> Any:
        build = _BUILDERS.get(tag)
        if build is None:
            raise CheckpointError(f"unknown kind of value {tag!r}: it was written by a newer version, or is damaged")
        try:
            return build(self, content)
        except (TypeError, ValueError, KeyError, IndexError, OverflowError, struct.error) as error:
            raise CheckpointError(f"damaged value of kind {tag!r}: {error}") from error

    def tensor(self, name: str) -> Any:
        if name not in self._tensors:
            small = self._inline.get(name)
            self._tensors[name] = self._fetch(name) if small is None else inline_tensor(small)
        return self._tensors[name]

    def pairs(self, content: Any) -> list[tuple[Any, Any]]:
        return [(self.decode(k), self.decode(v)) for k, v in content]

    def bytes(self, content: Any) -> bytes:
        if isinstance(content, dict):
            return to_bytes(self.tensor(content["$tensor"]))
        return base64.b64decode(content, validate=True)

    def float(self, content: Any) -> float:
        decoded = self.decode(content)
        assert isinstance(decoded, float)
        return decoded

    def zone(self, content: Any) -> dt.timezone | None:
        return None if content is None else dt.timezone(*self.decode(content))

    def array(self, content: Any) -> Any:
        kind, shape, name = content
        dtype = _numpy_dtype(kind)
        if dtype in _NATIVE_ARRAYS:
            return np.array(self.tensor(name).numpy(), copy=True).reshape(shape)
        data = to_bytes(self.tensor(name))
        if dtype.itemsize == 0:
            return np.zeros(shape, dtype=dtype)
        return np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)

    def numpy_scalar(self, content: Any) -> Any:
        dtype = _numpy_dtype(content[0])
        data = base64.b64decode(content[1], validate=True)
        return np.frombuffer(data, dtype=dtype)[0] if dtype.itemsize else dtype.type()


def _numpy_dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.hasobject or dtype.fields is not None:
        raise ValueError(f"NumPy type {text!r}")
    return dtype


def _factory(name: str | None) -> Any:
    return None if name is None else _FACTORIES[name]


_BUILDERS: dict[str, Callable[[_Decoder, Any], Any]] = {
    "tuple": lambda self, c: tuple(self.decode(list(c))),
    "dict": lambda self, c: dict(self.pairs(c)),
    "OrderedDict": lambda self, c: collections.OrderedDict(self.pairs(c)),
    "Counter": lambda self, c: collections.Counter(dict(self.pairs(c))),
    "defaultdict": lambda self, c: collections.defaultdict(_factory(c[0]), self.pairs(c[1])),
    "deque": lambda self, c: collections.deque(self.decode(c[0]), c[1]),
    "set": lambda self, c: set(self.decode(c)),
    "frozenset": lambda self, c: frozenset(self.decode(c)),
    "slice": lambda self, c: slice(*self.decode(c)),
    "range": lambda self, c: range(*self.decode(c)),
    "int": lambda self, c: int(c, 16),
    "float": lambda self, c: struct.unpack(">d", bytes.fromhex(c))[0],
    "complex": lambda self, c: complex(self.float(c[0]), self.float(c[1])),
    "str": lambda self, c: bytes.fromhex(c).decode("utf-8", "surrogatepass"),
    "bytes": lambda self, c: self.bytes(c),
    "bytearray": lambda self, c: bytearray(self.bytes(c)),
    "path": lambda self, c: pathlib.Path(c),
    "datetime": lambda self, c: dt.datetime.fromisoformat(c[0]).replace(fold=c[1], tzinfo=self.zone(c[2])),
    "time": lambda self, c: dt.time.fromisoformat(c[0]).replace(fold=c[1], tzinfo=self.zone(c[2])),
    "date": lambda self, c: dt.date.fromisoformat(c),
    "timedelta": lambda self, c: dt.timedelta(*c),
    "torch.dtype": lambda self, c: dtype_from_name(c),
    "torch.device": lambda self, c: torch.device(c),
    "torch.Size": lambda self, c: torch.Size(c),
    "tensor": lambda self, c: self.tensor(c),
    "ndarray": lambda self, c: self.array(c),
    "npscalar": lambda self, c: self.numpy_scalar(c),
}
