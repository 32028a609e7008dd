"""Processes agree whether memory ran out on any of them, while `find_executable_batch_size` tries a size.

A process that ran out can't take part in the others' collectives any more, and they would wait for it forever. So in the first windows of a try
gradients are kept local in `backward`, the processes tell each other before and after it how they are, and only then average gradients. They do
that in a group of their own, so that no message is taken for one of a model's. Where a forward has collectives (sharded parameters), processes agree at the
end of a try alone, and one that ran out by itself finds that the others don't come.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from drivetrain.errors import DrivetrainError
from drivetrain.specs import Capability

if TYPE_CHECKING:
    from drivetrain._engine.accumulation import Accumulator, Window
    from drivetrain.accelerator import Accelerator

__all__ = ["Probe"]

#: How long a process that ran out waits for the others to end their try, too.
PATIENCE = timedelta(seconds=20)


class Probe:
    """One search: what this process says to the others, and hears from them.

    Args:
        windows: Windows of a try in which processes agree; None for all.

    Example:
        >>> probe = Probe(2)  # on one process there is nobody to ask
        >>> probe.try_ended(failed=True), probe.try_ended(failed=False)
        (False, True)
    """

    def __init__(self, windows: int | None) -> None:
        self._agreed = windows
        self._group: Any = None
        self._watched: weakref.WeakSet[Accumulator] = weakref.WeakSet()
        self._models: list[torch.nn.Module] = []
        self._windows = 0
        self._over = False
        self._heard = False  # in this try, of another process's failure
        self._make_group()

    def _make_group(self) -> None:
        """As early as can be: where memory has run out, a process can't take part in making one."""
        if self._group is None and self._is_shared:
            self._group = dist.new_group(backend="gloo")

    # -- what Accelerators ask -------------------------------------------------------------------------------------------------

    def watch(self, accelerator: Accelerator) -> None:
        """Models were prepared: agree in their first windows, where gradients can be kept local and averaged afterwards."""
        capabilities = accelerator.backend.spec.capabilities
        if self._over or not self._is_shared or Capability.SHARDED_PARAMETERS in capabilities:
            return
        if Capability.NO_SYNC not in capabilities or Capability.OWNS_BACKWARD in capabilities:
            return
        accumulator, backend = accelerator.gradient_state, accelerator.backend
        self._make_group()
        self._models = [m for m in accelerator._models if backend.unwrap(m) is not m]
        for model in self._models:
            backend.set_gradient_sync(model, False)
        accumulator.probe = self
        if accumulator not in self._watched:
            self._watched.add(accumulator)
            # Windows switch it on for their last micro-batch.
            backend.set_gradient_sync = lambda model, enabled: None  # type: ignore[method-assign]

    def backward(self, accumulator: Accumulator, window: Window, loss: torch.Tensor, **kwargs: Any) -> None:
        """Back-propagate without collectives, and average at a window's end if all processes came so far."""
        accumulator.backend.backward(loss, window, **kwargs)
        self.agree()
        if accumulator.sync_gradients:
            self._average(accumulator)
            self._windows += 1
            if self._agreed is not None and self._windows >= self._agreed:
                self._release()
                self._over = True

    # -- what the search asks --------------------------------------------------------------------------------------------------

    def try_ended(self, *, failed: bool) -> bool:
        """Whether the try succeeded on all processes.

        Raises:
            DrivetrainError: If memory ran out where the others can't be told any more.
        """
        if not self._is_shared:
            return not failed
        if failed and self._over:
            raise DrivetrainError(
                f"Memory ran out after the first {self._agreed} windows had fit on all processes: those that train on can't be asked to use a smaller "
                "batch. Start with a smaller starting_batch_size, let the first batches be the largest, or let processes agree in all windows "
                "(agree_windows=None)."
            )
        worst = self._heard or self._tell(failed, waits=not failed)
        self._release()
        self._windows, self._over, self._heard = 0, False, False
        return not worst

    def close(self) -> None:
        """End of the search."""
        self._release()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    # -- the agreement ---------------------------------------------------------------------------------------------------------

    @property
    def _is_shared(self) -> bool:
        return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1

    def _tell(self, failed: bool, *, waits: bool = True) -> bool:
        self._make_group()
        flag = torch.tensor(int(failed))
        told = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        try:
            told.wait() if waits else told.wait(PATIENCE)
        except RuntimeError as error:
            if waits:
                raise
            self._group = None  # ending it would wait for the others, too
            raise DrivetrainError(
                f"Memory ran out on rank {dist.get_rank()}, and the others didn't end their try within {PATIENCE.seconds} seconds: they wait for this process "
                "in a collective, and can't be asked to use a smaller batch. Processes of this backend agree at the end of a try alone. Start with a "
                "smaller starting_batch_size, or make batches equally large on all processes."
            ) from error
        return bool(flag.item())

    def agree(self) -> None:
        """Hear whether all processes came so far.

        Raises:
            torch.OutOfMemoryError: If memory ran out on one.
        """
        if self._over or not self._is_shared:
            return
        if self._tell(False):
            self._heard = True
            raise torch.OutOfMemoryError("out of memory on another process")

    def _average(self, accumulator: Accumulator) -> None:
        """What the last micro-batch's backward would have done. Averaging again what is equal already changes nothing."""
        backend = accumulator.backend
        for model in self._models:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                    dist.all_reduce(parameter.grad, group=backend.gradient_group)
                    parameter.grad.div_(backend.gradient_world_size)

    def _release(self) -> None:
        """Gradients are reduced in the backward again."""
        for accumulator in self._watched:
            accumulator.probe = None
            accumulator.backend.__dict__.pop("set_gradient_sync", None)
            for model in self._models:
                accumulator.backend.set_gradient_sync(model, True)
        self._watched.clear()
        self._models = []
