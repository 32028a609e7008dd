"""Gradient accumulation windows that equal the one big batch.

A window is the micro-batches whose gradients one optimizer step uses. Let rank r's micro-batch m hold ``rows[r, m]`` rows, N be
the number of ranks with different data, and W the sum of rows over the window and the ranks. Backends average gradients over
ranks, so weighting each mean loss with ``rows[r, m] * N / W`` gives the gradient of the mean over the global batch, exactly, with
uneven last batches and short last windows. Where loaders know their length, W is known when the window starts and this is one
multiplication (none at all for a window of one even micro-batch). Where they don't, W is assumed to be ``k`` times the first
micro-batch's and gradients are corrected at the end, which only the last window needs. With losses weighted by item counts, W is
known only at the end: the counts are summed on the device, reduced with one scalar all-reduce that starts before the last
backward, and gradients are scaled once, without a host read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from drivetrain._engine.empty_losses import EmptyLosses
from drivetrain._engine.gradient_state import GradientState
from drivetrain._marks import marks
from drivetrain.errors import ConfigurationError, DistributedOperationError, UnsupportedError
from drivetrain.interfaces import Backend, Precision
from drivetrain.parallel._groups import describe_failure, is_lost_connection
from drivetrain.specs import Capability

if TYPE_CHECKING:
    from drivetrain._engine.nonfinite import NonfiniteGuard
    from drivetrain._engine.probing import Probe
    from drivetrain.data.stack import LoaderStack

__all__ = ["Accumulator", "Window"]


class Window:
    """The running window of one set of models; also the context manager that ``accumulate`` returns, made once per set of models.

    Args:
        accumulator: Its owner.
        models: Models whose gradients are kept local until the window's end.
    """

    __slots__ = (
        "_assumed",
        "_batch",
        "_counted",
        "_factor",
        "_item_work",
        "_items",
        "_normalized",
        "_outer",
        "_owner",
        "_scale",
        "_seen",
        "_synced",
        "_told",
        "_weighted",
        "index",
        "last",
        "models",
        "ran_backward",
        "size",
        "stepped",
    )

    def __init__(self, accumulator: Accumulator, models: Sequence[torch.nn.Module]) -> None:
        self._owner = accumulator
        self.models = models
        self.index = -1
        self.size = 1
        self.last = True
        self._synced = True
        self._scale = 1.0
        self._batch: Any = None
        self._outer: Window | None = None
        self._told: set[int] = set()
        self._normalized: set[int] = set()
        self.ran_backward = False
        self.reset()

    def reset(self) -> None:
        """Forget the gradients' history: a new window starts."""
        self._assumed = (
            0.0  # rows (or micro-batches, where rows are unknown) that the scaling of losses took for granted
        )
        self._seen = 0.0  # those that the window really had
        self._factor: torch.Tensor | None = None
        self._weighted: bool | None = None
        self._items: torch.Tensor | None = None
        self._item_work: Any = None
        self._counted: Any = None  # the batch whose items were counted
        if self._normalized:
            self._normalized.clear()
        self.stepped = False

    def __enter__(self) -> Window:
        owner = self._owner
        loader = owner.stack.active
        batch = None if loader is None else loader.batch
        if owner.between_windows is not None and loader is None:
            owner.between_windows()
        if self.last:
            self.index = 0
            if owner.ends_windows:
                owner.backend.end_window()
            self.reset()
            self.size = owner.num_steps
            if self.size > 1 and loader is not None and owner.sync_with_dataloader:
                plan = loader.plan_window(self.size)
                if plan is not None:
                    if plan.size < self.size and batch is self._batch:
                        owner.warn_of_parts()
                    self.size = plan.size
                    self._assumed = float(plan.global_rows)
                elif owner.joining:
                    raise UnsupportedError(
                        "join_uneven_inputs with gradient accumulation needs loaders that know their length: windows must end together, and a "
                        "rank can't tell when another one's stream ends. Use gradient_accumulation_steps=1, or a map-style data set."
                    )
        else:
            self.index += 1
        self.ran_backward = False
        if self._told:
            self._told.clear()
        self._batch = batch
        ends_data = batch is not None and batch.is_last and owner.sync_with_dataloader
        self.last = last = ends_data or self.index + 1 >= self.size
        if batch is not None and batch.rank_rows is owner.usual_rows:  # as `_scale_of`, in a round like the one before
            if self._assumed == 0.0:
                self._assumed = owner.usual_total * (1 if last else self.size)
            self._seen += owner.usual_total
            self._scale = batch.rows * owner.data_world_size / self._assumed
        else:
            self._scale = self._scale_of(batch)
        sync = last or owner.sync_each_batch
        if sync is not self._synced and owner.switches_sync:
            self._set_sync(sync)
        self._outer = owner.inside
        owner.inside = owner.current = self
        owner.sync_gradients = last
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._synced:
            self._set_sync(True)
        self._owner.inside = self._outer

    def _set_sync(self, sync: bool) -> None:
        set_gradient_sync = self._owner.backend.set_gradient_sync
        for model in self.models:
            set_gradient_sync(model, sync)
        self._synced = sync

    def _scale_of(self, batch: Any) -> float:
        """Factor of this micro-batch's mean loss, before any correction at the window's end."""
        if batch is None or batch.rows is None or batch.rank_rows is None:
            self._assumed = self._assumed or float(self.size)
            self._seen += 1.0
            return 1.0 / self._assumed
        total = float(sum(batch.rank_rows))
        if self._assumed == 0.0:
            self._assumed = total * (1 if self.last else self.size)
        self._seen += total
        if self._assumed == 0.0:
            return 1.0  # no rank has a row of its own
        if total:
            self._owner.usual_rows, self._owner.usual_total = batch.rank_rows, total
        return float(batch.rows * self._owner.data_world_size / self._assumed)

    def begin_outside(self, batch: Any) -> None:
        """Without ``accumulate`` the user cuts windows by hand: each mean loss is divided by ``num_steps``, as they expect."""
        owner = self._owner
        if self.stepped:
            owner.backend.end_window()
            self.reset()
        self._batch = batch
        self._scale = 1.0 / owner.num_steps
        if batch is not None and batch.rows is not None and batch.rank_rows is not None and any(batch.rank_rows):
            self._scale *= batch.rows * owner.data_world_size / sum(batch.rank_rows)

    # -- losses ------------------------------------------------------------------------------------------------------------

    def weigh(self, loss: torch.Tensor, weight: Any, *, summed: bool) -> torch.Tensor:
        """The loss to back-propagate: scaled so that gradients sum up to the big batch's."""
        self.ran_backward = True
        if self._weighted is None:
            self._weighted = weight is not None
            if self._weighted:
                self._check_weights()
        elif self._weighted is not (weight is not None):
            raise ConfigurationError(
                "backward() was called with weight= and without it inside one accumulation window: "
                "give the number of items to every call, or to none."
            )
        if weight is None:
            return loss if self._scale == 1.0 else loss * self._scale
        owner = self._owner
        owner.empty_losses.check(loss, weight)
        if self.size == 1 and owner.gradient_world_size == 1 and owner.inside is self:
            # One micro-batch on one rank is the whole window: its mean is the window's mean.
            return loss / _at_least_one(weight) if summed else loss
        return self._weigh_items(loss, weight, summed=summed)

    def _check_weights(self) -> None:
        owner = self._owner
        owner.backend.require(Capability.ITEM_WEIGHTS, "backward(weight=...)")
        if owner.joining:
            raise UnsupportedError(
                "backward(weight=...) sums items over all ranks, and inside join_uneven_inputs some have no batch: leave weight out, or use "
                "even_batches=True."
            )

    def _weigh_items(self, loss: torch.Tensor, weight: Any, *, summed: bool) -> torch.Tensor:
        owner = self._owner
        reference = owner.item_reference(weight)
        count = weight.detach().to(loss.device, torch.float32) if isinstance(weight, torch.Tensor) else float(weight)
        if self._batch is None or self._counted is not self._batch:  # several losses of one micro-batch share its items
            self._counted = self._batch
            start = torch.zeros((), dtype=torch.float32, device=loss.device) if self._items is None else self._items
            self._items = start + count
        if self.last and owner.inside is self and owner.gradient_world_size > 1 and self._item_work is None:
            self._item_work = dist.all_reduce(self._items, group=owner.backend.gradient_group, async_op=True)
        return loss / reference if summed else loss * (count / reference)

    def told_to_step(self, optimizer: Any) -> None:
        """``optimizer.step()`` was called in this micro-batch, whether it acted or not."""
        self._told.add(id(optimizer))

    def may_clear(self, optimizer: Any) -> bool:
        """Whether ``optimizer.zero_grad()`` would not lose gradients that the window still needs.

        People call it at the end of a micro-batch (after ``step``) or at its start (before ``backward``): it acts at the end of the
        last one, or at the start of the first. After ``backward`` and instead of ``step``, it drops the window.
        """
        if id(optimizer) in self._told:
            return self.last
        return self.index == 0 or (self.last and self.ran_backward and self._owner.optimizers == 1)

    # -- the window's end --------------------------------------------------------------------------------------------------

    @property
    def needs_correction(self) -> bool:
        """Whether gradients must still be multiplied with something to be the big batch's."""
        return self._items is not None or self._seen != self._assumed

    def correct(self, optimizer: Any, parameters: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Make one optimizer's gradients the big batch's, once per window."""
        if id(optimizer) in self._normalized:
            return
        self._normalized.add(id(optimizer))
        if self._factor is None:
            self._factor = self._item_factor() if self._items is not None else self._row_factor()
        self._owner.backend.normalize_gradients(parameters(), self._factor)

    def _item_factor(self) -> torch.Tensor:
        owner = self._owner
        assert self._items is not None
        if owner.gradient_world_size > 1:
            if self._item_work is None:
                self._item_work = dist.all_reduce(self._items, group=owner.backend.gradient_group, async_op=True)
            self._item_work.wait()
        # Zero items everywhere: gradients are zero, and any finite factor keeps them so.
        return owner.reference * owner.gradient_world_size / self._items.clamp(min=1e-6)

    def _row_factor(self) -> torch.Tensor:
        factor = self._assumed / self._seen if self._seen else 1.0
        return torch.tensor(factor, dtype=torch.float32, device=self._owner.backend.device)


def _overrides(thing: object, base: type, method: str) -> bool:
    return getattr(type(thing), method, None) is not getattr(base, method)


def _at_least_one(weight: Any) -> Any:
    return weight.clamp(min=1) if isinstance(weight, torch.Tensor) else max(weight, 1)


class Accumulator(GradientState):
    """All windows of one Accelerator, and whether the present micro-batch ends one. Accelerate's ``GradientState``.

    Args:
        backend: Averages gradients.
        stack: Loaders that are being iterated.
        num_steps: Micro-batches per window; calls of a model, where one takes several.
        sync_with_dataloader: A window ends where the loader does.
        sync_each_batch: Gradients are reduced after each micro-batch (less memory for some backends, more communication).
        adjust_scheduler: Schedulers step once per window; otherwise after each micro-batch.
    """

    def __init__(
        self,
        backend: Backend,
        stack: LoaderStack,
        *,
        num_steps: int = 1,
        sync_with_dataloader: bool = True,
        sync_each_batch: bool = False,
        adjust_scheduler: bool = True,
    ) -> None:
        self.backend = backend
        self.stack = stack
        self.num_steps = num_steps
        self.sync_with_dataloader = sync_with_dataloader
        self.sync_each_batch = sync_each_batch
        self.adjust_scheduler = adjust_scheduler
        self.data_world_size = backend.data_world_size
        self.gradient_world_size = backend.gradient_world_size
        self.ask_backend()
        #: Rows of the last round by rank, the object itself, and their sum: rounds of one size share it.
        self.usual_rows: tuple[int, ...] | str = "none yet"
        self.usual_total = 0.0
        self.sync_gradients = True
        self.joining = False  # inside join_uneven_inputs, where ranks may have different numbers of batches
        self.reference = 0.0
        self._warned = False
        self.empty_losses = EmptyLosses(self)
        self.optimizers = 0  # prepared so far
        self.guard: NonfiniteGuard | None = None  # looks at losses and gradients, where `on_nonfinite` asks for it
        #: Where each backward is noted for the launcher; None for one process.
        self.notes = marks() if self.gradient_world_size > 1 else None
        self.probe: Probe | None = None  # agrees with other processes, while a batch size is searched
        self._windows: dict[tuple[torch.nn.Module, ...], Window] = {}
        self._outside = Window(self, ())
        #: The window that ``step`` belongs to: the last one entered, or the one that the user cuts by hand.
        self.current = self._outside
        #: Called before each micro-batch outside of loops over loaders, which call `LoaderStack.after_batch`.
        self.between_windows: Callable[[], None] | None = None
        #: The window of the ``accumulate`` block that is running, if any.
        self.inside: Window | None = None

    def ask_backend(self) -> None:
        """See what the backend and its precision add to torch: what neither adds anything to isn't asked of them in each step."""
        backend, precision = self.backend, self.backend.precision
        #: Whether a step may be skipped, and whether one of them acts when a window has ended.
        self.may_skip = (
            precision.scales
            or _overrides(backend, Backend, "step_was_skipped")
            or _overrides(precision, Precision, "was_skipped")
        )
        self.ends_windows = _overrides(backend, Backend, "end_window") or _overrides(precision, Precision, "update")
        #: Whether reducing gradients can be switched off and on.
        self.switches_sync = _overrides(backend, Backend, "set_gradient_sync")
        #: Whether ``backward``, ``step`` and ``zero_grad`` are torch's own.
        self.plain_backward = not (precision.scales or _overrides(backend, Backend, "backward"))
        self.plain_step = not (
            _overrides(backend, Backend, "optimizer_step") or _overrides(precision, Precision, "step")
        )
        self.plain_zero_grad = not _overrides(backend, Backend, "zero_grad")

    def window(self, models: tuple[torch.nn.Module, ...]) -> Window:
        """The window of these models."""
        window = self._windows.get(models)
        if window is None:
            window = self._windows[models] = Window(self, models)
        return window

    def declared_window(self, models: tuple[torch.nn.Module, ...], count: int) -> Window:
        """The window of these models, which has so many micro-batches."""
        from drivetrain._engine.handcut import declared_window

        return declared_window(self._windows, self, models, count)

    def warn_of_parts(self) -> None:
        """The script cuts batches by hand without saying so, and the end of the data ends windows early. Told once."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                "accumulate() was entered several times for one batch of a loader, and the loader's end ended a window before its "
                f"{self.num_steps} micro-batches: each batch was taken for one micro-batch. Say how many parts a window has, with "
                "accelerator.accumulate(model, micro_batches=n), and it ends there.",
                stacklevel=4,
            )

    def forget(self) -> None:
        """Drop all windows: their models and optimizers go away."""
        self._windows.clear()
        self.current = self._outside
        self._outside.reset()
        self.sync_gradients = True
        self.optimizers = 0

    def item_reference(self, weight: Any) -> float:
        """A constant near the number of items of a window, agreed by all ranks when the first weight is seen.

        Losses are divided by it, so that gradients keep the size they would have with plain means and fp16 stays in range.
        """
        if self.reference == 0.0:
            value = torch.as_tensor(weight, dtype=torch.float32, device=self.backend.device).detach().clone()
            if self.gradient_world_size > 1:
                dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.backend.gradient_group)
            self.reference = max(float(value.item()), 1.0) * self.num_steps
        return self.reference

    def backward(self, loss: torch.Tensor, *, weight: Any = None, reduction: str = "mean", **kwargs: Any) -> None:
        """Back-propagate one micro-batch's loss."""
        window = self.inside
        if window is None:
            window = self._outside
            if self.current is not window:  # the last `accumulate` block's verdict is not about this loss
                self.current, self.sync_gradients = window, True
            loader = self.stack.active
            window.begin_outside(None if loader is None else loader.batch)
        if reduction != "mean" and (reduction != "sum" or weight is None):
            raise ConfigurationError(
                f"backward(reduction={reduction!r}): use 'mean', or 'sum' together with weight=, the number of items in the loss."
            )
        if self.guard is not None:
            self.guard.note(window, loss)
        if self.probe is not None:
            self.probe.agree()
        loss = window.weigh(loss, weight, summed=reduction == "sum")
        if self.notes is not None and not self.joining:
            self.notes.mark("backward", max(window.index, 0))
        try:
            if self.probe is not None:
                self.probe.backward(self, window, loss, **kwargs)
            elif self.plain_backward:
                loss.backward(**kwargs)
            else:
                self.backend.backward(loss, window, **kwargs)
        except RuntimeError as error:
            if self.gradient_world_size > 1 and is_lost_connection(error):
                raise DistributedOperationError(describe_failure("backward", None, error)) from error
            raise

    def finalize(self, optimizer: Any, parameters: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Make an optimizer's gradients those of the big batch, unscaled; cheap when there is nothing to do."""
        window = self.current
        if window._items is not None or window._seen != window._assumed:  # `needs_correction`, without the call
            window.correct(optimizer, parameters)
        if self.backend.precision.scales:
            self.backend.unscale_(optimizer)
