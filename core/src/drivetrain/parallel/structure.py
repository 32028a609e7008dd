"""Functions over any nested structure of tensors.

A structure is a tensor, or any nesting of mappings, lists, tuples, named tuples, dataclasses and sets that holds some. Containers keep
their type and whatever else they hold (``defaultdict``'s factory, attributes of a subclass); strings, numbers, None and objects
that are neither containers nor tensors stay as they are. What changes nothing returns the very object that it was given. A tensor or
container that occurs twice is treated once, so that both places still share it. A container that contains itself is a ValueError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drivetrain.parallel._containers import ATOMS, Container, container_of, contains_itself, is_namedtuple, walk

__all__ = [
    "TensorInformation",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "find_batch_size",
    "find_device",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "iterate_tensors",
    "listify",
    "map_tensors",
    "pad_input_tensors",
    "recursively_apply",
    "send_to_device",
    "slice_tensors",
]

_OPEN = object()
_HALF = (torch.float16, torch.bfloat16)


def is_torch_tensor(tensor: Any) -> bool:
    """Whether ``tensor`` is a torch tensor.

    Example:
        >>> is_torch_tensor(torch.ones(1)), is_torch_tensor([1.0])
        (True, False)
    """
    return isinstance(tensor, torch.Tensor)


# -- the walk --------------------------------------------------------------------------------------------------------------


def map_tensors(
    function: Callable[[Any], Any],
    data: Any,
    *,
    is_leaf: Callable[[Any], bool] = is_torch_tensor,
    skip_keys: Collection[Any] = (),
    on_other: Callable[[Any], Any] | None = None,
) -> Any:
    """Apply a function to every tensor of a structure.

    Args:
        function: Called once with each leaf; what it returns takes the leaf's place.
        data: Any nested structure.
        is_leaf: What counts as a leaf; asked before a value is taken for a container.
        skip_keys: Keys of mappings, at any depth, whose values stay as they are.
        on_other: Called with each value that is neither a leaf nor a container; what it returns takes its place. None keeps it.

    Returns:
        A structure of the same types. ``data`` itself if every leaf was returned as it was.

    Raises:
        ValueError: If a container contains itself.
        TypeError: If a container would have to change and can't be made anew.

    Example:
        >>> from collections import defaultdict
        >>> batch = defaultdict(list, x=torch.ones(2), name="a")
        >>> map_tensors(torch.neg, batch)
        defaultdict(<class 'list'>, {'x': tensor([-1., -1.]), 'name': 'a'})
        >>> map_tensors(lambda t: t, batch) is batch
        True
    """
    return _Mapper(function, is_leaf, skip_keys, on_other).visit(data)


class _Mapper:
    """One walk. The memo holds the values themselves too, so that no id is reused while it lives."""

    __slots__ = ("atoms", "function", "is_leaf", "memo", "on_other", "skip_keys")

    def __init__(
        self,
        function: Callable[[Any], Any],
        is_leaf: Callable[[Any], bool],
        skip_keys: Collection[Any],
        on_other: Callable[[Any], Any] | None,
    ) -> None:
        self.function = function
        self.is_leaf = is_leaf
        self.skip_keys = skip_keys
        self.on_other = on_other
        self.memo: dict[int, tuple[Any, Any]] = {}
        # Strings and numbers aren't worth a look, unless the caller's test may ask for them.
        self.atoms = ATOMS if is_leaf in (is_torch_tensor, _is_movable, _is_movable_mapping_aside) else frozenset()

    def visit(self, value: Any) -> Any:
        if type(value) in self.atoms:
            return value if self.on_other is None else self.on_other(value)
        seen = self.memo.get(id(value))
        if seen is not None:
            if seen[1] is _OPEN:
                raise ValueError(contains_itself(value))
            return seen[1]
        if self.is_leaf(value):
            result = self.function(value)
        else:
            rules = container_of(value)
            if rules is None:
                return value if self.on_other is None else self.on_other(value)
            self.memo[id(value)] = (value, _OPEN)
            result = self._visit_children(value, rules)
        self.memo[id(value)] = (value, result)
        return result

    def _visit_children(self, value: Any, rules: Container) -> Any:
        changed = False
        children = []
        skip = self.skip_keys if self.skip_keys and isinstance(value, Mapping) else ()
        for key, old in rules.children(value):
            new = old if key in skip else self.visit(old)
            changed = changed or new is not old
            children.append(new)
        return rules.rebuild(value, children) if changed else value


def iterate_tensors(data: Any, *, is_leaf: Callable[[Any], bool] = is_torch_tensor) -> Iterator[torch.Tensor]:
    """Every tensor of a structure, depth first.

    Example:
        >>> [t.item() for t in iterate_tensors({"a": torch.tensor(1), "b": ["x", torch.tensor(2)]})]
        [1, 2]
    """
    return (value for _, value, _ in walk(data) if is_leaf(value))


def recursively_apply(
    func: Callable[..., Any],
    data: Any,
    *args: Any,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: Any,
) -> Any:
    """Apply ``func(leaf, *args, **kwargs)`` to every leaf of a structure; the general form of `map_tensors`.

    Args:
        func: Called with each leaf.
        data: Any nested structure.
        *args: Passed to ``func``.
        test_type: What counts as a leaf.
        error_on_other_type: Whether a value that is neither a leaf nor a container is an error instead of kept.
        **kwargs: Passed to ``func``.

    Raises:
        TypeError: For another type, with ``error_on_other_type``.

    Example:
        >>> recursively_apply(torch.add, (torch.ones(1), "a"), 2)
        (tensor([3.]), 'a')
    """

    def refuse(value: Any) -> Any:
        name = getattr(func, "__name__", repr(func))
        raise TypeError(
            f"{name} can't be applied to a {type(value).__name__}: only to tensors, nested in any container."
        )

    return map_tensors(
        lambda leaf: func(leaf, *args, **kwargs),
        data,
        is_leaf=test_type,
        on_other=refuse if error_on_other_type else None,
    )


# -- devices and dtypes ----------------------------------------------------------------------------------------------------


def send_to_device(
    tensor: Any,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Sequence[str] | None = None,
) -> Any:
    """Move every tensor of a structure to a device.

    Objects with a ``to(device)`` method (a PackedSequence, a tokenizer's batch) are moved with it; with ``skip_keys``, mappings
    among them are moved item by item. Tensors that are there already are returned as they are, and so is a structure of such tensors.

    Args:
        tensor: Any nested structure.
        device: Where to.
        non_blocking: Copy without waiting, where source and target can.
        skip_keys: A key, or keys, of mappings at any depth whose values stay where they are.

    Returns:
        The structure with its tensors on ``device``.

    Example:
        >>> batch = {"x": torch.ones(1), "id": "a"}
        >>> send_to_device(batch, "cpu") is batch
        True
        >>> send_to_device(batch, "meta")
        {'x': tensor(..., device='meta', size=(1,)), 'id': 'a'}
    """
    if not isinstance(device, torch.device):
        device = torch.device(device)
    skip: Collection[str] = (
        () if skip_keys is None else (skip_keys,) if isinstance(skip_keys, str) else tuple(skip_keys)
    )

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf if leaf.device == device else leaf.to(device, non_blocking=non_blocking)
        return _to(leaf, device, non_blocking)

    if not skip and _is_flat(tensor):  # the common batch: no walk, no memo; nothing is copied when all is in place
        for value in tensor.values() if type(tensor) is dict else tensor:
            if value.device != device:
                break
        else:
            return tensor
    return map_tensors(move, tensor, is_leaf=_is_movable_mapping_aside if skip else _is_movable, skip_keys=skip)


def _is_flat(data: Any) -> bool:
    """Whether ``data`` is a dict, list or tuple of plain tensors alone."""
    kind = type(data)
    if kind is dict:
        data = data.values()
    elif kind is not list and kind is not tuple:
        return False
    for value in data:  # noqa: SIM110 (a generator costs more than the check)
        if type(value) is not torch.Tensor:
            return False
    return True


def _is_movable(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    return not isinstance(value, type) and callable(getattr(value, "to", None))


def _is_movable_mapping_aside(value: Any) -> bool:
    return _is_movable(value) and not isinstance(value, Mapping)


def _to(value: Any, device: torch.device, non_blocking: bool) -> Any:
    if non_blocking:
        try:
            return value.to(device, non_blocking=True)
        except TypeError as error:
            if "keyword" not in str(error) and "non_blocking" not in str(error):
                raise
    return value.to(device)


def find_device(data: Any) -> torch.device | None:
    """The device of the first tensor of a structure, or None if it has no tensor.

    Example:
        >>> find_device(["a", {"x": torch.ones(1)}])
        device(type='cpu')
    """
    first = next(iterate_tensors(data), None)
    return None if first is None else first.device


def convert_to_fp32(tensor: Any) -> Any:
    """Convert the float16 and bfloat16 tensors of a structure to float32; all else stays.

    Example:
        >>> convert_to_fp32({"x": torch.ones(1, dtype=torch.bfloat16), "n": torch.tensor(1)})
        {'x': tensor([1.]), 'n': tensor(1)}
    """
    if isinstance(tensor, torch.Tensor):
        return _float(tensor)
    return map_tensors(_float, tensor)


def _float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward function so that its half-precision outputs are float32. ``__wrapped__`` is the function itself.

    Example:
        >>> convert_outputs_to_fp32(lambda x: x.half())(torch.ones(1)).dtype
        torch.float32
    """

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


# -- shapes ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorInformation:
    """What a tensor looks like, without its values.

    Args:
        shape: Its shape.
        dtype: Its dtype.

    Example:
        >>> TensorInformation(torch.Size([2]), torch.float32).shape
        torch.Size([2])
    """

    shape: torch.Size
    dtype: torch.dtype


def is_tensor_information(tensor_info: Any) -> bool:
    """Whether ``tensor_info`` is a `TensorInformation`.

    Example:
        >>> is_tensor_information(TensorInformation(torch.Size([2]), torch.int64))
        True
    """
    return isinstance(tensor_info, TensorInformation)


def get_data_structure(data: Any) -> Any:
    """The structure with a `TensorInformation` in each tensor's place.

    Example:
        >>> get_data_structure([torch.ones(2, 3)])
        [TensorInformation(shape=torch.Size([2, 3]), dtype=torch.float32)]
    """
    return map_tensors(lambda tensor: TensorInformation(tensor.shape, tensor.dtype), data)


def get_shape(data: Any) -> Any:
    """The structure with each tensor's shape, as a list, in its place.

    Example:
        >>> get_shape({"x": torch.ones(2, 3)})
        {'x': [2, 3]}
    """
    return map_tensors(lambda tensor: list(tensor.shape), data)


def initialize_tensors(data_structure: Any) -> Any:
    """The inverse of `get_data_structure`: tensors of these shapes and dtypes, on the CPU, with arbitrary values.

    Example:
        >>> initialize_tensors([TensorInformation(torch.Size([2, 3]), torch.float32)])[0].shape
        torch.Size([2, 3])
    """
    return map_tensors(
        lambda info: torch.empty(info.shape, dtype=info.dtype), data_structure, is_leaf=is_tensor_information
    )


def find_batch_size(data: Any) -> int:
    """The number of rows of the first tensor of a structure that has a dimension.

    Raises:
        ValueError: If the structure is empty.
        TypeError: If it has no tensor with a dimension.

    Example:
        >>> find_batch_size({"id": "a", "scale": torch.tensor(1.0), "x": torch.ones(4, 2)})
        4
    """
    for tensor in iterate_tensors(data):
        if tensor.ndim > 0:
            return int(tensor.shape[0])
    if container_of(data) is not None and not container_of(data).children(data):  # type: ignore[union-attr]
        raise ValueError(f"An empty {type(data).__name__} has no batch size.")
    raise TypeError(f"No tensor with a dimension is in this {type(data).__name__}, so it has no batch size.")


def ignorant_find_batch_size(data: Any) -> int | None:
    """`find_batch_size`, or None where that raises ValueError or TypeError.

    Example:
        >>> ignorant_find_batch_size("text") is None
        True
    """
    try:
        return find_batch_size(data)
    except (ValueError, TypeError):
        return None


def slice_tensors(
    data: Any, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Take the same slice of rows of every tensor of a structure; a 0-d tensor has no rows and stays whole.

    Args:
        data: Any nested structure.
        tensor_slice: Which rows.
        process_index: Part of the calling convention of ``slice_fn_for_dispatch``: a function of one's own may depend on the rank that the
            slice is for. The rows alone say enough for this one.
        num_processes: The same.

    Example:
        >>> slice_tensors({"x": torch.arange(4)}, slice(1, 3))
        {'x': tensor([1, 2])}
    """
    return map_tensors(lambda tensor: tensor[tensor_slice] if tensor.ndim > 0 else tensor, data)


def concatenate(data: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate structures of the same kind, tensor by tensor.

    Lists without any tensor (a batch's strings) are joined; other values that aren't tensors must be equal and are kept. 0-d tensors
    count as tensors of one row.

    Args:
        data: The structures, at least one.
        dim: Along which dimension.

    Raises:
        TypeError: If the structures differ, or a value that can't be concatenated does.
        ValueError: If there are none.

    Example:
        >>> concatenate([{"x": torch.ones(1), "id": ["a"]}, {"x": torch.zeros(1), "id": ["b"]}])
        {'x': tensor([1., 0.]), 'id': ['a', 'b']}
    """
    if not data:
        raise ValueError("There is nothing to concatenate: the sequence is empty.")
    first = data[0]
    if all(isinstance(value, torch.Tensor) for value in data):
        return torch.cat([value.reshape(1) if value.ndim == 0 else value for value in data], dim=dim)
    rules = container_of(first)
    if rules is None:
        if all(_is_same(value, first) for value in data):
            return first
        raise TypeError(f"Only tensors can be concatenated, and these {type(first).__name__} values differ.")
    if type(first) is list and all(type(v) is list and next(iterate_tensors(v), None) is None for v in data):
        return [item for value in data for item in value]
    parts = [rules.children(value) if type(value) is type(first) else None for value in data]
    keys = [None if part is None else [key for key, _ in part] for part in parts]
    if not rules.ordered or any(
        k is None or len(k) != len(keys[0] or ()) or set(k) != set(keys[0] or ()) for k in keys
    ):
        raise TypeError(f"Only structures of the same kind can be concatenated; this {type(first).__name__} differs.")
    tables = [dict(part or ()) for part in parts]
    return rules.rebuild(first, [concatenate([table[key] for table in tables], dim) for key in keys[0] or ()])


def _is_same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    equal = type(a) is type(b) and a == b
    return isinstance(equal, bool) and equal


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Append zeros to every tensor of ``batch_size`` along ``dim`` until the size is a multiple of ``num_processes``.

    Example:
        >>> pad_input_tensors({"x": torch.ones(3)}, batch_size=3, num_processes=2)
        {'x': tensor([1., 1., 1., 0.])}
    """
    missing = -batch_size % num_processes

    def pad(value: torch.Tensor) -> torch.Tensor:
        if not missing or value.ndim <= dim or value.shape[dim] != batch_size:
            return value
        shape = list(value.shape)
        shape[dim] = missing
        return torch.cat([value, value.new_zeros(shape)], dim=dim)

    return map_tensors(pad, tensor)


# -- small helpers ---------------------------------------------------------------------------------------------------------


def listify(data: Any) -> Any:
    """The structure with each tensor's values, as nested lists of Python numbers, in its place.

    Example:
        >>> listify({"x": torch.tensor([1, 2]), "y": torch.tensor(0.5)})
        {'x': [1, 2], 'y': 0.5}
    """
    return map_tensors(lambda tensor: tensor.tolist(), data)


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """The items of ``generator`` in a container of the type of ``obj``: a list, tuple, named tuple, or a subclass.

    Example:
        >>> honor_type((1, 2), (x + 1 for x in (1, 2)))
        (2, 3)
    """
    return type(obj)._make(generator) if is_namedtuple(obj) else type(obj)(generator)
