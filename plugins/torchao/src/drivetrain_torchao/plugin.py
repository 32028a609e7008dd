"""What the plugin offers. Imports neither torch nor torchao."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs import hookimpl
from drivetrain.specs import PrecisionSpec

DRIVETRAIN_API = 1

FP8 = PrecisionSpec(
    name="fp8",
    summary="float8 matrix products of linear layers, bfloat16 autocast around them",
    target="drivetrain_torchao.precision:Float8",
    options="drivetrain_torchao.options:AORecipeKwargs",
    exports=(
        "AORecipeKwargs",
        "convert_model_to_fp8_ao=drivetrain_torchao.layers:convert_model_to_fp8_ao",
        "filter_first_and_last_linear_layers=drivetrain_torchao.layers:filter_first_and_last_linear_layers",
        "has_ao_layers=drivetrain_torchao.layers:has_ao_layers",
    ),
    dtypes=("float32", "bfloat16"),
)


@hookimpl
def drivetrain_register_precisions() -> Iterable[PrecisionSpec]:
    """Offer fp8."""
    return [FP8]
