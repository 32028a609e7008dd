"""Full precision, bf16 and fp16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from drivetrain._builtin.scaling import MeshScaler
from drivetrain.errors import UnsupportedError
from drivetrain.interfaces import AutocastPrecision, Precision
from drivetrain.specs import PrecisionSpec

__all__ = ["BFloat16", "Float16", "FullPrecision"]


class FullPrecision(Precision):
    """fp32: the base class, which costs nothing."""


class BFloat16(AutocastPrecision):
    """bf16 by autocast; no loss scale is needed.

    Example:
        >>> import torch
        >>> p = BFloat16(PrecisionSpec(name="bf16"), device_type="cpu")
        >>> p.wrap_forward(torch.nn.Linear(2, 2))(torch.ones(1, 2)).dtype
        torch.float32
    """

    compute_dtype = torch.bfloat16


class Float16(AutocastPrecision):
    """fp16 by autocast, with loss scaling.

    The scale is dynamic; static with ``GradScalerKwargs(growth_factor=1, backoff_factor=1)``, and none with ``enabled=False``.

    Overflow is found in the gradients after they were reduced, so every process finds the same; where layers are divided, processes agree on it. The scale adapts once per
    window, when the next one starts, so that several optimizers of one window share a scale.

    Example:
        >>> import torch
        >>> p = Float16(PrecisionSpec(name="fp16"), device_type="cpu")
        >>> p.scale(torch.tensor(1.0))
        tensor(65536.)
    """

    compute_dtype = torch.float16

    def __init__(self, spec: PrecisionSpec, *, device_type: str, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(spec, device_type=device_type, options=options)
        handler = self.options.get("GradScalerKwargs")
        given = handler.to_dict() if handler is not None else {}
        if given.get("growth_factor") == 1.0:  # never grows, which torch expresses by the interval
            given.update(growth_factor=2.0, growth_interval=2**31 - 1)
        if given.get("backoff_factor") == 1.0:  # torch wants less than 1; this is 1 in the scale's float32
            given["backoff_factor"] = 1.0 - 1e-9
        self.scaler = MeshScaler(device_type, **given)
        self.scales = self.scaler.is_enabled()
        self._unscaled: set[int] = set()
        self._stepped: dict[int, bool] = {}  # optimizer id -> skipped
        self._hooked: set[int] = set()
        self._ran: dict[int, torch.Tensor | None] = {}

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return self.scaler.scale(loss)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.scales or id(optimizer) in self._unscaled or not _has_gradients(optimizer):
            return
        self.scaler.overflow_group = self.overflow_group
        self.scaler.unscale_(optimizer)
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, closure: Any | None = None) -> Any:
        if not self.scales:
            return super().step(optimizer, closure)
        if closure is not None:
            raise UnsupportedError(
                "fp16 scales the loss, and a closure would back-propagate again with gradients unscaled once: "
                "step without a closure, or use mixed_precision='bf16'."
            )
        key = id(optimizer)
        if not _has_gradients(optimizer):
            self._stepped[key] = False
            return optimizer.step()
        self.unscale_(optimizer)
        if key not in self._hooked:
            optimizer.register_step_post_hook(self._note_step)
            self._hooked.add(key)
        self._ran.pop(key, None)
        result = self.scaler.step(optimizer)
        if key not in self._ran:
            self._stepped[key] = True
        else:  # a fused optimizer runs in any case and skips inside its kernel, by this flag
            flag = self._ran[key]
            self._stepped[key] = flag is not None and bool(flag.item())
        return result

    def _note_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._ran[id(optimizer)] = getattr(optimizer, "found_inf", None)

    def was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        return self._stepped.get(id(optimizer), False)

    def update(self) -> None:
        if self._unscaled:
            self.scaler.update()
            self._unscaled.clear()

    def state_dict(self) -> dict[str, Any]:
        self.update()
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.update()  # the scaler must forget its last window, too
        if state:
            self.scaler.load_state_dict(dict(state))


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
