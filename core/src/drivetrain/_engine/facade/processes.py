"""Who this process is, and doing things on some processes only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from drivetrain.parallel.process import ProcessControl

__all__ = ["ProcessFacade"]


class ProcessFacade:
    """Rank information and process control."""

    _met: Any  # the tracking part's
    _control: ProcessControl

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._control.device

    @property
    def num_processes(self) -> int:
        """Number of processes in all."""
        return self._control.num_processes

    @property
    def process_index(self) -> int:
        """Global rank of this process."""
        return self._control.process_index

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return self._control.local_process_index

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._control.is_main_process

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the machine's rank 0."""
        return self._control.is_local_main_process

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self._control.is_last_process

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self._control.use_distributed

    def wait_for_everyone(self) -> None:
        """Wait until every process has come here.

        Example:
            >>> from drivetrain import Accelerator
            >>> Accelerator(cpu=True).wait_for_everyone()
        """
        self._control.wait_for_everyone()
        self._met(2)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on each machine's main process only.

        Example:
            >>> from drivetrain import Accelerator
            >>> Accelerator(cpu=True).print("once")
            once
        """
        self._control.print(*args, **kwargs)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Let the main process run the block before the others do (it downloads, they read)."""
        return self._control.main_process_first()

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Let each machine's main process run the block before the others of that machine do."""
        return self._control.local_main_process_first()

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        """Give each process its part of a list, tuple, tensor, dict of those, or dataset.

        Args:
            inputs: What is split, equal on every process.
            apply_padding: Repeat the last item so that all parts have the same length (for a ``gather`` afterwards).

        Example:
            >>> from drivetrain import Accelerator
            >>> with Accelerator(cpu=True).split_between_processes(["a", "b"]) as part:
            ...     part
            ['a', 'b']
        """
        return self._control.split_between_processes(inputs, apply_padding=apply_padding)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorator: run on the main process only; elsewhere the call returns None.

        Example:
            >>> from drivetrain import Accelerator
            >>> @Accelerator(cpu=True).on_main_process
            ... def report():
            ...     return "done"
            >>> report()
            'done'
        """
        return self._control.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorator: run on each machine's main process only."""
        return self._control.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any] | None = None) -> Callable[..., Any]:
        """Decorator: run on the last process only."""
        return self._control.on_last_process(function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: run on the process with this rank only."""
        return self._control.on_process(function, process_index=process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorator: run on each machine's process with this local rank only."""
        return self._control.on_local_process(function, local_process_index=local_process_index)
