"""torch.compile, of whole models or of their repeated blocks, in place."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from drivetrain.memory.blocks import repeated_blocks

__all__ = ["Compiler", "uncompile"]


class Compiler:
    """Compiles modules in place, so that names, types and state dicts stay as they are.

    Args:
        arguments: Keyword arguments of ``torch.compile``.
        regional: Compile each repeated block by itself: compile time doesn't grow with depth. The whole model where there is none.

    Example:
        >>> Compiler({"backend": "eager"}, regional=False).arguments
        {'backend': 'eager'}
    """

    def __init__(self, arguments: dict[str, Any], *, regional: bool) -> None:
        self.arguments = arguments
        self.regional = regional
        self._codes: dict[type, types.CodeType] = {}

    def __call__(self, model: torch.nn.Module) -> None:
        """Compile; a module that is compiled already stays as it is.

        Not with ``module.compile()``: torch passes over the frames of its own modules (Sequential, Linear, TransformerEncoder), so that of
        a model made of them nothing would be compiled. From a frame of ours it inlines them, as ``torch.compile(module)`` does.
        """
        codes: dict[type, types.CodeType] = {}  # of this model's blocks alone: other models have theirs
        for module in (repeated_blocks(model) if self.regional else []) or [model]:
            if module._compiled_call_impl is None:
                entry = _entry(module._call_impl, codes.get(type(module)))
                codes[type(module)] = entry.__code__
                module._compiled_call_impl = torch.compile(entry, **self.arguments)

    def inside_hooks(self, module: torch.nn.Module) -> None:
        """Compile a module's forward, and leave its hooks outside: for backends whose hooks communicate, which breaks a graph."""
        if _compiled_forward(module) is None:
            compiled = CompiledForward(module, self.arguments, self._codes.get(type(module)))
            self._codes[type(module)] = compiled.code
            module.forward = compiled


class CompiledForward:
    """Takes the place of a module's ``forward``.

    Args:
        module: The module.
        arguments: Keyword arguments of ``torch.compile``.
        code: Of the frame in which compiling begins, to share with other modules of the class; None for one of its own.
    """

    def __init__(self, module: torch.nn.Module, arguments: dict[str, Any], code: types.CodeType | None) -> None:
        self.replaced = module.__dict__.get("forward")
        self.__wrapped__ = self.replaced or type(module).forward.__get__(module)
        entry = _entry(self.__wrapped__, code)
        self.code = entry.__code__
        self.call = torch.compile(entry, **arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def _compiled_forward(module: torch.nn.Module) -> CompiledForward | None:
    """What `Compiler.inside_hooks` put in place of a module's forward, also below what others put around it."""
    forward = module.__dict__.get("forward")
    while forward is not None and not isinstance(forward, CompiledForward):
        forward = getattr(forward, "replaced", None)
    return forward


def _entry(call: Callable[..., Any], code: types.CodeType | None) -> types.FunctionType:
    """The frame in which compiling begins.

    What torch compiled is kept with a frame's code, a limited number of versions of it. Blocks of one class share them (they are compiled once);
    different models have a ``code`` of their own, so that they don't use up each other's.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return types.FunctionType(code or run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)


def uncompile(model: torch.nn.Module) -> torch.nn.Module:
    """Undo what `Compiler` did, in place.

    Example:
        >>> import torch
        >>> m = torch.nn.Linear(2, 2)
        >>> Compiler({"backend": "eager"}, regional=False)(m)
        >>> uncompile(m)._compiled_call_impl is None
        True
    """
    for module in model.modules():
        if module._compiled_call_impl is not None:
            module._compiled_call_impl = None
        compiled = _compiled_forward(module)
        if compiled is not None:
            compiled.call = compiled.__wrapped__
    return model
