"""From what users log to plain Python values: the snapshot taken on the training thread.

The rules, the same for every tracker:

- nested mappings are flattened, names joined with ``/``;
- int, float, bool and str stay as they are, NaN and infinities too;
- tensors, arrays and scalars of one element become numbers (any dtype, any shape); those on an accelerator are read later, on the hub's thread;
- tensors and arrays of more elements, lists and any other object become text, and the hub says so once per name;
- texts are stored without secrets, see `drivetrain.tracking.redaction`.
"""

from __future__ import annotations

import enum
import json
import logging
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from decimal import Decimal
from typing import Any

from drivetrain.errors import TrackerError
from drivetrain.tracking.redaction import Redactor

__all__ = ["PendingValues", "Plain", "ReadLater", "Snapshot", "flatten", "local_tensor"]

Plain = float | int | str | bool
#: Snapshots 0-d tensors of an accelerator without waiting for it: `drivetrain.interfaces.Backend.read_later`.
ReadLater = Callable[[Sequence[Any]], "Future[list[float]]"]

logger = logging.getLogger("drivetrain.tracking")

#: Tensors and arrays with more elements are described, not written out.
_MOST_ELEMENTS = 1000
#: Names that were warned about are remembered up to this many, so that names with a step in them don't pile up.
_MOST_NOTES = 1000

_DEVICE = object()  # a reader's answer: the value is on an accelerator, read it later
_NESTED = object()  # a reader's answer: the value is a mapping, flatten it


class PendingValues:
    """Numbers that an accelerator may still be computing, and where they go."""

    __slots__ = ("casts", "future", "keys")

    def __init__(self, keys: list[str], casts: list[Callable[[float], Plain]], future: Future[list[float]]) -> None:
        self.keys = keys
        self.casts = casts
        self.future = future

    def fill(self, values: dict[str, Any], timeout: float | None = None) -> None:
        """Wait for the numbers and put them in their places."""
        for key, cast, number in zip(self.keys, self.casts, self.future.result(timeout), strict=True):
            try:
                values[key] = cast(number)
            except (ValueError, OverflowError):  # an integer dtype that was read as NaN can't be cast
                values[key] = number


class Snapshot:
    """Takes snapshots of logged values. One per hub; remembers how to read each type.

    Args:
        read_later: The backend's reader of tensors on an accelerator. None: they are read at once, which waits for the device.
        redactor: Leaves secrets out of what becomes a text.

    Example:
        >>> snapshot = Snapshot()
        >>> values, pending, weight = snapshot.scalars({"loss": 0.5, "eval": {"acc": 1, "note": "fine"}})
        >>> values
        {'loss': 0.5, 'eval/acc': 1, 'eval/note': 'fine'}
    """

    def __init__(self, read_later: ReadLater | None = None, redactor: Redactor | None = None) -> None:
        self._read_later = read_later
        self._redactor = redactor = redactor if redactor is not None else Redactor()
        self._readers: dict[type, Callable[[Any], Any]] = {
            bool: _same,
            int: _same,
            float: _same,
            str: redactor.text,
            dict: lambda v: _NESTED,
        }
        self._noted: set[str] = set()

    def scalars(self, values: Mapping[Any, Any]) -> tuple[dict[str, Any], PendingValues | None, int]:
        """Snapshot one row.

        Args:
            values: Anything by name, nested or not.

        Returns:
            The plain values by flat name; the numbers still being computed, which have None in their places; the row's weight (number of
            values, counting long texts for more).

        Raises:
            TrackerError: For a sharded tensor, which needs a collective to become a number.
        """
        out: dict[str, Any] = {}
        device: list[tuple[str, Any]] = []
        weight = self._read(values, "", out, device)
        return out, self._defer(out, device) if device else None, weight

    def config(self, values: Mapping[Any, Any]) -> dict[str, Any]:
        """Snapshot hyperparameters: like `scalars`, but None stays None and nothing is read later.

        Example:
            >>> Snapshot().config({"optimizer": {"name": "sgd", "nesterov": None}, "layers": [1, 2]})
            {'optimizer/name': 'sgd', 'optimizer/nesterov': None, 'layers': '[1, 2]'}
        """
        flat = flatten(values)
        out: dict[str, Any] = {}
        for key, value in flat.items():
            if value is None:
                out[key] = None
            elif isinstance(value, Mapping):  # an empty one
                out[key] = "{}"
            else:
                read = self._reader(value)(value)
                read = _item(value) if read is _DEVICE else self._setting(key, value) if read is None else read
                out[key] = self._redactor.setting(key, read)
        return out

    def text(self, text: Any) -> str:
        """A text as it may be stored.

        Example:
            >>> Snapshot().text("see https://me:secret@host")
            'see https://(left out)@host'
        """
        return self._redactor.text(str(text))

    def cell(self, value: Any) -> Any:
        """Snapshot a table's cell: number, text or None.

        Example:
            >>> Snapshot().cell(None), Snapshot().cell(2.5), Snapshot().cell(b"x")
            (None, 2.5, "b'x'")
        """
        if value is None:
            return None
        read = self._reader(value)(value)
        if read is _DEVICE:
            return _item(value)
        return self.text(value) if read is None or read is _NESTED else read

    def _read(self, values: Mapping[Any, Any], prefix: str, out: dict[str, Any], device: list[tuple[str, Any]]) -> int:
        """The hot path: one dict look-up and one call per value that isn't plain."""
        readers = self._readers
        weight = 0
        for key, value in values.items():
            kind = type(value)
            name = prefix + key if type(key) is str else f"{prefix}{key}"
            if kind is float or kind is int:
                out[name] = value
                weight += 1
                continue
            read = (readers.get(kind) or self._reader(value))(value)
            if read is _NESTED:
                weight += self._read(value, name + "/", out, device) if value else 0
                continue
            if read is _DEVICE:
                device.append((name, value))
                read = None
            elif read is None:
                read = self._text(name, value)
            out[name] = read
            weight += 1 if kind is not str else 1 + len(value) // 100
        return weight

    def _defer(self, out: dict[str, Any], device: list[tuple[str, Any]]) -> PendingValues | None:
        tensors: list[Any] = []
        keys: list[str] = []
        casts: list[Callable[[float], Plain]] = []
        for name, tensor in device:
            tensor = local_tensor(tensor)
            if tensor.numel() != 1:
                out[name] = self._text(name, tensor)
                continue
            keys.append(name)
            casts.append(_cast_for(tensor))
            tensors.append(tensor.detach().reshape(()))
        if not tensors:
            return None
        if self._read_later is None:
            for key, tensor in zip(keys, tensors, strict=True):
                out[key] = tensor.item()
            return None
        return PendingValues(keys, casts, self._read_later(tensors))

    def _reader(self, value: Any) -> Callable[[Any], Any]:
        """How to read values of this type, found out once per type."""
        kind = type(value)
        reader = self._readers.get(kind)
        if reader is None:
            reader = self._readers[kind] = (
                self.text if issubclass(kind, str) and not issubclass(kind, enum.Enum) else _classify(kind)
            )
        return reader

    def _setting(self, name: str, value: Any) -> str:
        """The text of a hyperparameter; lists are common there and need no note."""
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._redactor.text(_describe(value))
        return self._text(name, value, "Hyperparameters are numbers and texts.")

    def _text(
        self, name: str, value: Any, hint: str = "Log a number or a text, or use log_histogram, log_table, log_images."
    ) -> str:
        """The text of what isn't a number, with a note."""
        text = self._redactor.text(_describe(value))
        if name not in self._noted and len(self._noted) < _MOST_NOTES:
            self._noted.add(name)
            kind = type(value).__name__
            logger.warning("%r is a %s, which trackers can't store: kept as the text %.60r. %s", name, kind, text, hint)
        return text


