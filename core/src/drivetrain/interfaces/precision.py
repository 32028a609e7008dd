"""Dtype and loss scaling."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from drivetrain.specs import PrecisionSpec

__all__ = ["Precision"]


class Precision:
    """Owns dtype and scaling: module conversion, forward context, loss scale, unscale, overflow, state.

    The base class is full precision: every method does nothing, at no cost. A backend owns one instance and calls it. Where the vendor's
    engine owns precision (`Capability.OWNS_PRECISION`), the backend puts one of its own in the place of the chosen one, with its
    `compute_dtype`, `scales` False and the engine's scale as its state.

    Args:
        spec: The descriptor.
        device_type: torch type of the device it will run on ("cpu", "cuda").
        options: Options objects by class name (``GradScalerKwargs``, ``AutocastKwargs``, those of ``spec.options``).

    Example:
        >>> import torch
        >>> p = Precision(PrecisionSpec(name="fp32"), device_type="cpu")
        >>> p.scale(torch.tensor(2.0)), p.scales
        (tensor(2.), False)
    """

    #: Dtype that most of the forward computes in.
    compute_dtype: torch.dtype = torch.float32
    #: Whether the loss is scaled: then steps may be skipped.
    scales: bool = False
    #: Processes that must agree on an overflow, a ``torch.distributed.ProcessGroup``. A backend sets it where gradients that were reduced may still differ
    #: in that (layers are divided); None: they are the same on all processes, or DTensors of one mesh.
    overflow_group: Any = None

    def __init__(self, spec: PrecisionSpec, *, device_type: str, options: Mapping[str, Any] | None = None) -> None:
        self.spec = spec
        self.device_type = device_type
        self.options = dict(options or {})

    def convert_module(self, model: torch.nn.Module) -> torch.nn.Module:
        """Change parameters or layers in place (fp8 linears, pure bf16), before the backend wraps the model. Returns the model."""
        return model

    def wrap_forward(self, model: torch.nn.Module) -> torch.nn.Module:
        """Make the model's forward compute in this precision. Returns the same model; undone by `unwrap_forward`."""
        return model

    def unwrap_forward(self, model: torch.nn.Module) -> torch.nn.Module:
        """Undo `wrap_forward`; the model is then picklable and plain."""
        return model

    def kept(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """Modules that compute in float32 whatever the rest does, by name: a backend must not round their weights."""
        return {}

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was prepared: a precision that steps in another dtype can watch its state being loaded."""

    def autocast(self, **overrides: Any) -> contextlib.AbstractContextManager[Any]:
        """Context in which the user's own code (a loss outside the model) computes in this precision."""
        return contextlib.nullcontext()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the current scale."""
        return loss

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once per window, and note overflow. Idempotent within a window."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Any | None = None) -> Any:
        """Step unless gradients overflowed on any process that shares a parameter; return what the step returned."""
        return optimizer.step() if closure is None else optimizer.step(closure)

    def was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last `step` of this optimizer was skipped."""
        return False

    def update(self) -> None:
        """End of a window, after all optimizers stepped: adapt the scale."""

    def describe(self, model: torch.nn.Module) -> dict[str, str]:
        """For ``explain()``: what runs in which dtype, by module name pattern."""
        return {"*": str(self.compute_dtype).removeprefix("torch.")}

    def state_dict(self) -> dict[str, Any]:
        """Plain data for checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def found_overflow(self, optimizers: Iterable[torch.optim.Optimizer]) -> bool:
        """Whether any of these optimizers skipped its last step."""
        return any(self.was_skipped(o) for o in optimizers)
