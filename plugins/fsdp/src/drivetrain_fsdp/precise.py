"""Modules whose parameters must not be gathered in a lower precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from drivetrain.big_model import inner_first
from drivetrain.errors import UnsupportedError
from drivetrain.interfaces import Precision
from drivetrain.interfaces.norms import keeps_statistics
from drivetrain_fsdp.wrapping import can_be_unit, shares_outside

__all__ = ["Precise"]


class Precise:
    """The modules of a model whose parameters stay as they are where all others are gathered in a lower precision.

    Those are the ones that `PrecisionKwargs(keep_in_fp32=...)` names, and norms with running statistics, which are float32 and want parameters of their
    own dtype. Each becomes a unit, as one unit is gathered in one dtype.

    Args:
        model: The model.
        policy: How all others are gathered.
        precision: Knows which modules are kept.
        ignored: Parameters that aren't sharded.

    Raises:
        UnsupportedError: If one shares a parameter with a module that is gathered in a lower precision.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        >>> from drivetrain.specs import PrecisionSpec
        >>> precision = Precision(PrecisionSpec(name="fp32"), device_type="cpu")
        >>> precise = Precise(model, MixedPrecisionPolicy(param_dtype=torch.bfloat16), precision)
        >>> precise.with_units([]) == [model[1]], precise.policy_of(model).param_dtype, precise.policy_of(model[1]).param_dtype
        (True, torch.bfloat16, None)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        policy: MixedPrecisionPolicy,
        precision: Precision,
        ignored: set[torch.nn.Parameter] | None = None,
    ) -> None:
        self._model, self._policy = model, policy
        self._tops: list[torch.nn.Module] = []
        kept = precision.kept(model)
        if policy.param_dtype is not None or kept:
            with_statistics = {n: m for n, m in model.named_modules() if keeps_statistics(m)}
            for name, module in {**kept, **with_statistics}.items():
                if module is model or not can_be_unit(module, ignored or set()):
                    continue  # the model itself is a unit in any case
                if shares_outside(model, module):
                    raise UnsupportedError(
                        f"{name} of {type(model).__name__} is to compute in float32 and shares a parameter with another module, with which it is gathered "
                        f"in {policy.param_dtype}. Give each a parameter of its own, or don't keep it in float32."
                    )
                self._tops.append(module)
        self._inside = {id(m) for top in self._tops for m in top.modules()}
        if keeps_statistics(model):
            self._inside.add(id(model))

    def with_units(self, units: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
        """These units, and the modules that have to be units beside them; inner ones come first."""
        wanted = {id(m) for m in [*units, *self._tops]}
        return [m for m in inner_first(self._model) if id(m) in wanted]

    def policy_of(self, unit: torch.nn.Module) -> MixedPrecisionPolicy:
        """How a unit is gathered and reduced."""
        if id(unit) not in self._inside:
            return self._policy
        return MixedPrecisionPolicy(reduce_dtype=self._policy.reduce_dtype, cast_forward_inputs=False)
