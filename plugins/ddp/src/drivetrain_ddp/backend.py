"""A replica of the model on each process."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from drivetrain.errors import NotPreparedError, UnsupportedError
from drivetrain.interfaces import Backend
from drivetrain.parallel.process_group import ProcessGroupHandle, init_process_group
from drivetrain_ddp.hooks import register_communication_hook
from drivetrain_ddp.options import DistributedDataParallelKwargs

__all__ = ["DDPBackend"]


class DDPBackend(Backend):
    """Gradients are averaged over processes by DistributedDataParallel, at a window's end.

    Example:
        >>> from drivetrain.interfaces import Backend
        >>> issubclass(DDPBackend, Backend)
        True
    """

    _group: ProcessGroupHandle | None = None
    #: Models with a static graph that haven't run yet.
    _unrecorded: frozenset[DistributedDataParallel] = frozenset()

    @property
    def options(self) -> DistributedDataParallelKwargs:
        """The settings; torch's defaults where none were given."""
        return self.context.options or DistributedDataParallelKwargs()

    def setup(self) -> None:
        """Bring up the process group, or use the one that is there."""
        super().setup()
        handler = self.context.handlers.get("InitProcessGroupKwargs")
        given = handler.explicit() if handler is not None else {}
        self._group = init_process_group(
            self.context.process,
            device=self.device,
            device_backend=self.context.device.spec.communication_backend,
            debug=self.context.debug,
            **given,
        )

    def teardown(self) -> None:
        """Destroy the process group, if it was made here."""
        if self._group is not None:
            self._group.destroy()

    def wrap_model(self, model: torch.nn.Module, *, evaluation: bool) -> torch.nn.Module:
        """Wrap a model that has something to train."""
        if evaluation or not any(p.requires_grad for p in model.parameters()):
            return model
        arguments = self.options.ddp_arguments()
        known = inspect.signature(DistributedDataParallel).parameters
        if "broadcast_buffers" in arguments and "forward_sync_buffers" in known:  # its name since torch 2.13
            arguments["forward_sync_buffers"] = arguments.pop("broadcast_buffers")
        for name in arguments:
            if name not in known:
                raise UnsupportedError(
                    f"DistributedDataParallelKwargs({name}=...) needs a newer torch than {torch.__version__}, "
                    "whose DistributedDataParallel doesn't have it."
                )
        if self.device.type != "cpu":
            arguments.update(device_ids=[self.device], output_device=self.device)
        wrapped = DistributedDataParallel(model, process_group=self.data_group, **arguments)
        register_communication_hook(wrapped, self.options, self.data_group)
        if self.options.static_graph:
            self._unrecorded |= {wrapped}
        return wrapped

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The module inside."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def set_gradient_sync(self, model: torch.nn.Module, enabled: bool) -> None:
        """What ``no_sync`` does, without a context manager.

        A static graph is recorded in the first backward, which must reduce gradients. So the first micro-batch of all does: what is
        equal on all ranks stays as it is when the window's end averages it again.
        """
        if not isinstance(model, DistributedDataParallel):
            return
        if not enabled and model in self._unrecorded:
            self._unrecorded -= {model}
            return
        model.require_backward_grad_sync = enabled

    @contextlib.contextmanager
    def join(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Ranks that ran out of batches shadow the others' collectives, with zero gradients."""
        joinables: list[Joinable] = [m for m in models if isinstance(m, DistributedDataParallel)]
        if len(joinables) < len(models):
            raise NotPreparedError("join_uneven_inputs: pass models that went through accelerator.prepare().")
        with Join(joinables):
            yield

    def expected_collectives(self) -> dict[str, dict[str, int]]:
        """None for a micro-batch without sync; one all-reduce per bucket at the window's end (small models: one bucket)."""
        return {"micro_batch": {}, "window": {"all_reduce": 1}}
