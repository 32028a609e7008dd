"""Counts the bytes of tensors while a model runs, on fake tensors or real ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop

__all__ = ["Recorded", "StepTrace"]

#: What tensors are for: those of "constant" exist before and after the step and aren't counted.
CONSTANT, ACTIVATION, COPY, GRADIENT = "constant", "activation", "copy", "gradient"


@dataclass(slots=True)
class Recorded:
    """One stretch of a step, as `StepTrace` saw it: bytes of activations, copies and gradients at each moment."""

    phase: str
    unit: int
    moments: list[tuple[int, int, int]] = field(default_factory=list)
    flops: float = 0.0
    moved: float = 0.0
    operations: int = 0


class StepTrace(TorchDispatchMode):
    """Follows the memory of tensors, operation by operation: each is counted from when it is made until nobody holds it.

    Example:
        >>> trace = StepTrace()
        >>> weight = torch.ones(4, requires_grad=True)
        >>> trace.know([weight], "constant")
        >>> with trace:
        ...     doubled = weight * 2
        >>> trace.bytes["activation"], trace.stretches[0].operations
        (16, 1)
        >>> del doubled
        >>> trace.bytes["activation"]
        0
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = {ACTIVATION: 0, COPY: 0, GRADIENT: 0, CONSTANT: 0}
        self.stretches: list[Recorded] = []
        self.phase, self.unit = "forward", 0
        self._kinds: dict[int, list[Any]] = {}  # id of a storage -> [weak reference, kind, bytes]
        self._parameters: set[int] = set()

    # -- what is there -----------------------------------------------------------------------------------------------------

    def know(self, tensors: Iterable[torch.Tensor], kind: str, *, parameters: bool = False) -> None:
        """Say what tensors are for, whether they were seen before or not."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._add(storage, kind)
            if parameters:
                self._parameters.add(id(storage))

    def _add(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = id(storage)
        entry = self._kinds.get(key)
        if entry is not None:
            self.bytes[entry[1]] -= entry[2]
            entry[1] = kind
        else:
            entry = [weakref.ref(storage, self._forgetter(key)), kind, storage.nbytes()]
            self._kinds[key] = entry
        self.bytes[kind] += entry[2]

    def _forgetter(self, key: int) -> Callable[[Any], None]:
        def forget(_: Any) -> None:
            _, kind, count = self._kinds.pop(key)
            self.bytes[kind] -= count
            self._parameters.discard(key)

        return forget

    # -- who computes ------------------------------------------------------------------------------------------------------

    def enter(self, phase: str, unit: int) -> None:
        """From here on, a unit computes."""
        if (phase, unit) != (self.phase, self.unit):
            self.phase, self.unit = phase, unit
            self._begin()

    def _begin(self) -> None:
        if self.stretches and not self.stretches[-1].operations:
            self.stretches.pop()
        self.stretches.append(Recorded(self.phase, self.unit))
        self.note()

    def note(self, scratch: int = 0) -> None:
        """Write down what is there.

        Args:
            scratch: Bytes that the last operation used inside.
        """
        if not self.stretches:
            self.stretches.append(Recorded(self.phase, self.unit))
        now = self.bytes
        moments = self.stretches[-1].moments
        moments.append((now[ACTIVATION] + scratch, now[COPY], now[GRADIENT]))
        if scratch:
            moments.append((now[ACTIVATION], now[COPY], now[GRADIENT]))

    # -- operations --------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions about a tensor, not operations
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and _is_fake(args[0]):
            # Optimizers that go from parameter to parameter read their step count; what it is doesn't matter here.
            return 0.5 if args[0].is_floating_point() else 1
        result = func(*args, **kwargs)
        outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        fresh = 0
        for output in outputs:
            storage = output.untyped_storage()
            if id(storage) not in self._kinds:
                self._add(storage, self._kind_of_output(func, inputs))
                fresh += 1
        scratch = _SCRATCH.get(func.overloadpacket)
        self.note(0 if scratch is None else scratch(*args))
        self._count(func, args, kwargs, inputs, outputs, result, fresh=fresh)
        return result

    def _kind_of_output(self, func: Any, inputs: list[torch.Tensor]) -> str:
        if func is torch.ops.aten._to_copy.default and id(inputs[0].untyped_storage()) in self._parameters:
            return COPY
        return ACTIVATION

    def _count(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        result: Any,
        *,
        fresh: int,
    ) -> None:
        stretch = self.stretches[-1]
        formula = flop_registry.get(func.overloadpacket) or _MORE_FORMULAS.get(func.overloadpacket)
        if formula is not None:
            stretch.flops += formula(*args, **kwargs, out_val=result)
            stretch.operations += 1
        elif fresh or func._schema.is_mutable:  # views cost nothing
            stretch.moved += sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
            stretch.operations += 1


def _is_fake(tensor: Any) -> bool:
    return isinstance(tensor, torch._subclasses.FakeTensor)


def _attention(query: Any, key: Any, value: Any, *rest: Any, out_val: Any = None, **kwargs: Any) -> int:
    return int(sdpa_flop(query.shape, key.shape, value.shape))


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *rest: Any, out_val: Any = None, **kwargs: Any
) -> int:
    return int(2.5 * sdpa_flop(query.shape, key.shape, value.shape))  # five products instead of two


#: Bytes that kernels take inside, which no dispatched operation shows. Convolutions bring their weights into other layouts.
_SCRATCH: dict[Any, Callable[..., int]] = {
    torch.ops.aten.convolution_backward: lambda grad, inputs, weight, *rest: 4 * weight.numel() * weight.element_size(),
}

#: The CPU's attention, which torch has no formula for.
_MORE_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
