"""How operators run in a rehearsal: on shapes where values come from the model, for real where they come from the data.

A model's parameters are fake tensors (shape, dtype and no values), and so is all that is computed with them. What a real tensor takes part in alone is
computed for real: data sets, samplers, random generators, counters and what processes tell each other go on working. A real tensor into which a fake one is written
keeps its old content, and is noted as unknown, with all its views: nobody may read it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.errors import DrivetrainError
from drivetrain.rehearsal._memory import MemoryLog
from drivetrain.rehearsal._places import is_own_read, line_of, place
from drivetrain.rehearsal._unknown import Unknown, tensors_of
from drivetrain.rehearsal.collectives import PLAIN, Collective, describe, is_collective

__all__ = ["DEVICE_PHASES", "HostReadError", "Host", "Operators", "Stage"]

#: Phases in which what is made lies on the device of training.
DEVICE_PHASES = frozenset({"prepare", "forward", "backward", "step"})

_SCALAR = torch.ops.aten._local_scalar_dense.default
_MEGABYTE = 1 << 20


class HostReadError(DrivetrainError, RuntimeError):
    """A script reads a value that only a real run has.

    Example:
        >>> issubclass(HostReadError, DrivetrainError)
        True
    """


class Stage:
    """Where the script is, and what was seen so far.

    Args:
        assume: What a value that is read is taken to be; None refuses to read.
    """

    def __init__(self, assume: float | None = None) -> None:
        self.assume = assume
        self.phase = "loop"
        #: The optimizer step that is under way, from 1; 0 before the first forward pass.
        self.step = 0
        self.memory = MemoryLog()
        self.unknown = Unknown()
        self.sent: list[Collective] = []
        #: How often each line read a value that was assumed.
        self.reads: dict[str, int] = {}
        #: The reduction of the all-reduce that is being called.
        self.reduction: Any = None
        #: Handles that C++ holds in this backward pass.
        self.works: list[Any] = []
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def empty(self, like: torch.Tensor, *, requires_grad: bool = False) -> torch.Tensor:
        """A fake tensor of the same shape, strides and dtype."""
        with self.fake:
            return torch.empty_strided(
                like.shape, like.stride(), dtype=like.dtype, device=like.device, requires_grad=requires_grad
            )

    def parameter(self, like: torch.Tensor) -> torch.nn.Parameter:
        """A fake parameter like this one."""
        fake: Any = self.empty(like.detach(), requires_grad=like.requires_grad)
        fake._is_param = True  # nn.Parameter(fake) makes a tensor that module.to() can't handle
        parameter: torch.nn.Parameter = fake
        return parameter

    def read(self, what: str) -> float:
        """A value is read that isn't known.

        Raises:
            HostReadError: At the user's line, unless values are assumed.
        """
        where = place()
        if self.assume is None:
            source = line_of(where)
            raise HostReadError(
                f"{where or 'A library'}{f' ({source})' if source else ''} {what}, and in a rehearsal tensors that come from the model have no values. "
                "On an accelerator the same line makes the host wait for the device. Log tensors as they are (accelerator.log takes them), add them up on the "
                "device and read the sum seldom, or rehearse with --assume 1.0, which takes each such value to be 1.0 and lists the lines."
            )
        self.reads[where] = self.reads.get(where, 0) + 1
        return self.assume


class Operators(TorchDispatchMode):
    """Runs every operator, and notes blocks of memory and messages."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stage = stage

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # a DTensor works with its parts, which come here by themselves
        kwargs = kwargs or {}
        stage = self._stage
        if active_fake_mode() is not None:
            return func(*args, **kwargs)  # torch itself looks for the shape of a result
        given = tensors_of((args, kwargs))
        fake = any(isinstance(t, FakeTensor) for t in given)
        unknown = fake or any(t in stage.unknown for t in given)
        if is_collective(func):
            return self._send(func, args, kwargs, given, unknown, fake)
        if func is _SCALAR and unknown:
            return _scalar(stage, args[0])
        if not given and stage.phase in DEVICE_PHASES:
            return self._make(func, args, kwargs)
        if fake:
            results = self._shapes(func, args, kwargs)
        else:
            results = func(*args, **kwargs)
            if unknown:
                for tensor in tensors_of((results,)):
                    stage.unknown.mark(tensor)
                for tensor in _written(func, args, kwargs):
                    stage.unknown.mark(tensor)
        if unknown:
            self._count((results,))
        return results

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A tensor out of nothing, on the device: fake, but for whole numbers and single values, which programs are steered by."""
        if str(kwargs.get("device")) == "meta":
            return func(*args, **kwargs)
        with self._stage.fake:
            results = func(*args, **kwargs)
        if not any((t.dtype in _FLOATING and t.numel() > 1) or _size(t) > _MEGABYTE for t in tensors_of((results,))):
            results = func(*args, **kwargs)
        self._count((results,))
        return results

    def _count(self, values: Any) -> None:
        for tensor in tensors_of(values):
            self._stage.memory.add(tensor, self._stage.phase)

    def _shapes(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run on shapes alone. Real tensors that are written are unknown from then on."""
        stage = self._stage
        written = [t for t in _written(func, args, kwargs) if not isinstance(t, FakeTensor)]
        if not written:
            if stage.phase in ("loop", "forward"):
                for tensor in tensors_of((args, kwargs)):
                    if not isinstance(tensor, FakeTensor):
                        stage.memory.add_input(tensor, stage.phase)
            return _on_shapes(stage, func, _known_masks(stage, func, args), kwargs)
        stand_ins = {id(t): stage.empty(t) for t in written}
        back = {id(stand_ins[id(real)]): real for real in written}
        args, kwargs = _replaced(args, stand_ins), _replaced(kwargs, stand_ins)
        results = _on_shapes(stage, func, args, kwargs)
        for tensor in written:
            stage.unknown.mark(tensor)
        if stage.phase in DEVICE_PHASES:
            self._count(written)
        return _replaced(results, back)

    def _send(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[torch.Tensor],
        unknown: bool,
        fake: bool,
    ) -> Any:
        stage = self._stage
        stage.sent.append(describe(func, args, step=stage.step, where=place()))
        if func.namespace != "c10d":
            results = self._shapes(func, args, kwargs) if fake else func(*args, **kwargs)
            if func.__name__.startswith("all_reduce.") and not fake and args[1] == "sum":
                results = results * describe(func, args).group_size
        else:
            group_size = stage.sent[-1].group_size
            if fake:
                results = _result(func, args, self._work(func, args))
            else:
                results = _as_if_equal(func, args, kwargs, group_size, stage.reduction)
        moved = [*given, *tensors_of((results,))]
        if unknown:
            self._count(moved)
        for tensor in moved:
            if unknown:
                stage.unknown.mark(tensor)
            stage.memory.label(tensor, "communication")
        return results

    def _work(self, func: Any, args: tuple[Any, ...]) -> Any:
        """A handle; DistributedDataParallel's reducer asks it for what was reduced, and doesn't keep the handle's Python part alive."""
        if self._stage.phase != "backward" or not func.__name__.startswith("allreduce_."):
            return FakeWork()
        self._stage.works.append(_Done(tensors_of((args[0],))))
        return self._stage.works[-1]