def flatten(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings, names joined with ``/``; an empty mapping stays a value.

    Example:
        >>> flatten({"a": 1, "b": {"c": {"d": 2}, 3: 4}, "e": {}})
        {'a': 1, 'b/c/d': 2, 'b/3': 4, 'e': {}}
    """
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            out.update(flatten(value, f"{prefix}{key}/"))
        else:
            out[f"{prefix}{key}"] = value
    return out


def _same(value: Any) -> Any:
    return value


def _classify(kind: type) -> Callable[[Any], Any]:
    """The reader for a type: returns a plain value, None for "make a text of it", or a marker."""
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return _read_sharded if hasattr(kind, "full_tensor") else _read_tensor
    if issubclass(kind, enum.Enum):  # before the numbers: members of IntEnum and StrEnum are both
        return lambda v: v.value if type(v.value) in (int, float, bool, str) else v.name
    if all(hasattr(kind, a) for a in ("dtype", "size", "item")):  # NumPy's arrays and scalars, and their look-alikes
        return _read_array
    if issubclass(kind, Mapping):
        return lambda v: _NESTED
    if issubclass(kind, numbers.Integral):
        return int
    if issubclass(kind, (numbers.Real, Decimal)):
        return float
    return lambda v: None


def _read_tensor(value: Any) -> Any:
    if not value.is_cpu:
        return _DEVICE
    try:
        read = value.item()
    except RuntimeError:  # more than one element
        return None
    return None if type(read) is complex else read


def _read_sharded(value: Any) -> Any:
    return _read_tensor(local_tensor(value))


def local_tensor(value: Any) -> Any:
    """The tensor itself, or the copy that this process has of a replicated distributed one.

    Raises:
        TrackerError: For one that isn't replicated: gathering it takes every process, and only the main one logs.
    """
    if not hasattr(value, "full_tensor"):
        return value
    if all(placement.is_replicate() for placement in value.placements):
        return value.to_local()
    raise TrackerError(
        f"A sharded tensor ({value.placements}) was logged: gathering it takes every process, and only the main one logs. "
        "Log tensor.full_tensor(), called on every process."
    )


def _read_array(value: Any) -> Any:
    if value.size != 1:
        return None
    read = value.item()
    if type(read) in (float, int, bool, str):
        return read
    if type(read) is bytes:
        return None
    try:
        return float(read)  # dtypes that aren't NumPy's own, as bfloat16 of ml_dtypes
    except (TypeError, ValueError):
        return None


def _item(tensor: Any) -> Any:
    """A config's value on an accelerator: read at once."""
    return tensor.item() if tensor.numel() == 1 else _describe(tensor)


def _cast_for(tensor: Any) -> Callable[[float], Plain]:
    if tensor.dtype.is_floating_point:
        return float
    return bool if str(tensor.dtype) == "torch.bool" else int


def _describe(value: Any) -> str:
    """A text for anything; never raises."""
    try:
        if hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "tolist"):
            count = 1
            for n in value.shape:
                count *= int(n)
            if count > _MOST_ELEMENTS:
                return f"{type(value).__name__} of shape {tuple(value.shape)}, {value.dtype}"
            return str(value.tolist())
        if isinstance(value, (list, tuple)):
            return _describe_sequence(value)
        return str(value)
    except Exception as error:
        return f"<{type(value).__name__} without a text: {type(error).__name__}>"


def _describe_sequence(value: Sequence[Any]) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return str(list(value))
