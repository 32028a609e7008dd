"""Looking through wrappers of models."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["extract_model_from_parallel", "is_compiled_module", "is_peft_model"]


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether a module is what ``torch.compile`` returns, or was compiled in place.

    Example:
        >>> is_compiled_module(torch.nn.Linear(1, 1))
        False
    """
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def is_peft_model(model: torch.nn.Module) -> bool:
    """Whether a model is one of the peft package's, under any wrapper.

    Example:
        >>> is_peft_model(torch.nn.Linear(1, 1))
        False
    """
    inner = extract_model_from_parallel(model)
    return any(c.__module__.partition(".")[0] == "peft" and c.__name__ == "PeftModel" for c in type(inner).__mro__)


def extract_model_from_parallel(
    model: torch.nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> torch.nn.Module:
    """The user's model under wrappers for parallel training, without an Accelerator at hand (else use ``unwrap_model``).

    Args:
        model: A model, wrapped or not.
        keep_fp32_wrapper: Keep the forward in mixed precision.
        keep_torch_compile: Keep it compiled.
        recursive: Look through wrappers of submodules too, in place.

    Example:
        >>> inner = torch.nn.Linear(1, 1)
        >>> extract_model_from_parallel(torch.nn.DataParallel(inner)) is inner
        True
    """
    from drivetrain.interfaces import AutocastForward

    compiled = model if hasattr(model, "_orig_mod") else None
    if compiled is not None:
        model = compiled._orig_mod  # type: ignore[assignment]
    while isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
        model = model.module
    if recursive:
        for name, child in list(model.named_children()):
            inner = extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, recursive=True)
            if inner is not child:
                setattr(model, name, inner)
    for module in () if keep_fp32_wrapper else model.modules():
        forward: Any = module.__dict__.get("forward")
        if isinstance(forward, AutocastForward):
            forward.undo()
    if not keep_torch_compile:
        model._compiled_call_impl = None
    elif compiled is not None:
        compiled._orig_mod = model
        return compiled
    return model
