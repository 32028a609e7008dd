"""``on_nonfinite``: a NaN or an infinity in a loss or a gradient is found on the device, and told with rank, step and samples.

Nothing is read on the host while a window runs. At its end one flag is computed from its losses and gradients, agreed by all processes with one
scalar all-reduce, and read: before the step where reading waits for nothing (a CPU) or the step depends on it ("skip"); else when the next window
ends ("raise"). Texts are exchanged once something was found. The object exists only where the feature is on.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from drivetrain.errors import NonfiniteError, UnsupportedError
from drivetrain.specs import Capability

if TYPE_CHECKING:
    from drivetrain._engine.accumulation import Window
    from drivetrain._engine.optimizer import PreparedOptimizer
    from drivetrain.accelerator import Accelerator

__all__ = ["NonfiniteGuard"]

_SHOWN = 16


@dataclass(slots=True)
class _Note:
    """One micro-batch."""

    loss: torch.Tensor
    number: int
    place: str
    samples: list[Any] | None


@dataclass(slots=True)
class _Check:
    """What is to be told if a flag turns out to be set."""

    flag: Future[list[float]]
    step: int
    notes: list[_Note] = field(default_factory=list)
    gradients: list[str] | None = None
    parameters: list[torch.Tensor] = field(default_factory=list)


class NonfiniteGuard:
    """Looks at each window's losses and gradients before its optimizers step.

    Args:
        accelerator: Whose windows.
        skip: Leave such steps out, instead of raising.

    Raises:
        UnsupportedError: For "skip" with a backend whose engine owns the step.

    Example:
        >>> import torch
        >>> from drivetrain import Accelerator
        >>> accelerator = Accelerator(cpu=True, on_nonfinite="raise")
        >>> model = torch.nn.Linear(1, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> accelerator.backward(model(torch.ones(1, 1)).sum() * float("nan"))
        >>> optimizer.step()
        Traceback (most recent call last):
        ...
        drivetrain.errors.NonfiniteError: Step 0: the loss of rank 0 in micro-batch 0 was nan. ...
    """

    def __init__(self, accelerator: Accelerator, *, skip: bool) -> None:
        self._accelerator = accelerator
        self._skip = skip
        self._notes: dict[Window, list[_Note]] = {}
        self._pending: deque[_Check] = deque()
        capabilities = accelerator.backend.spec.capabilities
        if skip and Capability.OWNS_STEP in capabilities:
            raise UnsupportedError(
                f"on_nonfinite='skip' leaves out optimizer steps, which the backend {accelerator.backend.spec.name!r} makes itself. "
                "Use on_nonfinite='raise'."
            )

    def note(self, window: Window, loss: torch.Tensor) -> None:
        """A micro-batch's loss, before it is weighted."""
        loader = self._accelerator.gradient_state.stack.active
        batch = None if loader is None else loader.batch
        notes = self._notes.setdefault(window, [])
        place, samples = "", None
        if batch is not None:
            samples = loader.samples_of(batch)
            place = f"batch {batch.index} of epoch {loader.epoch}"
        notes.append(_Note(loss.detach(), len(notes), place, samples))

    def stops(self, window: Window, optimizer: PreparedOptimizer) -> bool:
        """Whether the optimizer must not step at this window's end."""
        backend = self._accelerator.backend
        notes = self._notes.pop(window, [])
        parameters = optimizer.parameters()
        flag = self._flag(notes, () if backend.precision.scales else parameters)
        if flag is None:
            return False
        if self._skip:
            if not bool(flag.item()):
                return False
            check = _Check(Future(), self._accelerator.step, notes, parameters=parameters)
            text = self._tell(check)
            if self._accelerator.is_main_process:
                warnings.warn(f"{text} The step is skipped.", stacklevel=4)
            return not backend.precision.scales  # there the loss scale skips it, and shrinks
        self.settle()
        check = _Check(backend.read_later([flag]), self._accelerator.step, notes, parameters=parameters)
        self._pending.append(check)
        if check.flag.done():
            self.settle()
        return False

    def settle(self) -> None:
        """Read what was left to be read.

        Raises:
            NonfiniteError: On every process, if something wasn't finite on any.
        """
        while self._pending:
            check = self._pending.popleft()
            if check.flag.result()[0]:
                self._pending.clear()
                text = self._tell(check)
                raise NonfiniteError(f"{text} on_nonfinite='skip' leaves such steps out.")

    def _flag(self, notes: Sequence[_Note], parameters: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """1.0 if anything isn't finite on any process, on the device; None if there is nothing to look at."""
        device = self._accelerator.device
        found = [n.loss.to(device, torch.float32).sum() for n in notes]
        grads = [grad for _, grad in self._accelerator.backend.local_gradients(parameters)]
        if grads:
            found += [norm.to(device, torch.float32) for norm in torch._foreach_norm(grads)]
        if not found:
            found = [torch.zeros((), device=device)]
        flag = torch.stack(found).isfinite().all().logical_not().to(torch.float32)
        if self._accelerator.num_processes > 1 and dist.is_initialized():
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return flag

    def _tell(self, check: _Check) -> str:
        """What wasn't finite, in the words of every process. Collective."""
        from drivetrain.parallel import object_collectives

        names = self._accelerator.backend.parameter_names(self._accelerator._models)
        local = self._accelerator.backend.local_gradients(check.parameters)
        bad = [p for p, grad in local if not bool(grad.isfinite().all())]
        mine = {
            "losses": [
                (n.number, float(n.loss.sum()), _where(n)) for n in check.notes if not bool(n.loss.isfinite().all())
            ],
            "samples": [_where(n) for n in check.notes],
            "gradients": [names.get(id(p), "a parameter") for p in bad],
        }
        everyone = object_collectives.gather_object([mine])
        losses = [
            f"the loss of rank {rank} in micro-batch {number} was {value}{where and f' ({where})'}"
            for rank, facts in enumerate(everyone)
            for number, value, where in facts["losses"]
        ]
        if losses:
            return f"Step {check.step}: {'; '.join(losses)}."
        gradients = list(dict.fromkeys(name for facts in everyone for name in facts["gradients"]))
        samples = [
            f"rank {rank}: {'; '.join(w for w in facts['samples'] if w)}"
            for rank, facts in enumerate(everyone)
            if any(facts["samples"])
        ]
        return (
            f"Step {check.step}: every loss was finite, but not the gradients of {_listed(gradients) or 'some parameters'}."
            + (f" The window's data: {' | '.join(samples)}." if samples else "")
            + " torch.autograd.detect_anomaly() finds the operator."
        )


def _where(note: _Note) -> str:
    if note.samples is None:
        return note.place
    return f"samples {_listed(note.samples)} in {note.place}"


def _listed(things: Sequence[Any]) -> str:
    more = len(things) - _SHOWN
    return ", ".join(map(str, things[:_SHOWN])) + (f" and {more} more" if more > 0 else "")
