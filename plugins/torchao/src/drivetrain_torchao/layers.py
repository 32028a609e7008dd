"""Which linear layers are converted, and converting them in place. Names of Accelerate where it has some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from drivetrain.interfaces.autocast import matching_modules

__all__ = [
    "convert_layers",
    "convert_model_to_fp8_ao",
    "filter_first_and_last_linear_layers",
    "has_ao_layers",
    "reasons_to_keep",
]

#: The hardware multiplies blocks of so many numbers.
BLOCK = 16


def linear_layers(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Plain linear layers by name.

    Subclasses are left out: they compute something else, or (in ``MultiheadAttention``) are never called.
    """
    return {name: module for name, module in model.named_modules() if type(module) is torch.nn.Linear}


def reasons_to_keep(
    model: torch.nn.Module,
    *,
    skip_first_and_last: bool,
    min_features: int,
    skip: Sequence[str],
    fp32: Sequence[str] = (),
) -> dict[str, str]:
    """The linear layers that stay in higher precision, each with the reason.

    Args:
        model: The model.
        skip_first_and_last: Whether these two stay.
        min_features: Layers with fewer inputs or outputs stay.
        skip: Patterns of modules that stay in bfloat16.
        fp32: Patterns of modules that stay in float32.

    Example:
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in [(32, 32), (32, 8), (32, 64), (32, 16)]))
        >>> reasons_to_keep(model, skip_first_and_last=True, min_features=16, skip=[])
        {'0': 'the first linear layer', '1': 'its smaller side is 8, below 16', '3': 'the last linear layer'}
    """
    layers = linear_layers(model)
    reasons: dict[str, str] = {}
    for patterns, why in ((fp32, "in float32 by keep_in_fp32"), (skip, "skip_modules")):
        for top, _, pattern in matching_modules(model, patterns):
            for name in layers:
                if name == top or name.startswith(f"{top}."):
                    reasons.setdefault(name, f"{why}: {pattern!r}")
    for name, layer in layers.items():
        small = min(layer.in_features, layer.out_features)
        if small < min_features:
            reasons.setdefault(name, f"its smaller side is {small}, below {min_features}")
        elif layer.in_features % BLOCK or layer.out_features % BLOCK:
            reasons.setdefault(
                name,
                f"{layer.in_features} by {layer.out_features} aren't both multiples of {BLOCK}, which 8-bit products need",
            )
    if skip_first_and_last and layers:
        names = list(layers)
        reasons[names[0]] = "the first linear layer"
        reasons[names[-1]] = "the last linear layer"
    return {name: reasons[name] for name in layers if name in reasons}


def convert_layers(model: torch.nn.Module, names: Sequence[str], config: Any) -> torch.nn.Module:
    """Put float8 layers in the place of these linear layers. Parameters stay the same objects.

    Args:
        model: The model, changed in place.
        names: The layers.
        config: torchao's ``Float8LinearConfig``.

    Returns:
        The model; something new only if the model is itself a layer to convert.
    """
    from torchao.float8 import convert_to_float8_training

    wanted = set(names)
    converted: torch.nn.Module = convert_to_float8_training(
        model, module_filter_fn=lambda module, name: name in wanted, config=config
    )
    for module in converted.modules():
        if is_float8(module):
            module.register_forward_pre_hook(_cast_input)
    return converted


def _cast_input(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Under autocast a layer gets its input in autocast's dtype; torchao does that for CUDA's alone."""
    first = inputs[0]
    kind = first.device.type
    if first.dtype is torch.float32 and torch.is_autocast_enabled(kind):
        return (first.to(torch.get_autocast_dtype(kind)), *inputs[1:])
    return inputs


def is_float8(module: torch.nn.Module) -> bool:
    """Whether a layer is torchao's."""
    from torchao.float8.float8_linear import Float8Linear

    return isinstance(module, Float8Linear)


def has_ao_layers(model: torch.nn.Module) -> bool:
    """Whether a model has float8 layers of torchao.

    Example:
        >>> has_ao_layers(torch.nn.Linear(16, 16))
        False
    """
    return any(is_float8(module) for module in model.modules())


def filter_first_and_last_linear_layers(module: torch.nn.Module, fqn: str) -> bool:
    """For ``AORecipeKwargs(module_filter_func=...)``: convert all linear layers of fitting sizes but the first and the last.

    Args:
        module: The whole model: which layer is first can't be told from a layer.
        fqn: The layer's name in it.

    Example:
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
        >>> [filter_first_and_last_linear_layers(model, name) for name in "012"]
        [False, True, False]
    """
    layers = linear_layers(module)
    return fqn in layers and fqn not in reasons_to_keep(module, skip_first_and_last=True, min_features=BLOCK, skip=[])


def chosen_by(model: torch.nn.Module, function: Callable[..., Any]) -> list[str]:
    """The linear layers that a filter of the user chooses."""
    whole = function is filter_first_and_last_linear_layers
    return [name for name, layer in linear_layers(model).items() if function(model if whole else layer, name)]


def convert_model_to_fp8_ao(
    model: torch.nn.Module, config: Any = None, module_filter_func: Callable[..., Any] | None = None
) -> torch.nn.Module:
    """Convert linear layers in place, by hand; ``Accelerator(mixed_precision="fp8")`` does it in `prepare`.

    Args:
        model: The model.
        config: torchao's ``Float8LinearConfig``; default: scales per tensor.
        module_filter_func: ``(module, name) -> bool``; default: all of fitting sizes but the first and the last.

    Example:
        >>> from torchao.float8 import Float8LinearConfig
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
        >>> has_ao_layers(convert_model_to_fp8_ao(model, Float8LinearConfig(emulate=True)))
        True
    """
    from torchao.float8 import Float8LinearConfig

    names = chosen_by(model, module_filter_func or filter_first_and_last_linear_layers)
    return convert_layers(model, names, config or Float8LinearConfig())
