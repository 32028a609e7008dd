"""Settings of 8-bit training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.config import Options
from drivetrain.errors import ConfigurationError

__all__ = ["AORecipeKwargs"]

if TYPE_CHECKING:
    TorchaoConfig = Any
else:

    class TorchaoConfig:
        """Stands for torchao's ``Float8LinearConfig`` without importing it: files and variables can't say one."""


@dataclass
class AORecipeKwargs(Options):
    """Which linear layers compute in float8, and how.

    Args:
        config: torchao's own ``Float8LinearConfig``, in place of ``recipe``; from Python only.
        module_filter_func: ``(module, name) -> bool``: whether a linear layer is converted, in place of the four settings from
            ``skip_first_and_last`` on; from Python only.
        pad_inner_dim: Fill rows up to multiples of 16, which the hardware needs, where they aren't.
        enable_fsdp_float8_all_gather: Sharded weights travel in float8; with ``recipe="tensorwise"`` alone.
        recipe: Scales per tensor ("tensorwise", the fastest), per row ("rowwise", more exact), or per row with the weights' gradients computed in
            bfloat16 ("rowwise_with_gw_hp", the most exact).
        emulate: Compute the same numbers without 8-bit hardware, slowly: True always; False never; None where the hardware lacks it, with a warning.
        skip_first_and_last: The model's first and last linear layer stay in bfloat16.
        min_features: Linear layers with fewer inputs or outputs stay in bfloat16: there casts cost more than they save.
        skip_modules: Patterns of modules that stay in bfloat16: names ("blocks.0.*"), last parts of names, class names.

    Example:
        >>> AORecipeKwargs(recipe="rowwise", min_features=256).to_kwargs()
        {'recipe': 'rowwise', 'min_features': 256}
    """

    config: TorchaoConfig | None = None
    module_filter_func: Callable[..., Any] | None = None
    pad_inner_dim: bool = True
    enable_fsdp_float8_all_gather: bool = False
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    emulate: bool | None = None
    skip_first_and_last: bool = True
    min_features: int = 64
    skip_modules: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.validate()
        if self.enable_fsdp_float8_all_gather and self.recipe != "tensorwise":
            raise ConfigurationError(
                f"AORecipeKwargs: enable_fsdp_float8_all_gather=True sends weights with one scale per tensor, and recipe={self.recipe!r} has "
                "one per row. Use recipe='tensorwise'."
            )
        if self.config is not None:
            doubled = {"recipe", "pad_inner_dim", "enable_fsdp_float8_all_gather", "emulate"} & self.explicit().keys()
            if doubled:
                raise ConfigurationError(
                    f"AORecipeKwargs: config= says everything about the products, so leave out {', '.join(sorted(doubled))}, or set it in the config."
                )
        if self.module_filter_func is not None:
            doubled = {"skip_first_and_last", "min_features", "skip_modules"} & self.explicit().keys()
            if doubled:
                raise ConfigurationError(
                    f"AORecipeKwargs: module_filter_func= decides which layers are converted, so leave out {', '.join(sorted(doubled))}."
                )
