"""Precision as DeepSpeed's engine does it: parameters in bf16 or fp16, masters in fp32, the loss scale its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from drivetrain.errors import UnsupportedError
from drivetrain.interfaces import Precision
from drivetrain.interfaces.autocast import AutocastForward
from drivetrain.interfaces.norms import keeps_statistics
from drivetrain.parallel.structure import convert_to_fp32, map_tensors

__all__ = ["EnginePrecision", "WidenedForward"]

#: What a dynamic loss scaler remembers beside the scale.
_HISTORY = ("cur_iter", "last_overflow_iter", "cur_hysteresis")


class EnginePrecision(Precision):
    """Takes the place of the chosen precision; core then neither converts nor scales.

    Floating-point inputs of a model become its dtype, outputs become float32 (unless ``PrecisionKwargs(output_dtype="compute")``).

    Args:
        chosen: The precision that was asked for.

    Example:
        >>> from drivetrain.specs import PrecisionSpec
        >>> EnginePrecision(Precision(PrecisionSpec(name="fp32"), device_type="cpu")).scales
        False
    """

    def __init__(self, chosen: Precision) -> None:
        super().__init__(chosen.spec, device_type=chosen.device_type, options=chosen.options)
        self.compute_dtype = chosen.compute_dtype
        #: What has a loss scale: the optimizers of engines in fp16.
        self.scaled: list[Any] = []
        policy = self.options.get("PrecisionKwargs")
        self._upcast = policy is None or policy.output_dtype == "float32"
        if policy is not None and policy.keep_in_fp32:
            raise UnsupportedError(
                f"PrecisionKwargs(keep_in_fp32={policy.keep_in_fp32}): DeepSpeed's engine converts whole models. Leave it out, or train in autocast: "
                'a configuration with "torch_autocast": {"enabled": true, "dtype": "bfloat16"}.'
            )

    @property
    def is_low(self) -> bool:
        """Whether models are converted."""
        return self.compute_dtype in (torch.bfloat16, torch.float16)

    def check_device(self) -> None:
        """Look whether DeepSpeed computes in this dtype here.

        Raises:
            UnsupportedError: If it doesn't.
        """
        device = get_accelerator()
        supported = {torch.float16: device.is_fp16_supported, torch.bfloat16: device.is_bf16_supported}
        if self.is_low and not supported[self.compute_dtype]():
            raise UnsupportedError(
                f"mixed_precision={self.spec.name!r}: DeepSpeed doesn't compute in it on this device ({device.device_name()}; a CPU needs AVX512-FP16 "
                'for float16). Use mixed_precision="bf16" or "no".'
            )

    def wrap_forward(self, model: torch.nn.Module, *, casts: bool = True) -> torch.nn.Module:
        """Convert what goes into a model, and what comes out.

        Args:
            model: The user's model.
            casts: Whether its parameters are converted; else autocast converts where it must.
        """
        if self.is_low and casts:
            model.register_forward_pre_hook(_ConvertInputs(self.compute_dtype), with_kwargs=True, prepend=True)
            for module in model.modules():
                if keeps_statistics(module) and "forward" not in vars(module):
                    vars(module)["forward"] = WidenedForward(module)
        if self.is_low and self._upcast:
            model.register_forward_hook(_upcast_outputs)
        return model

    def wrap_in_autocast(self, model: torch.nn.Module) -> torch.nn.Module:
        """Compute a model that has no engine under autocast, as engines do theirs."""
        context = {"device_type": self.device_type, "dtype": self.compute_dtype}
        if self.is_low:
            model.forward = AutocastForward(model, context, upcast=self._upcast)
        return model

    def unwrap_forward(self, model: torch.nn.Module) -> torch.nn.Module:
        """Take the conversions away."""
        for hooks in (model._forward_pre_hooks, model._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(hook, _ConvertInputs) or hook is _upcast_outputs:
                    del hooks[key]
        if isinstance(model.__dict__.get("forward"), AutocastForward):
            model.__dict__["forward"].undo()
        for module in model.modules():
            if isinstance(vars(module).get("forward"), WidenedForward):
                del vars(module)["forward"]
        return model

    def state_dict(self) -> dict[str, Any]:
        """The scale of each engine, and what it will be adapted by."""
        if not self.scaled:
            return {}
        scalers = [_scaler(optimizer) for optimizer in self.scaled]
        history = [{name: getattr(s, name) for name in _HISTORY if hasattr(s, name)} for s in scalers]
        return {
            "scale": float(scalers[0].cur_scale),
            "scales": [float(s.cur_scale) for s in scalers],
            "history": history,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with these scales; a state of another backend has one, without a history."""
        if not state or not self.scaled:
            return
        scales = state.get("scales") or [state["scale"]] * len(self.scaled)
        histories = state.get("history") or [{}] * len(self.scaled)
        for optimizer, scale, history in zip(self.scaled, scales, histories, strict=False):
            scaler = _scaler(optimizer)
            scaler.cur_scale = scale
            for name, value in history.items():
                if hasattr(scaler, name):
                    setattr(scaler, name, value)


def _scaler(optimizer: Any) -> Any:
    """What holds the scale: ZeRO's optimizers have an object of their own for it, those of stage 0 a configuration."""
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None) or optimizer


class WidenedForward:
    """Takes the place of the ``forward`` of a norm with running statistics: they stay float32 in an engine, and no kernel takes parameters of another dtype.

    An object with a reference to the module, so that the model can be pickled and copied.

    Args:
        module: The norm.

    Example:
        >>> norm = torch.nn.BatchNorm1d(2, dtype=torch.bfloat16)
        >>> _ = norm.register_buffer("running_mean", torch.zeros(2)), norm.register_buffer("running_var", torch.ones(2))
        >>> norm.forward = WidenedForward(norm)
        >>> norm(torch.ones(4, 2, dtype=torch.bfloat16)).dtype
        torch.bfloat16
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The norm's output, in the dtype of its input."""
        module, narrow = self.module, self.module._parameters
        try:
            module._parameters = {n: p if p is None else p.to(torch.float32) for n, p in narrow.items()}  # type: ignore[misc]
            return type(module).forward(module, *args, **kwargs)
        finally:
            module._parameters = narrow


class _ConvertInputs:
    """A forward pre-hook: floating-point inputs in the dtype of the parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return map_tensors(self._convert, args), map_tensors(self._convert, kwargs)

    def _convert(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor


def _upcast_outputs(module: torch.nn.Module, args: Any, output: Any) -> Any:
    return convert_to_fp32(output)
