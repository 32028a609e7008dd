"""Writes down what a training script does, step by step, without changing it: for `drivetrain verify`.

Attached to an Accelerator when it is made, while `recording` is on; the training loop of a script that isn't being verified has no part of this.
"""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.data import PreparedDataLoader
from drivetrain.errors import UnsupportedError
from drivetrain.parity.modules import ForwardWatch, quieten
from drivetrain.parity.record import RecordWriter
from drivetrain.parity.sketch import sketch, sketch_rows
from drivetrain.tracking.handle import InertTracker

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator

__all__ = ["Enough", "Recorder", "recording", "running_recorder"]


class Enough(SystemExit):
    """So many steps as were asked for are on record; ends the script with exit code 0."""

    def __init__(self) -> None:
        super().__init__(0)


#: Methods that write to trackers and to checkpoints: a script under verification leaves nothing behind.
_SILENT = (
    *("init_trackers", "log_images", "log_figure", "log_table", "log_histogram", "log_text"),
    *("log_artifact", "log_artifacts", "log_config", "log_summary", "checkpoint", "save_state", "save_model", "save", "resume"),
)  # fmt: skip


class Recorder:
    """Records the Accelerators that are made while it is running.

    Args:
        directory: Where the record goes, a file per rank.
        steps: Optimizer steps to record; the script is ended with `Enough` when the next one begins.
        layouts: How each loader cut its epochs in the run to compare with, in the order in which loaders are prepared: one process then gets, at each
            step, what all ranks of that run got. None: loaders stay as they are.
    """

    def __init__(
        self, directory: str | Path, *, steps: int = 10, layouts: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self._directory, self._steps, self._layouts = directory, steps, layouts or ()
        self.step = 0
        #: When something was last recorded, by ``time.monotonic``.
        self.last_event = time.monotonic()
        self._writer: RecordWriter | None = None
        self._accelerator: Accelerator | None = None
        self._watches: dict[torch.nn.Module, ForwardWatch] = {}
        self._evaluated: set[torch.nn.Module] = set()
        self._optimizers: list[Any] = []
        self._loaders: list[Any] = []
        self._begun = False  # the first forward in training has come
        self._in_backward = False

    # -- attaching ---------------------------------------------------------------------------------------------------------

    def attach(self, accelerator: Accelerator) -> None:
        """Begin to record an Accelerator: it was just made.

        Raises:
            UnsupportedError: For a second one: only one is compared.
        """
        if self._accelerator is not None:
            raise UnsupportedError(
                "drivetrain verify compares the training of one Accelerator, and this script makes a second one. Make one and pass it on."
            )
        self._accelerator = accelerator
        process, backend = accelerator.plan.process, accelerator.backend
        self._writer = RecordWriter(self._directory, process.rank)
        self._write(
            "start",
            world=process.world_size,
            data_rank=backend.data_rank,
            data_world=backend.data_world_size,
            backend=backend.spec.name,
            precision=backend.precision.spec.name,
            dtype=str(backend.precision.compute_dtype).removeprefix("torch."),
            steps=self._steps,
        )
        accelerator._loader_stack.joined = self._layouts
        accelerator._resume_from = None
        if accelerator.project_dir is not None:  # trackers and checkpoints would make it, and scripts write beside them
            Path(accelerator.project_dir).mkdir(parents=True, exist_ok=True)
        replaced: Any = accelerator
        for name in _SILENT:
            setattr(replaced, name, _nothing)
        replaced._prepare_all = self._around(accelerator._prepare_all, self._prepare)
        replaced.backward = self._around(accelerator.backward, self._backward)
        replaced.clip_grad_norm_ = self._around(accelerator.clip_grad_norm_, self._clip)
        replaced.clip_grad_value_ = self._around(accelerator.clip_grad_value_, self._clip)
        replaced.gather_for_metrics = self._around(accelerator.gather_for_metrics, self._gather)
        replaced.reduce = self._around(accelerator.reduce, self._reduce)
        replaced.gather = self._around(accelerator.gather, self._reduce)
        replaced.get_tracker = lambda name, unwrap=False: InertTracker(name)
        replaced.log = self._log
        replaced.log_training = lambda values=None, step=None, **_: self._log(values or {}, step)

    def close(self) -> None:
        """Take hooks away."""
        for watch in self._watches.values():
            watch.close()
        self._write("end", step=self.step)

    def _around(self, inner: Callable[..., Any], outer: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            return outer(inner, *args, **kwargs)

        return call

    def _write(self, event: str, **facts: Any) -> None:
        self.last_event = time.monotonic()
        if self._writer is not None:
            self._writer.write(event, **facts)

    @property
    def _owner(self) -> Accelerator:
        assert self._accelerator is not None
        return self._accelerator

    # -- objects -----------------------------------------------------------------------------------------------------------

    def _prepare(self, inner: Callable[..., Any], *args: Any, evaluation: bool = False, **kwargs: Any) -> Any:
        results = inner(*args, evaluation=evaluation, **kwargs)
        objects = self._owner._objects.by_kind
        for model in objects["model"]:
            if evaluation and model not in self._watches:
                self._evaluated.add(model)
            elif model not in self._watches and model not in self._evaluated:
                self._add_model(model)
        for optimizer in objects["optimizer"]:
            if all(optimizer is not known for known in self._optimizers):
                self._add_optimizer(optimizer)
        for loader in objects["loader"]:
            if all(loader is not known for known in self._loaders):
                self._add_loader(loader)
        return results

    def _add_model(self, model: torch.nn.Module) -> None:
        inner = self._owner.backend.unwrap(model)
        index = len(self._watches)
        quiet = quieten(inner)
        self._watches[model] = ForwardWatch(
            model, inner, begin=functools.partial(self._begin_forward, index), end=self._end_forward
        )
        parameters = {n: list(p.shape) for n, p in inner.named_parameters()}
        self._write(
            "model", step=self.step, model=index, type=type(inner).__name__, parameters=parameters, quieted=quiet
        )

    def _add_optimizer(self, optimizer: Any) -> None:
        index = len(self._optimizers)
        self._optimizers.append(optimizer)
        step = self._around(optimizer.step, functools.partial(self._optimizer_step, optimizer, index))
        # A method, as it was: schedulers look at it when they are made.
        optimizer.step = types.MethodType(lambda _, *args, **kwargs: step(*args, **kwargs), optimizer)

    def _add_loader(self, loader: Any) -> None:
        self._loaders.append(loader)
        if isinstance(loader, PreparedDataLoader):
            layout = loader._drivetrain.context.current_layout()
            self._write("loader", layout=layout.to_dict(), sharded=loader.state_per_rank)

    # -- a micro-batch -----------------------------------------------------------------------------------------------------

    def _begin_forward(self, index: int, training: bool) -> dict[str, Any] | None:
        if self._in_backward:
            return None  # activations are computed again
        if self.step >= self._steps and training:
            raise Enough
        if not self._begun:
            self._begun = True
            self._state("initial")
        return {"step": self.step, "model": index, **self._batch_facts()}

    def _end_forward(self, facts: dict[str, Any]) -> None:
        self._write("forward", **facts)

    def _batch_facts(self) -> dict[str, Any]:
        loader = self._owner._loader_stack.active
        if loader is None or loader.batch is None:
            return {"counted": None, "samples": None}
        samples = loader.samples_of(loader.batch)
        if samples is not None and not all(isinstance(s, (int, str)) for s in samples):
            samples = None
        return {"counted": loader.batch.rows, "samples": samples}

    def _backward(
        self, inner: Callable[..., Any], loss: Any, *, weight: Any = None, reduction: str = "mean", **kwargs: Any
    ) -> None:
        if self.step >= self._steps:
            raise Enough
        value = _number(loss)
        count = None if weight is None else _number(weight)
        if reduction == "sum" and value is not None and count:
            value /= count
        dtype = str(getattr(loss, "dtype", "")).removeprefix("torch.")
        self._write(
            "loss",
            step=self.step,
            loss=value,
            weight=count,
            dtype=dtype,
            counted=self._batch_facts()["counted"],
        )
        self._in_backward = True
        try:
            inner(loss, weight=weight, reduction=reduction, **kwargs)
        finally:
            self._in_backward = False

    # -- the window's end --------------------------------------------------------------------------------------------------

    def _clip(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._owner.sync_gradients:
            return inner(*args, **kwargs)
        self._owner.unscale_gradients()
        self._gradients("gradients")
        result = inner(*args, **kwargs)
        self._write("clip", step=self.step, norm=None if result is None else _number(result))
        self._gradients("clipped")
        return result

    def _optimizer_step(self, optimizer: Any, index: int, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._owner.sync_gradients:
            return inner(*args, **kwargs)
        self._owner.unscale_gradients(optimizer)
        self._gradients("used")
        groups = [
            {k: float(v) for k, v in group.items() if type(v) in (int, float) or isinstance(v, torch.Tensor)}
            for group in optimizer.param_groups
        ]
        result = inner(*args, **kwargs)
        skipped = bool(optimizer.step_was_skipped)
        self._write("step", step=self.step, optimizer=index, groups=groups, skipped=skipped)
        self._state("after")
        self.step += 1
        return result

    def _gradients(self, kind: str) -> None:
        backend = self._owner.backend
        for index, model in enumerate(self._watches):
            tensors = {n: sketch(g, decades=kind == "used") for n, g in backend.window_gradients(model).items()}
            self._write(kind, step=self.step, model=index, tensors=tensors)

    def _state(self, when: str) -> None:
        """Weights and buffers of all models."""
        for index, model in enumerate(self._watches):
            state = self._owner.backend.model_state(model)
            tensors = {n: sketch(v) for n, v in state.items() if _is_numeric(v)}
            self._write(when, step=self.step, model=index, tensors=tensors)

    # -- what people look at -----------------------------------------------------------------------------------------------

    def _gather(self, inner: Callable[..., Any], input_data: Any, *args: Any, **kwargs: Any) -> Any:
        result = inner(input_data, *args, **kwargs)
        values = [result] if isinstance(result, torch.Tensor) else list(result) if isinstance(result, tuple) else []
        for value in values:
            if isinstance(value, torch.Tensor) and value.ndim:
                self._write(
                    "gather",
                    step=self.step,
                    rows=value.shape[0],
                    values=sketch_rows(value, value.shape[0]),
                    at=_caller(),
                )
        return result

    def _reduce(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._write("met", step=self.step, at=_caller())
        return inner(*args, **kwargs)

    def _log(
        self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None, *, reduce: str | None = None, weight: Any = None
    ) -> None:  # fmt: skip
        found = dict(_numbers(values))
        items = None if weight is None or isinstance(weight, Mapping) else _number(weight)
        self._write("log", step=self.step, values=found, reduce=reduce, weight=items, at=_caller())


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Takes the place of a method that would write something."""


def _number(value: Any) -> float | None:
    try:
        return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        path = f"{prefix}/{name}" if prefix else str(name)
        if isinstance(value, Mapping):
            yield from _numbers(value, path)
            continue
        number = None if isinstance(value, (str, bool)) else _number(value)
        if number is not None and not math.isnan(number):
            yield path, number


def _is_numeric(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and not getattr(value, "is_meta", False)


def _caller() -> str:
    """File and line of the script's code that called one of our methods."""
    here = str(Path(__file__).parents[1])
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_running: ContextVar[Recorder | None] = ContextVar("drivetrain_parity_recorder", default=None)


def running_recorder() -> Recorder | None:
    """The recorder that new Accelerators are attached to; None outside of `recording`."""
    return _running.get()


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Attach the Accelerator that is made inside; `Enough` ends the block.

    Args:
        recorder: Where to.

    Example:
        >>> import tempfile
        >>> from drivetrain import Accelerator
        >>> from drivetrain.parity.record import read_record
        >>> directory = tempfile.mkdtemp()
        >>> with recording(Recorder(directory, steps=1)):
        ...     accelerator = Accelerator(cpu=True)
        ...     model = torch.nn.Linear(2, 1)
        ...     model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        ...     for x in torch.ones(3, 4, 2):
        ...         accelerator.backward(model(x).mean())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        >>> [event["event"] for event in read_record(directory)[0].events]
        ['start', 'model', 'initial', 'forward', 'loss', 'used', 'step', 'after', 'end']
    """
    token = _running.set(recorder)
    try:
        yield recorder
    except Enough:
        pass
    finally:
        _running.reset(token)
        recorder.close()
