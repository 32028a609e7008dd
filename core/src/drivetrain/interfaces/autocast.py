"""What precisions share that compute under ``torch.autocast``: bf16, fp16, and plugins that swap layers on top of it."""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

from drivetrain.interfaces.precision import Precision
from drivetrain.specs import PrecisionSpec

__all__ = ["AutocastForward", "AutocastPrecision", "matching_modules"]

_LOW = (torch.float16, torch.bfloat16)


def _to_float32(value: Any) -> Any:
    """Half-precision tensors as fp32, at any depth of containers; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _LOW else value
    from drivetrain.parallel.structure import convert_to_fp32

    return convert_to_fp32(value)


class AutocastForward:
    """Takes the place of a module's ``forward``: computes it under autocast.

    An object with a reference to the module, and not a closure, so that a deep copy of the model gets a forward of its own
    and the model can be pickled.

    Args:
        module: The module.
        context: Keyword arguments of ``torch.autocast``.
        upcast: Whether half-precision outputs become fp32.
        upcast_inputs: Whether half-precision inputs become fp32.

    Example:
        >>> import torch
        >>> m = torch.nn.Linear(2, 2)
        >>> m.forward = AutocastForward(m, {"device_type": "cpu", "dtype": torch.bfloat16}, upcast=False)
        >>> m(torch.ones(1, 2)).dtype
        torch.bfloat16
    """

    def __init__(
        self, module: torch.nn.Module, context: Mapping[str, Any], *, upcast: bool, upcast_inputs: bool = False
    ) -> None:
        self.module = module
        self.context = dict(context)
        self.upcast = upcast
        self.upcast_inputs = upcast_inputs
        self.replaced = module.__dict__.get("forward")
        self.__wrapped__ = self.replaced or type(module).forward.__get__(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> AutocastForward:
        module = copy.deepcopy(self.module, memo)  # in memo already: we are copied as part of it
        new = object.__new__(AutocastForward)
        new.module, new.context, new.upcast = module, dict(self.context), self.upcast
        new.upcast_inputs = self.upcast_inputs
        new.replaced = copy.deepcopy(self.replaced, memo)
        new.__wrapped__ = new.replaced or type(module).forward.__get__(module)
        return new

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output."""
        if self.upcast_inputs:
            args = tuple(_to_float32(a) for a in args)
            kwargs = {name: _to_float32(value) for name, value in kwargs.items()}
        with torch.autocast(**self.context):
            output = self.__wrapped__(*args, **kwargs)
        return _to_float32(output) if self.upcast else output

    def undo(self) -> None:
        """Give the module the forward that it had."""
        if self.replaced is None:
            del self.module.forward
        else:
            self.module.forward = self.replaced


