"""Runs a script on shapes: which phase it is in, what its tensors are for, and when it is enough."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from drivetrain._engine import assemble as engine
from drivetrain.errors import UnsupportedError
from drivetrain.interfaces import Prepared, PrepareRequest
from drivetrain.rehearsal._mode import Host, Operators, Stage
from drivetrain.rehearsal._places import place_of_error
from drivetrain.rehearsal._substitutes import Notes, substituted
from drivetrain.rehearsal.report import Failure, Message, Report
from drivetrain.specs import BackendSpec, Capability

__all__ = ["Rehearsal", "refuse_engines", "rehearse"]

#: Engines of vendors that launch kernels and processes of their own: fake tensors don't get through them.
_OWNERS = (
    Capability.OWNS_BACKWARD,
    Capability.OWNS_STEP,
    Capability.OWNS_SCHEDULE,
    Capability.OWNS_PRECISION,
)


class _Enough(BaseException):
    """Ends the script. Not an Exception: scripts that catch those go on to the end of theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What is rehearsed.

    Args:
        rank: As which rank.
        world_size: Of how many.
        steps: Optimizer steps to make; the script ends before the next.
        assume: What a value that the script reads is taken to be; None ends the rehearsal there.
    """

    rank: int
    world_size: int
    steps: int = 2
    assume: float | None = None


class _Watch:
    """Follows a script through its phases."""

    def __init__(self, stage: Stage, steps: int) -> None:
        self.stage = stage
        self.parts: engine.Parts | None = None
        self._steps = steps
        self._depth = 0
        self._first: Any = None
        self.done = 0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, self.stage.phase = self.stage.phase, name
        try:
            yield
        finally:
            self.stage.phase = before

    # -- models ------------------------------------------------------------------------------------------------------------

    def parameter(self, module: Any, name: str, parameter: Any) -> Any:
        """A parameter is fake from its registration on: no model is ever in memory."""
        if parameter is None or parameter.is_meta or type(parameter) is not torch.nn.Parameter:
            return None
        if isinstance(parameter, FakeTensor):
            return None
        fake = self.stage.parameter(parameter)
        self.stage.memory.add(fake, "prepare")
        try:
            torch.utils.swap_tensors(parameter, fake)  # the object stays: other modules and optimizers may have it
        except RuntimeError:  # something refers to it weakly
            return fake
        return None

    def assemble(self, given: Any) -> engine.Parts:
        """An Accelerator whose backend prepares fake models."""
        parts = engine.assemble(given)
        self.parts = parts
        prepare = parts.backend.prepare

        def prepare_fakes(request: PrepareRequest) -> Prepared:
            for model in request.models:
                self._forget_values(model)
            with self.phase("prepare"):
                prepared = prepare(request)
            for model in prepared.models:
                self._label_model(model)
            return prepared

        parts.backend.prepare = prepare_fakes  # type: ignore[method-assign]
        return parts

    def _forget_values(self, model: torch.nn.Module) -> None:
        """What came into the model by other ways than registration: weights that were loaded, buffers of numbers."""
        memory = self.stage.memory
        for parameter in model.parameters():
            if not isinstance(parameter, FakeTensor) and not parameter.is_meta:
                torch.utils.swap_tensors(parameter, self.stage.parameter(parameter))
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is None or buffer.is_meta or isinstance(buffer, FakeTensor):
                    continue
                if buffer.is_floating_point():
                    module._buffers[name] = buffer = self.stage.empty(buffer)
                memory.add(buffer, "prepare")

    def _label_model(self, model: torch.nn.Module) -> None:
        for tensors, category in ((model.parameters(), "parameters"), (model.buffers(), "buffers")):
            for tensor in tensors:
                self._label(tensor, category)

    def _label(self, tensor: torch.Tensor, category: str) -> None:
        part = getattr(tensor, "_local_tensor", tensor)
        if not part.is_meta or isinstance(part, FakeTensor):
            self.stage.memory.add(part, self.stage.phase)
            self.stage.memory.label(part, category)

    # -- phases ------------------------------------------------------------------------------------------------------------

    def before_forward(self, module: Any, args: Any) -> None:
        self._depth += 1
        if self.stage.phase != "backward":  # where activations are computed again
            self.stage.phase = "forward"
        if not self.stage.step:
            self.stage.step = 1
            self.stage.memory.begin()

    def after_forward(self, module: Any, args: Any, output: Any) -> None:
        self._depth -= 1
        if not self._depth and self.stage.phase == "forward":
            self.stage.phase = "loop"

    def backward(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.stage.memory.keep_activations()
        try:
            with self.phase("backward"):
                return function(*args, **kwargs)
        finally:
            self.stage.works.clear()
            self.stage.memory.keep_gradients()

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._first = self._first or optimizer
        if optimizer is self._first and self.done == self._steps:
            raise _Enough
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._label(parameter, "parameters")
                if parameter.grad is not None:
                    self._label(parameter.grad, "gradients")
        self.stage.phase = "step"

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.stage.phase = "loop"
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self._label(value, "optimizer state")
        if optimizer is self._first:
            self.done += 1
            self.stage.step += 1
            self.stage.memory.mark()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Inside, hooks on all modules and optimizers tell the phase."""
        handles = [
            hooks.register_module_parameter_registration_hook(self.parameter),
            hooks.register_module_forward_pre_hook(self.before_forward),
            hooks.register_module_forward_hook(self.after_forward, always_call=True),
            register_optimizer_step_pre_hook(self.before_step),
            register_optimizer_step_post_hook(self.after_step),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def refuse_engines(spec: BackendSpec) -> None:
    """Raise `UnsupportedError` for a backend whose vendor's engine does the work."""
    owns = [c for c in _OWNERS if c in spec.capabilities]
    if owns or spec.exclusive:
        raise UnsupportedError(
            f"The backend {spec.name!r} can't be rehearsed: an engine of its own does the work ({owns[0].value if owns else 'exclusive'}), and needs real "
            "devices and values. Rehearse the script with a backend that is made of torch's own parts."
        )


def _make_backend(registry: Any, plan: Any, device: Any) -> Any:
    refuse_engines(plan.backend)
    return _original_make_backend(registry, plan, device)


_original_make_backend = engine.make_backend


def rehearse(script: Callable[[], Any], what: Rehearsal) -> Report:
    """Call a script's code on shapes, as one rank of a job, and say what happened. Call it in a process of its own, before torch has done anything.

    Args:
        script: Runs the script.
        what: What is rehearsed.

    Returns:
        What was found; an error of the script's is part of it.
    """
    stage = Stage(what.assume)
    watch = _Watch(stage, what.steps)
    notes = Notes()
    failure: Failure | None = None
    started = time.perf_counter()
    more: dict[str, Any] = {
        "drivetrain.accelerator:assemble": watch.assemble,
        "drivetrain._engine.assemble:make_backend": _make_backend,
        "drivetrain._engine.replan:make_backend": _make_backend,
    }
    with (
        substituted(stage, rank=what.rank, world_size=what.world_size, notes=notes, **more),
        watch.following(),
        Host(stage, watch.backward),
        Operators(stage),
    ):
        try:
            script()
        except _Enough:
            pass
        except SystemExit as stop:
            if stop.code not in (None, 0):
                failure = _failure(stop)
        except BaseException as error:
            failure = _failure(error)
        live = stage.memory.live()
    return _report(what, watch, notes, failure, live, time.perf_counter() - started)


def _failure(error: BaseException) -> Failure:
    return Failure(
        type=type(error).__name__,
        message=str(error),
        where=place_of_error(error.__traceback__),
        traceback="".join(traceback.format_exception(error)),
    )


def _report(
    what: Rehearsal, watch: _Watch, notes: Notes, failure: Failure | None, live: dict[str, int], seconds: float
) -> Report:
    stage, parts = watch.stage, watch.parts
    peak, at_peak = stage.memory.peak()
    last = max(watch.done, 1)
    return Report(
        rank=what.rank,
        world_size=what.world_size,
        backend="" if parts is None else parts.backend.spec.name,
        precision="" if parts is None else parts.backend.precision.spec.name,
        facts={} if parts is None else parts.backend.describe(),
        steps=watch.done,
        seconds=round(seconds, 3),
        memory=live,
        peak=peak,
        at_peak=at_peak,
        setup_peak=stage.memory.setup_peak(),
        setup=_messages(stage, 0),
        per_step=_messages(stage, last),
        sequence=tuple((c.kind, c.nbytes, c.group_size, c.step) for c in stage.sent),
        reads=dict(stage.reads),
        notes=tuple(notes),
        failure=failure,
    )


def _messages(stage: Stage, step: int) -> tuple[Message, ...]:
    counts: Counter[tuple[str, int, str]] = Counter()
    sizes: Counter[tuple[str, int, str]] = Counter()
    for sent in stage.sent:
        if sent.step == step:
            key = sent.kind, sent.group_size, sent.where
            counts[key] += 1
            sizes[key] += sent.nbytes
    return tuple(
        Message(kind=key[0], group_size=key[1], where=key[2], count=n, nbytes=sizes[key]) for key, n in counts.items()
    )
