"""float8 products in linear layers, bfloat16 autocast around them."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from drivetrain.errors import ConfigurationError
from drivetrain.interfaces import AutocastPrecision
from drivetrain.specs import PrecisionSpec
from drivetrain_torchao.hardware import obstacle
from drivetrain_torchao.layers import chosen_by, convert_layers, is_float8, linear_layers, reasons_to_keep
from drivetrain_torchao.options import AORecipeKwargs

__all__ = ["Float8"]


class Float8(AutocastPrecision):
    """Linear layers multiply in float8 with scales found anew in each product; the rest is bf16 autocast.

    Parameters, gradients and optimizer state are float32, so that accumulation, clipping and checkpoints are as in bf16.

    Example:
        >>> p = Float8(PrecisionSpec(name="fp8"), device_type="cpu", options={"AORecipeKwargs": AORecipeKwargs(emulate=True)})
        >>> model = p.convert_module(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))))
        >>> [type(layer).__name__ for layer in model]
        ['Linear', 'Float8Linear', 'Linear']
    """

    compute_dtype = torch.bfloat16

    def __init__(self, spec: PrecisionSpec, *, device_type: str, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(spec, device_type=device_type, options=options)
        self.recipe: AORecipeKwargs = self.options.get("AORecipeKwargs") or AORecipeKwargs()
        self.config = self._make_config()
        self._kept: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, str]] = weakref.WeakKeyDictionary()

    def _make_config(self) -> Any:
        """Torchao's configuration, emulated where the hardware has no such products.

        Raises:
            ConfigurationError: When it has none, and emulation is refused.
        """
        from torchao.float8 import Float8LinearConfig

        config, recipe = self.recipe.config, self.recipe
        if config is not None and not isinstance(config, Float8LinearConfig):
            raise ConfigurationError(f"AORecipeKwargs(config=...) takes torchao's Float8LinearConfig, not {config!r}.")
        if config is None:
            config = dataclasses.replace(
                Float8LinearConfig.from_recipe_name(recipe.recipe),
                pad_inner_dim=recipe.pad_inner_dim,
                enable_fsdp_float8_all_gather=recipe.enable_fsdp_float8_all_gather,
                emulate=bool(recipe.emulate),
            )
        if config.emulate:
            return config
        missing = obstacle(self.device_type, rowwise=self._granularity(config) != "tensorwise")
        if missing is None:
            return config
        if recipe.emulate is False or recipe.config is not None:
            raise ConfigurationError(
                f"mixed_precision='fp8': {missing}. Allow emulation (emulate=True, slower than bfloat16), or use mixed_precision='bf16'."
            )
        warnings.warn(
            f"mixed_precision='fp8': {missing}, so it is emulated: the same numbers, but slower than mixed_precision='bf16'. "
            "AORecipeKwargs(emulate=True) says that this is meant.",
            stacklevel=2,
        )
        return dataclasses.replace(config, emulate=True)

    @staticmethod
    def _granularity(config: Any) -> str:
        scaling = config.cast_config_weight.scaling_granularity.name
        return "tensorwise" if scaling == "TENSORWISE" else "rowwise"

    def convert_module(self, model: torch.nn.Module) -> torch.nn.Module:
        """Swap the linear layers that the settings choose."""
        layers = linear_layers(model)
        if self.recipe.module_filter_func is not None:
            chosen = set(chosen_by(model, self.recipe.module_filter_func))
            kept = {name: "module_filter_func" for name in layers if name not in chosen}
        else:
            kept = reasons_to_keep(
                model,
                skip_first_and_last=self.recipe.skip_first_and_last,
                min_features=self.recipe.min_features,
                skip=self.recipe.skip_modules,
                fp32=self.keep_in_fp32,
            )
        names = [name for name in layers if name not in kept]
        if not names and layers and not any(is_float8(m) for m in model.modules()):
            why = "; ".join(f"{name or 'the model'}: {reason}" for name, reason in list(kept.items())[:5])
            warnings.warn(
                f"mixed_precision='fp8' converts no layer of {type(model).__name__}, which so trains in bfloat16 ({why}). "
                "AORecipeKwargs has the settings that choose layers.",
                stacklevel=2,
            )
        converted = convert_layers(model, names, self.config) if names else model
        self._kept[converted] = kept
        return converted

    def describe(self, model: torch.nn.Module) -> dict[str, str]:
        """The layers in float8, and why others aren't."""
        lines = super().describe(model)
        cast = self.config
        dtypes = [
            str(c.target_dtype).removeprefix("torch.") for c in (cast.cast_config_weight, cast.cast_config_grad_output)
        ]
        how = f"{dtypes[0]} forward, {dtypes[1]} gradients, {self._granularity(cast)} scales"
        how += ", emulated" if cast.emulate else ""
        lines.update({name: how for name, module in model.named_modules() if is_float8(module)})
        lines.update({name: f"not float8: {reason}" for name, reason in self._kept.get(model, {}).items()})
        return lines
