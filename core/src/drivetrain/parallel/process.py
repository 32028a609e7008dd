"""Rank facts and control of what runs on which rank, as the Accelerator and PartialState offer it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, overload

import torch
import torch.distributed as dist

from drivetrain.errors import ConfigurationError, DistributedOperationError
from drivetrain.parallel._frames import AgreedError, exchange, tell_failure
from drivetrain.parallel._groups import members
from drivetrain.parallel.process_group import barrier
from drivetrain.parallel.splitting import split_between_processes
from drivetrain.specs import ProcessInfo

__all__ = ["ProcessControl", "Trigger"]

P = ParamSpec("P")
R = TypeVar("R")


class ProcessControl:
    """Who this process is, and control of what runs where. Holds no state of its own; several for one process are equal.

    Args:
        process: Who this process is.
        device: Where it computes.
        group: Process group of the ranks that control waits for; None for all.

    Example:
        >>> control = ProcessControl(ProcessInfo(), device=torch.device("cpu"))
        >>> control.is_main_process, control.is_last_process, control.num_processes
        (True, True, 1)
        >>> @control.on_main_process
        ... def greet(name):
        ...     return f"hello {name}"
        >>> greet("rank 0")
        'hello rank 0'
    """

    def __init__(
        self,
        process: ProcessInfo,
        *,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.process = process
        self.device = device
        self.group = group

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessControl):
            return NotImplemented
        return (self.process, self.device, self.group) == (other.process, other.device, other.group)

    def __hash__(self) -> int:
        return hash((self.process.rank, self.process.world_size, self.device))

    # -- facts -------------------------------------------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """Number of processes of the job: the world size."""
        return self.process.world_size

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self.process.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return self.process.local_rank

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.process.world_size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is rank 0 of its machine."""
        return self.process.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self.process.rank == self.process.world_size - 1

    # -- order -------------------------------------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until every process has come here. Work queued on accelerators isn't waited for.

        Raises:
            DistributedOperationError: If a process called something else or is gone; says which.
        """
        if self._must_wait("wait_for_everyone"):
            barrier(group=self.group)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on the main process, then on all others.

        Raises:
            DistributedOperationError: On the others, instead of running the block, if the main process raised in it; holds its message.
        """
        with self._first(self.is_main_process, "main_process_first"):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block on each machine's main process, then on all others.

        Raises:
            DistributedOperationError: On the others, instead of running the block, if a main process raised in it; holds its message.
        """
        with self._first(self.is_local_main_process, "local_main_process_first"):
            yield

    @contextlib.contextmanager
    def _first(self, goes_first: bool, what: str) -> Iterator[None]:
        if not self._must_wait(what):
            yield
            return
        if not goes_first:
            exchange(what, group=self.group)
            yield
            return
        try:
            yield
        except Exception as error:
            if not (isinstance(error, AgreedError) and error.group is self.group):  # then the others have left as well
                tell_failure(what, error, self.group)
            raise
        exchange(what, group=self.group)

    def _must_wait(self, what: str) -> bool:
        if not self.use_distributed:
            return False
        if not dist.is_initialized():
            raise DistributedOperationError(
                f"{what}: the process group of this job's {self.num_processes} processes was ended, or not made yet."
            )
        return True

    # -- who runs what -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give this process its part of ``inputs``; see `drivetrain.parallel.splitting.split_between_processes`.

        Args:
            inputs: A list, tuple, dict of equally long values, tensor, or data set.
            apply_padding: Repeat the last item of the shorter parts, so that all are equally long.

        Raises:
            ConfigurationError: If the values of a dict have different lengths.
            TypeError: If ``inputs`` can't be split.
        """
        yield split_between_processes(inputs, self.process_index, self.num_processes, apply_padding=apply_padding)

    @overload
    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_main_process(self, function: None = None) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_main_process(self, function: Any = None) -> Any:
        """Decorator: run the function on the main process alone; elsewhere it returns None."""
        return _decorate(function, lambda: self.is_main_process, "on_main_process")

    @overload
    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_local_main_process(self, function: None = None) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_local_main_process(self, function: Any = None) -> Any:
        """Decorator: run the function on each machine's main process alone; elsewhere it returns None."""
        return _decorate(function, lambda: self.is_local_main_process, "on_local_main_process")

    @overload
    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]: ...
    @overload
    def on_last_process(self, function: None = None) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_last_process(self, function: Any = None) -> Any:
        """Decorator: run the function on the last process alone; elsewhere it returns None."""
        return _decorate(function, lambda: self.is_last_process, "on_last_process")

    @overload
    def on_process(self, function: Callable[P, R], process_index: int | None = None) -> Callable[P, R | None]: ...
    @overload
    def on_process(
        self, function: None = None, process_index: int | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_process(self, function: Any = None, process_index: int | None = None) -> Any:
        """Decorator: run the function on one process alone; elsewhere it returns None. In a world of one it always runs.

        Raises:
            ConfigurationError: If no ``process_index`` is given.
        """
        _require(process_index, "on_process", "process_index")
        return _decorate(
            function, lambda: not self.use_distributed or self.process_index == process_index, "on_process"
        )

    @overload
    def on_local_process(
        self, function: Callable[P, R], local_process_index: int | None = None
    ) -> Callable[P, R | None]: ...
    @overload
    def on_local_process(
        self, function: None = None, local_process_index: int | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]: ...
    def on_local_process(self, function: Any = None, local_process_index: int | None = None) -> Any:
        """Decorator: run the function on one process of each machine alone; elsewhere it returns None. In a world of one it always runs.

        Raises:
            ConfigurationError: If no ``local_process_index`` is given.
        """
        _require(local_process_index, "on_local_process", "local_process_index")
        return _decorate(
            function,
            lambda: not self.use_distributed or self.local_process_index == local_process_index,
            "on_local_process",
        )

    def print(self, *args: Any, **kwargs: Any) -> None:
        """The builtin ``print``, on each machine's main process alone."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201 (that is what it is for)


def _decorate(function: Any, wanted: Callable[[], bool], name: str) -> Any:
    if function is None:
        return lambda given: _decorate(given, wanted, name)
    if not callable(function):
        raise ConfigurationError(f"{name} decorates a function, and got {function!r}. Give an index by its keyword.")
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def run_later(*args: Any, **kwargs: Any) -> Any:
            return await function(*args, **kwargs) if wanted() else None

        return run_later

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if wanted() else None

    return run


def _require(index: int | None, decorator: str, keyword: str) -> None:
    if index is None:
        raise ConfigurationError(f"{decorator} needs to know the process: pass {keyword}=...")


class Trigger:
    """A flag that any rank can set and all ranks read together: to stop early, to save now.

    Args:
        group: Process group; None for all ranks.

    Example:
        >>> trigger = Trigger()
        >>> trigger.set_trigger()
        >>> trigger.check_trigger(), trigger.check_trigger()
        (True, False)
    """

    def __init__(self, *, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._is_set = False

    def set_trigger(self) -> None:
        """Set the flag of this rank. No communication."""
        self._is_set = True

    def check_trigger(self) -> bool:
        """Whether any rank has set its flag since the last check; clears all. One collective: call it on every rank.

        Raises:
            DistributedOperationError: On every rank, if one called something else or is gone.
        """
        mine, self._is_set = self._is_set, False
        if members(self.group)[1] == 1:
            return mine
        return any(exchange("check_trigger", flag=int(mine), group=self.group).flags)
