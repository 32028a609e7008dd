"""What happens inside of a model's forward: inputs, the output of each module, and who draws random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from drivetrain.parallel.structure import find_batch_size
from drivetrain.parity.sketch import named_tensors, sketch_rows

__all__ = ["ForwardWatch", "quieten"]

#: Tensors of one output that are looked at.
_OUTPUTS = 4


def quieten(model: torch.nn.Module) -> list[str]:
    """Switch dropout and its kin off: ranks can't draw the masks that one process draws for the whole batch.

    Every probability with "drop" in its name goes to 0, and ``p`` of modules whose class has it in its name.

    Returns:
        Names of the modules that had one.

    Example:
        >>> quieten(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout(0.5)))
        ['1']
    """
    changed = []
    for name, module in model.named_modules():
        is_dropout = "drop" in type(module).__name__.lower()
        for attribute, value in list(vars(module).items()):
            meant = "drop" in attribute.lower() or (is_dropout and attribute in ("p", "prob", "rate"))
            if meant and isinstance(value, float) and 0.0 < value <= 1.0:
                setattr(module, attribute, 0.0)
                changed.append(name)
    return sorted(set(changed))


@dataclass(slots=True)
class _Frame:
    """A module that is running."""

    random: Any
    child_drew: bool = False


@dataclass(slots=True)
class _Pass:
    """A forward of the whole model that is being recorded."""

    rows: int | None
    facts: dict[str, Any]
    frames: list[_Frame] = field(default_factory=list)
    modules: list[dict[str, Any]] = field(default_factory=list)


class ForwardWatch:
    """Hooks on one model that describe each forward that keeps what backward needs.

    Args:
        wrapped: The prepared model.
        model: The user's model in it.
        begin: Called before a forward with whether the model is in training mode: gives facts about it, or None where it isn't to be described.
        end: Called with the description.
    """

    def __init__(
        self,
        wrapped: torch.nn.Module,
        model: torch.nn.Module,
        *,
        begin: Callable[[bool], dict[str, Any] | None],
        end: Callable[[dict[str, Any]], None],
    ) -> None:
        self._model, self._begin, self._end = model, begin, end
        self._is_wrapped = wrapped is not model
        self._depth = 0  # of calls of the wrapper
        self._pass: _Pass | None = None
        self._names = {module: name for name, module in model.named_modules()}
        self._handles: list[Any] = []
        if self._is_wrapped:
            self._handles.append(wrapped.register_forward_pre_hook(self._enter_wrapper))
            self._handles.append(wrapped.register_forward_hook(self._leave_wrapper, always_call=True))
        for module in self._names:
            if not isinstance(module, torch.jit.ScriptModule):
                # The model's first of all hooks: state is looked at before a backend makes parameters ready for use.
                first = module is model
                self._handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=first))
                self._handles.append(module.register_forward_hook(self._leave))

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _enter_wrapper(self, *_: Any) -> None:
        self._depth += 1

    def _leave_wrapper(self, *_: Any) -> None:
        self._depth -= 1

    def _enter(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if module is self._model:
            self._pass = self._start(args, kwargs)
        if self._pass is not None:
            self._pass.frames.append(_Frame(_random_states(module)))

    def _start(self, args: Any, kwargs: Any) -> _Pass | None:
        if not torch.is_grad_enabled():
            return None
        facts = self._begin(self._model.training)
        if facts is None:
            return None
        rows = _rows_of((args, kwargs))
        tensors = list(named_tensors((*args, kwargs)))
        named = [(n, p) for n, p in self._model.named_parameters()]
        facts.update(
            rows=rows,
            bypassed=self._is_wrapped and self._depth == 0,
            inputs={name: sketch_rows(tensor, rows) for name, tensor in tensors},
            frozen=[n for n, p in named if not p.requires_grad],
            evaluating=[n for m, n in self._names.items() if not m.training],
        )
        return _Pass(rows, facts)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        running = self._pass
        if running is None or not running.frames:
            return
        frame = running.frames.pop()
        drew = _differ(frame.random, _random_states(module))
        if running.frames and drew:
            running.frames[-1].child_drew = True
        outputs = {}
        for name, tensor in list(named_tensors(output))[:_OUTPUTS]:
            rows = sketch_rows(tensor, running.rows)
            if rows is not None:
                outputs[name] = rows
        running.modules.append(
            {
                "name": self._names[module],
                "type": type(module).__name__,
                "outputs": outputs,
                "draws": drew and not frame.child_drew,
            }
        )
        if module is self._model:
            self._pass = None
            self._end({**running.facts, "modules": running.modules})


def _rows_of(inputs: Any) -> int | None:
    try:
        return find_batch_size(inputs)
    except (ValueError, TypeError):
        return None


def _random_states(module: torch.nn.Module) -> list[torch.Tensor]:
    """States of the generators that a module could draw from: the CPU's and its device's."""
    states = [torch.get_rng_state()]
    device = next((p.device for p in module.parameters(recurse=False)), None)
    if device is not None and device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(device).get_rng_state())
    return states


def _differ(before: list[torch.Tensor], after: list[torch.Tensor]) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
