"""The largest batch size that fits, found by trying."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.errors import ConfigurationError, DrivetrainError
from drivetrain.memory.release import clear_device_cache

if TYPE_CHECKING:
    from drivetrain._engine.probing import Probe

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
    accelerator: Any = None,
    agree_windows: int | None = 2,
) -> Callable[..., Any]:
    """Decorator: call a function with ever smaller batch sizes until it fits in memory.

    Running out of memory on one process shrinks the batch on all. For that, processes agree before and after each backward of a prepared
    model, in the first windows of a try; where one of several processes runs out later, that is an error. Backends that shard parameters agree at a try's
    end: there, one process that runs out alone is an error after 20 seconds. A process without others tries the next size whenever memory runs out.
    Each try is reported on the main process, and memory is given back between tries.

    Args:
        function: Takes the batch size as its first argument, given by the decorator.
        starting_batch_size: The first one to try.
        reduce_batch_size_fn: Returns the next one; default: half of the last.
        minimum_batch_size: The smallest one to try.
        accelerator: Keep its global batch: ``gradient_accumulation_steps`` grows as the batch shrinks. Its prepared objects are forgotten between tries,
            so the function prepares them.
        agree_windows: In how many windows of a try several processes agree: optimizers make their state in the first, and the second needs memory beside
            it. None for all of them, at the price of two small collectives per micro-batch: for data that has its longest rows late.

    Raises:
        ConfigurationError: For ``agree_windows`` below 1.
        DrivetrainError: When even the smallest one doesn't fit, or memory runs out on one of several processes where the others can't be told.

    Example:
        >>> @find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size):
        ...     if batch_size > 20:
        ...         raise RuntimeError("CUDA out of memory.")
        ...     return batch_size
        >>> train()
        16
        >>> from drivetrain import Accelerator
        >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        >>> find_executable_batch_size(train.__wrapped__, 64, accelerator=accelerator)(), accelerator.gradient_accumulation_steps
        (16, 8)
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
            minimum_batch_size=minimum_batch_size,
            accelerator=accelerator,
            agree_windows=agree_windows,
        )
    if agree_windows is not None and agree_windows < 1:
        raise ConfigurationError(f"agree_windows={agree_windows}: at least one window, or None for all.")

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        sizes = _Sizes(starting_batch_size, reduce_batch_size_fn, minimum_batch_size, accelerator)
        clear_device_cache(garbage_collection=True)
        with _probing(agree_windows) as probe:
            for batch_size in sizes:
                try:
                    result = function(batch_size, *args, **kwargs)
                    failure = None
                except TypeError:
                    _check_call(function, args, kwargs)
                    raise
                except (RuntimeError, MemoryError) as error:
                    if not should_reduce_batch_size(error):
                        raise
                    result, failure = None, str(error).splitlines()[0] or type(error).__name__
                if probe.try_ended(failed=failure is not None):
                    sizes.report(batch_size, "fits")
                    return result
                clear_device_cache(garbage_collection=True)
                sizes.report(batch_size, f"did not fit in memory ({failure})")
        raise DrivetrainError(
            f"No batch size from {starting_batch_size} down to {sizes.minimum} fits in memory: "
            "use a smaller model, a lower precision, or a backend that shards it."
        )

    return search


class _Sizes:
    """The sizes to try, with the accumulation that keeps the global batch."""

    def __init__(self, first: int, smaller: Callable[[], int] | None, minimum: int, accelerator: Any) -> None:
        self._first, self._smaller, self._accelerator = first, smaller, accelerator
        self.minimum = max(minimum, 1)
        self._rows = 0 if accelerator is None else first * accelerator.gradient_accumulation_steps

    def __iter__(self) -> Iterator[int]:
        size = self._first
        while size >= self.minimum:
            if self._rows:
                self._accelerator.free_memory()
                self._accelerator.gradient_accumulation_steps = self._rows // size
            yield size
            size = self._next(size)

    def _next(self, size: int) -> int:
        if self._smaller is None:
            half = size // 2
            # The largest one up to the half by which the global batch can be divided.
            return next((s for s in range(half, 0, -1) if self._rows % s == 0), 0) if self._rows else half
        smaller = self._smaller()
        if smaller >= size:
            raise ConfigurationError(f"reduce_batch_size_fn returned {smaller} after {size}: it must get smaller.")
        if self._rows and smaller > 0 and self._rows % smaller:
            raise ConfigurationError(
                f"reduce_batch_size_fn returned {smaller}, which doesn't divide the {self._rows} rows that a process has per step: the global batch "
                "can't be kept. Return a divisor, or leave accelerator= out."
            )
        return smaller

    def report(self, size: int, what: str) -> None:
        """Tell the user of a try, on the main process."""
        from drivetrain.logging import get_logger

        steps = f" with gradient_accumulation_steps={self._rows // size}" if self._rows else ""
        get_logger(__name__).warning("Batch size %d%s %s.", size, steps, what)


#: The search whose function is running, for Accelerators that are used inside it.
_running: ContextVar[Probe | None] = ContextVar("drivetrain_batch_size_search", default=None)


def running_probe() -> Probe | None:
    """What agrees with the other processes, inside a search; None outside."""
    return _running.get()


@contextmanager
def _probing(windows: int | None) -> Iterator[Probe]:
    from drivetrain._engine.probing import Probe

    probe = Probe(windows)
    token = _running.set(probe)
    try:
        yield probe
    finally:
        _running.reset(token)
        probe.close()


def _check_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    try:
        inspect.signature(function).bind(0, *args, **kwargs)
    except TypeError:
        names = ", ".join(list(inspect.signature(function).parameters)[1:])
        raise TypeError(
            f"{function.__name__}() gets the batch size from the decorator: call it without, as {function.__name__}({names})."
        ) from None