def matching_modules(model: torch.nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Modules that a pattern matches, outermost ones alone, with the pattern: by qualified name, last part of the name, or class name.

    A ``ModuleList`` or ``ModuleDict`` that matches stands for the modules in it.

    Args:
        model: The model.
        patterns: As of `fnmatch`, upper and lower case being different.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> [name for name, _, _ in matching_modules(model, ["*Norm"])]
        ['1']
    """
    seen: set[int] = set()

    def visit(
        parent: torch.nn.Module, prefix: str, inherited: str | None
    ) -> Iterator[tuple[str, torch.nn.Module, str]]:
        for last, module in parent.named_children():
            if id(module) in seen:
                continue
            seen.add(id(module))
            name = prefix + last
            found = inherited or _matching_pattern(patterns, (name, last, type(module).__name__))
            if found is not None and not isinstance(module, _CONTAINERS):
                yield name, module, found
            else:
                yield from visit(module, name + ".", found)

    yield from visit(model, "", None)


#: They are never called: what is said of one is meant for the modules inside.
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict)


def _matching_pattern(patterns: Sequence[str], names: Sequence[str]) -> str | None:
    return next((p for p in patterns if any(fnmatch.fnmatchcase(n, p) for n in names)), None)


class AutocastPrecision(Precision):
    """Autocast around the model's forward; fp32 parameters, gradients and optimizer state. A subclass says its ``compute_dtype``.

    Reads ``AutocastKwargs`` and ``PrecisionKwargs`` among its options.

    Example:
        >>> import torch
        >>> p = AutocastPrecision(PrecisionSpec(name="bf16"), device_type="cpu")
        >>> p.wrap_forward(torch.nn.Linear(2, 2))(torch.ones(1, 2)).dtype
        torch.float32
    """

    compute_dtype = torch.bfloat16

    def __init__(self, spec: PrecisionSpec, *, device_type: str, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(spec, device_type=device_type, options=options)
        handler, policy = self.options.get("AutocastKwargs"), self.options.get("PrecisionKwargs")
        given = handler.to_dict() if handler is not None else {}
        self._context = {"device_type": device_type, "dtype": self.compute_dtype, **given}
        self._upcast = policy is None or policy.output_dtype == "float32"
        #: Patterns of modules that stay in float32.
        self.keep_in_fp32: tuple[str, ...] = () if policy is None else tuple(policy.keep_in_fp32)

    def kept(self, model: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """The modules that stay in float32, by name."""
        return {name: module for name, module, _ in matching_modules(model, self.keep_in_fp32)}

    def wrap_forward(self, model: torch.nn.Module) -> torch.nn.Module:
        """Compute under autocast, but for modules that stay in float32."""
        if isinstance(model.__dict__.get("forward"), AutocastForward):
            return model
        found = list(matching_modules(model, self.keep_in_fp32))
        for _, module, _ in found:
            off = {**self._context, "enabled": False}
            module.forward = AutocastForward(module, off, upcast=False, upcast_inputs=True)
        unmatched = [p for p in self.keep_in_fp32 if p not in {pattern for _, _, pattern in found}]
        if unmatched:
            warnings.warn(
                f"PrecisionKwargs(keep_in_fp32=...): {', '.join(map(repr, unmatched))} matches no module of {type(model).__name__}. "
                "Patterns are compared with names such as 'layers.0.norm', their last part, and class names.",
                stacklevel=2,
            )
        model.forward = AutocastForward(model, self._context, upcast=self._upcast)
        return model

    def unwrap_forward(self, model: torch.nn.Module) -> torch.nn.Module:
        """Give the model and its modules their own forward back."""
        for module in model.modules():
            forward = module.__dict__.get("forward")
            if isinstance(forward, AutocastForward):
                forward.undo()
        return model

    def autocast(self, **overrides: Any) -> contextlib.AbstractContextManager[Any]:
        """The same context for the user's own code; nests."""
        return torch.autocast(**{**self._context, **overrides})

    def describe(self, model: torch.nn.Module) -> dict[str, str]:
        """What computes in what, asked of autocast itself on this device."""
        name = _name(self.compute_dtype)
        lines = {"*": f"{name} by autocast, parameters and optimizer state {self._stored(model)}"}
        kept = self.kept(model)
        inside = {id(m) for top in kept.values() for m in top.modules()}
        counts = Counter(type(m) for m in model.modules() if id(m) not in inside and type(m) in _PROBES)
        for kind, count in counts.items():
            lines[f"{kind.__name__} ({count})"] = self._probe(kind)
        lines.update(dict.fromkeys(kept, "float32 (keep_in_fp32)"))
        lines["outputs"] = "float32" if self._upcast else f"{name} where autocast leaves them so"
        return lines

    def _stored(self, model: torch.nn.Module) -> str:
        return "float32"

    def _probe(self, kind: type[torch.nn.Module]) -> str:
        """The dtype that this kind of layer gives on half-precision input."""
        try:
            with torch.no_grad(), torch.autocast(**self._context):
                low = torch.ones(2, 4, 4, dtype=self.compute_dtype, device=self.device_type)
                return _name(_PROBES[kind](low).dtype)
        except (RuntimeError, NotImplementedError):
            return "as autocast decides"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _weights(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.ones(shape, device=x.device)


_PROBES: Mapping[type[torch.nn.Module], Callable[[torch.Tensor], torch.Tensor]] = {
    torch.nn.Linear: lambda x: functional.linear(x, _weights(x, 4, 4)),
    torch.nn.Conv1d: lambda x: functional.conv1d(x, _weights(x, 4, 4, 1)),
    torch.nn.Conv2d: lambda x: functional.conv2d(x[None], _weights(x, 2, 2, 1, 1)),
    torch.nn.Conv3d: lambda x: functional.conv3d(x[None, None], _weights(x, 1, 1, 1, 1, 1)),
    torch.nn.LayerNorm: lambda x: functional.layer_norm(x, (4,), _weights(x, 4), _weights(x, 4)),
    torch.nn.RMSNorm: lambda x: functional.rms_norm(x, (4,), _weights(x, 4)),
    torch.nn.GroupNorm: lambda x: functional.group_norm(x, 2, _weights(x, 4), _weights(x, 4)),
    torch.nn.BatchNorm1d: lambda x: functional.batch_norm(x, None, None, _weights(x, 4), _weights(x, 4), training=True),
    torch.nn.BatchNorm2d: lambda x: functional.batch_norm(
        x[None], None, None, _weights(x, 2), _weights(x, 2), training=True
    ),
    torch.nn.Embedding: lambda x: functional.embedding(
        torch.zeros(1, dtype=torch.long, device=x.device), _weights(x, 4, 4)
    ),
    torch.nn.Softmax: lambda x: functional.softmax(x, -1),
}
