"""The largest batch size that fits, found by trying."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.memory.release import clear_device_cache

__all__ = ["find_executable_batch_size", "should_reduce_batch_size"]

_MESSAGES = (
    "out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


def should_reduce_batch_size(exception: Exception) -> bool:
    """Whether an exception says that memory ran out.

    Example:
        >>> should_reduce_batch_size(RuntimeError("CUDA out of memory.")), should_reduce_batch_size(ValueError("x"))
        (True, False)
    """
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exception, RuntimeError) and any(m in str(exception) for m in _MESSAGES)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
    *,
    minimum_batch_size: int = 1,
) -> Callable[..., Any]:
    """Decorator: call a function with ever smaller batch sizes until it fits in memory.

    Running out of memory on one process shrinks the batch on all, when a process group exists. Each try that failed is reported on
    the main process.

    Args:
        function: Takes the batch size as its first argument, given by the decorator.
        starting_batch_size: The first one to try.
        reduce_batch_size_fn: Returns the next one; default: half of the last.
        minimum_batch_size: The smallest one to try.

    Raises:
        DrivetrainError: When even the smallest one doesn't fit.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size):
        ...     if batch_size > 20:
        ...         raise RuntimeError("CUDA out of memory.")
        ...     return batch_size
        >>> train()
        16
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            minimum_batch_size=minimum_batch_size,
        )

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        batch_size = starting_batch_size
        clear_device_cache(garbage_collection=True)
        while batch_size >= max(minimum_batch_size, 1):
            try:
                result = function(batch_size, *args, **kwargs)
                failure = None
            except TypeError:
                _check_call(function, args, kwargs)
                raise
            except (RuntimeError, MemoryError) as error:
                if not should_reduce_batch_size(error):
                    raise
                result, failure = None, str(error).splitlines()[0]
            if not _any_rank(failure is not None):
                return result
            clear_device_cache(garbage_collection=True)
            smaller = batch_size // 2 if reduce_batch_size_fn is None else reduce_batch_size_fn()
            if smaller >= batch_size:
                raise ConfigurationError(
                    f"reduce_batch_size_fn returned {smaller} after {batch_size}: it must get smaller."
                )
            _report(batch_size, smaller, failure)
            batch_size = smaller
        raise DrivetrainError(
            f"No batch size from {starting_batch_size} down to {max(minimum_batch_size, 1)} fits in memory: "
            "use a smaller model, a lower precision, or a backend that shards it."
        )

    return search


def _check_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        inspect.signature(function).bind(0, *args, **kwargs)
    except TypeError:
        names = ", ".join(list(inspect.signature(function).parameters)[1:])
        raise TypeError(
            f"{function.__name__}() gets the batch size from the decorator: call it without, as {function.__name__}({names})."
        ) from None


def _any_rank(flag: bool) -> bool:
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return flag
    device = torch.accelerator.current_accelerator() if "nccl" in str(dist.get_backend()) else None
    value = torch.tensor(int(flag), device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def _report(batch_size: int, smaller: int, failure: str | None) -> None:
    from drivetrain.logging import get_logger

    get_logger(__name__).warning(
        "Batch size %d did not fit in memory (%s): trying %d.", batch_size, failure or "on another process", smaller
    )