#: Their values are never worth knowing where a model makes them.
_FLOATING = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128})


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _scalar(stage: Stage, tensor: torch.Tensor) -> Any:
    if is_own_read():
        # Drivetrain asks whether all is well (no overflow, nothing but finite numbers), and what a real tensor holds besides.
        value: Any = float(tensor.dtype == torch.bool) if isinstance(tensor, FakeTensor) else _SCALAR(tensor)
    else:
        value = stage.read("reads a value on the host")
    if tensor.dtype == torch.bool:
        return bool(value)
    return value if tensor.is_floating_point() or tensor.is_complex() else int(value)


def _on_shapes(stage: Stage, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return func(*args, **kwargs)
    except DynamicOutputShapeException as error:
        where = place()
        raise HostReadError(
            f"{where or 'A library'} ({line_of(where) or func}) makes a tensor whose shape depends on the model's values ({func}), which a rehearsal doesn't "
            "have. On an accelerator the same line makes the host wait for the device. Keep the shape (torch.where, a mask that is multiplied), or choose "
            "by what is known from the data."
        ) from error


def _known_masks(stage: Stage, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Masks that come from the data choose elements by their places: the shape of the result is then known."""
    if func not in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default):
        return args
    indices: list[Any] = []
    for index in args[1]:
        if isinstance(index, torch.Tensor) and index.dtype == torch.bool and index not in stage.unknown:
            indices.extend(index.nonzero(as_tuple=True))
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])


@functools.cache
def _written_places(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = func._schema.arguments
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operator writes into."""
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in _written_places(func)]
    return tensors_of(values)


def _replaced(values: Any, by_id: dict[int, torch.Tensor]) -> Any:
    if isinstance(values, torch.Tensor):
        return by_id.get(id(values), values)
    if isinstance(values, list | tuple):
        return type(values)(_replaced(v, by_id) for v in values)
    if isinstance(values, dict):
        return {k: _replaced(v, by_id) for k, v in values.items()}
    return values


class _Done(dist._Work):  # type: ignore[name-defined, misc]
    """The handle of a message that has arrived."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return self._future


def _result(func: Any, args: tuple[Any, ...], work: Any) -> Any:
    """What a collective returns: what it was given to write into, and a handle."""
    return work.boxed() if len(func._schema.returns) == 1 else (args[0], work.boxed())


def _as_if_equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], size: int, reduction: Any) -> Any:
    """Messages of real tensors, as if every process had sent what this one does."""
    name = func.__name__.partition(".")[0]
    if name == "allgather_":
        for output in args[0][0]:
            output.copy_(args[1][0])
    elif name == "_allgather_base_":
        args[0].view(size, -1).copy_(args[1].reshape(1, -1).expand(size, -1))
    elif name in ("allreduce_", "reduce_", "allreduce_coalesced_"):
        if reduction in (None, dist.ReduceOp.SUM):
            for tensor in args[0]:
                if tensor.dtype != torch.bool:
                    tensor.mul_(size)
    else:
        return func(*args, **kwargs)
    return _result(func, args, FakeWork())


def _plain(tensor: torch.Tensor, value: float) -> Any:
    return np.full(tuple(tensor.shape), value)


class Host(TorchFunctionMode):
    """Sees what doesn't go through operators: tensors turned into arrays, lists and text, and where backward begins."""

    def __init__(self, stage: Stage, backward: Callable[..., Any]) -> None:
        super().__init__()
        self._stage = stage
        self._backward = backward
        tensor = torch.Tensor
        self._reads: dict[Any, tuple[str, Callable[[torch.Tensor, float], Any]]] = {
            tensor.numpy: ("makes an array of a tensor", _plain),
            tensor.__array__: ("makes an array of a tensor", _plain),
            tensor.tolist: ("makes a list of a tensor", lambda t, v: _plain(t, v).tolist()),
            tensor.__repr__: ("prints a tensor", lambda t, v: f"tensor(unknown, size={tuple(t.shape)})"),
            tensor.__format__: (
                "prints a tensor",
                lambda t, v: str(v) if t.ndim == 0 else f"tensor(unknown, size={tuple(t.shape)})",
            ),
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._reads and args[0] in self._stage.unknown:
            what, answer = self._reads[func]
            own = (
                func in (torch.Tensor.numpy, torch.Tensor.tolist)
                and not isinstance(args[0], FakeTensor)
                and is_own_read()
            )
            if not own:  # Drivetrain reads of what it has packed only what it knows
                return answer(args[0], self._stage.read(what))
        if func is torch.Tensor.__deepcopy__ and isinstance(args[0], FakeTensor):
            return _copied(self._stage, *args)
        if func is torch.Tensor.backward or func is torch.autograd.backward:
            return self._backward(func, args, kwargs)
        return func(*args, **kwargs)


def _copied(stage: Stage, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A copy of a fake tensor belongs to the same mode, and is a parameter if it was one."""
    if id(tensor) not in memo:
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = stage.parameter(tensor) if is_parameter else stage.empty(tensor)
    result: torch.Tensor = memo[id(tensor)]
    return result
