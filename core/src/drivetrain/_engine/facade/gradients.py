"""One micro-batch: backward, clipping, and where a window ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from drivetrain._engine.joining import catch_up
from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain.specs import Capability

if TYPE_CHECKING:
    from drivetrain._engine.accumulation import Accumulator
    from drivetrain._engine.optimizer import PreparedOptimizer
    from drivetrain._engine.prepare import PreparedObjects
    from drivetrain.interfaces import Backend

__all__ = ["GradientFacade"]


class GradientFacade:
    """Accumulation, backward, clipping, mixed precision."""

    backend: Backend
    gradient_state: Accumulator
    _objects: PreparedObjects
    _norm: torch.Tensor | None = None
    #: What ``Accelerator(resume=...)`` said, until it is loaded.
    _resume_from: str | None = None
    #: Depth of ``no_sync``: steps inside it don't mean that processes have met.
    _local_gradients: int = 0

    @property
    def _optimizers(self) -> list[PreparedOptimizer]:
        return self._objects.by_kind["optimizer"]

    @property
    def scaler(self) -> Any:
        """The gradient scaler of fp16, or None."""
        precision = self.backend.precision
        return getattr(precision, "scaler", None) if precision.scales else None

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches of a loader per optimizer step: 1 where a backend's schedule takes all micro-batches of a window at once.

        Raises:
            UnsupportedError: When it is changed there.
        """
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        if self.backend.micro_batches_per_call > 1 and value != self.gradient_state.num_steps:
            raise UnsupportedError(
                f"The backend {self.backend.spec.name!r} takes {self.backend.micro_batches_per_call} micro-batches per call, and loaders hand out "
                "so many at once: set gradient_accumulation_steps when the Accelerator is made."
            )
        self.gradient_state.num_steps = value

    @property
    def sync_gradients(self) -> bool:
        """Whether the present micro-batch ends a window: gradients are reduced, optimizers and schedulers step."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    def accumulate(
        self, *models: torch.nn.Module, micro_batches: int | None = None
    ) -> contextlib.AbstractContextManager[Any]:
        """Context of one micro-batch: inside it, ``backward``, ``step`` and ``zero_grad`` do what the window needs.

        Args:
            *models: Models that are trained in it. Models trained alternately (a GAN's) have a window of their own each when each
                is given to its own ``accumulate``.
            micro_batches: The window's number of micro-batches, where the script makes them itself (it cuts a loader's batch, or fetched several
                batches at once): the window ends after so many, whatever the loader is at. The same in all calls of a window.

        Example:
            >>> import torch
            >>> from drivetrain import Accelerator
            >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            >>> model = torch.nn.Linear(1, 1)
            >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            >>> for x in torch.ones(4, 1, 1):
            ...     with accelerator.accumulate(model):
            ...         accelerator.backward(model(x).mean())
            ...         optimizer.step()
            ...         optimizer.zero_grad()
            >>> accelerator.step
            2
        """
        if micro_batches is None:
            return self.gradient_state.window(models)
        return self.gradient_state.declared_window(models, micro_batches)

    def backward(self, loss: torch.Tensor, *, weight: Any = None, reduction: str = "mean", **kwargs: Any) -> None:
        """Back-propagate, in place of ``loss.backward()``.

        Args:
            loss: The micro-batch's mean loss, a 0-d tensor. It is scaled so that a window's gradients are those of the mean over
                all its rows on all processes.
            weight: Number of items (tokens) that the loss is the mean of, a number or a 0-d tensor: gradients are then those of the
                mean over all items of the window on all processes. Give it in every call of a window or in none.
            reduction: "mean", or "sum" when ``loss`` is the sum over the items.
            **kwargs: For ``Tensor.backward``.
        """
        if self._resume_from is not None:
            self._refuse_unresumed()
        self.gradient_state.backward(loss, weight=weight, reduction=reduction, **kwargs)

    def _refuse_unresumed(self) -> None:
        raise ConfigurationError(
            f"resume={self._resume_from!r} is loaded where training starts, in accelerator.epochs(n), and this script calls backward() before: "
            "loop over accelerator.epochs(n), or call accelerator.resume() once everything is prepared."
        )

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Keep this model's gradients local; refused where the backend can't."""
        self.backend.require(Capability.NO_SYNC, "no_sync")
        self.backend.set_gradient_sync(model, False)
        self._local_gradients += 1
        try:
            yield
        finally:
            self._local_gradients -= 1
            self.backend.set_gradient_sync(model, True)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the window's gradients by their global norm.

        Args:
            parameters: Parameters of prepared models, or one tensor.
            max_norm: The largest norm to leave.
            norm_type: Which norm; 2 by default.

        Returns:
            The true norm over all processes before clipping, a 0-d tensor. Inside a window nothing is clipped, since the gradients
            aren't complete: the norm returned is then that of the window before.
        """
        state = self.gradient_state
        if not state.sync_gradients:
            return self._last_norm()
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._finalize_gradients(parameters)
        self._norm = norm = self.backend.clip_grad_norm_(parameters, max_norm, norm_type)
        return norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the window's gradients to ``[-clip_value, clip_value]``; inside a window nothing is clipped."""
        self.backend.require(Capability.CLIP_VALUE, "clip_grad_value_")
        if self.gradient_state.sync_gradients:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self._finalize_gradients(parameters)
            self.backend.clip_grad_value_(parameters, clip_value)

    def _last_norm(self) -> torch.Tensor:
        return torch.zeros((), device=self.backend.device) if self._norm is None else self._norm

    def _finalize_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Before clipping: gradients become the big batch's, unscaled, of each optimizer that has one of these parameters."""
        state = self.gradient_state
        if not (state.current.needs_correction or self.backend.precision.scales):
            return
        wanted = {id(p) for p in parameters}
        for optimizer in self._optimizers:
            if any(id(p) in wanted for p in optimizer.parameters()):
                state.finalize(optimizer.optimizer, optimizer.parameters)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo the loss scale in the gradients of one optimizer, or several, or all; at most once per window."""
        chosen = (
            self._optimizers
            if optimizer is None
            else optimizer
            if isinstance(optimizer, (list, tuple))
            else [optimizer]
        )
        for one in chosen:
            prepared = self._objects.find(one)
            if prepared is not None and self.gradient_state.sync_gradients:
                self.gradient_state.finalize(prepared.optimizer, prepared.parameters)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any prepared optimizer skipped its last step, because gradients overflowed on some process."""
        return any(o.step_was_skipped for o in self._optimizers)

    def autocast(self, autocast_handler: Any = None) -> contextlib.AbstractContextManager[Any]:
        """Context in which code outside a prepared model's forward (a loss) computes in the chosen precision.

        Args:
            autocast_handler: An ``AutocastKwargs`` for this block.
        """
        given = {} if autocast_handler is None else autocast_handler.explicit()
        return self.backend.precision.autocast(**given)

    @contextlib.contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: Any = None) -> Iterator[None]:
        """Let processes run out of batches at different times inside this block.

        An accumulation window ends on all of them where the data of one ends. After the block, those that had fewer steps have the optimizer
        states, learning rates and step count of the one that had most.

        Args:
            joinables: Prepared models.
            even_batches: For this block, ``even_batches`` of the prepared loaders.
        """
        self.backend.require(Capability.UNEVEN_INPUTS, "join_uneven_inputs")
        changed = (
            [(loader, loader.even_batches) for loader in self._objects.by_kind["loader"]]
            if even_batches is not None
            else []
        )
        for loader, _ in changed:
            loader.even_batches = even_batches
        joins = self.backend.data_world_size > 1
        if joins and self.gradient_state.guard is not None:
            raise UnsupportedError(
                "join_uneven_inputs with on_nonfinite: processes agree at each step whether all was finite, and some have no step here. "
                "Leave one of the two out."
            )
        self.gradient_state.joining = joins
        try:
            with self.backend.join(list(joinables)) if joins else contextlib.nullcontext():
                yield
            if joins:
                catch_up(self)
        finally:
            self.gradient_state.joining = False
            for loader, before in changed:
                loader.even_batches = before
