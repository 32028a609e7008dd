"""Which collectives a piece of code sends, in order, with their sizes: in a rehearsal and in a real run alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import _resolve_process_group
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain.parallel._operators import COLLECTIVES

__all__ = ["PLAIN", "Collective", "describe", "is_collective", "record_collectives"]

#: Types of tensors that operators work on; others take them apart first.
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One message that a process took part in.

    Args:
        kind: "all_reduce", "all_gather", "reduce_scatter", "broadcast", ...
        nbytes: Bytes of the whole message on this process: what is reduced, what was gathered, what is to be scattered.
        group_size: Number of processes that take part.
        step: Number of the optimizer step that it leads to, from 1; 0 before the first forward pass.
        where: The script's line, ``"train.py:12"``; empty where that isn't looked for.

    Example:
        >>> Collective(kind="all_reduce", nbytes=40, group_size=2).step
        0
    """

    kind: str
    nbytes: int
    group_size: int
    step: int = 0
    where: str = ""


def is_collective(operator: Any) -> bool:
    """Whether an operator of torch sends something.

    Example:
        >>> is_collective(torch.ops.aten.add.Tensor)
        False
    """
    return _name(operator) in COLLECTIVES.get(operator.namespace, ())


def describe(operator: Any, args: tuple[Any, ...], **more: Any) -> Collective:
    """The message that a call of an operator sends.

    Args:
        operator: One for which `is_collective` holds.
        args: Its positional arguments.
        **more: Further fields.
    """
    kind = COLLECTIVES[operator.namespace][_name(operator)]
    nbytes = 0 if kind == "barrier" else max(_nbytes(argument) for argument in args)
    group = _group_of(args)
    if kind == "all_gather" and operator.namespace != "c10d":  # its argument is what this process sends
        nbytes *= group.size()
    return Collective(kind=kind, nbytes=nbytes, group_size=group.size(), **more)


@contextlib.contextmanager
def record_collectives() -> Iterator[list[Collective]]:
    """Note what this process sends inside the block, in order; also what C++ sends, such as DistributedDataParallel's reducer.

    Only this thread's messages, and those of the backward passes that it starts, are seen.

    Yields:
        A list that grows.

    Example:
        >>> with record_collectives() as sent:
        ...     torch.ones(2).sum()
        tensor(2.)
        >>> sent
        []
    """
    recorder = _Recorder()
    with recorder:
        yield recorder.sent


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: list[Collective] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # a DTensor sends with its parts, which come here by themselves
        if is_collective(func):
            self.sent.append(describe(func, args))
        return func(*args, **(kwargs or {}))


def _group_of(args: tuple[Any, ...]) -> ProcessGroup:
    for argument in args:
        if isinstance(argument, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):
                return ProcessGroup.unbox(argument)
    group: ProcessGroup = _resolve_process_group(args[-1])
    return group


def _name(operator: Any) -> str:
    return str(operator.__name__).partition(".")[0]


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_nbytes, value)) if isinstance(value, list | tuple) else 0
