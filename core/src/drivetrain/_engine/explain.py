"""What ``accelerator.explain()`` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from drivetrain._engine.plan import PreparePlan, Row
from drivetrain._engine.report import plan_text
from drivetrain.interfaces import Backend

if TYPE_CHECKING:
    from drivetrain.memory import PlanReport

__all__ = ["explain"]


def explain(
    plan: PreparePlan, backend: Backend, models: Sequence[torch.nn.Module], planning: PlanReport | None = None
) -> str:
    """The plan, what the backend adds, what each prepared model computes in, and what the planner weighed."""
    rows = [Row("backend", name, value, "") for name, value in backend.describe().items()]
    for model in models:
        inner = backend.unwrap(model)
        for pattern, dtype in backend.precision.describe(inner).items():
            rows.append(Row("precision", f"{type(inner).__name__} {pattern}", dtype, ""))
    if planning is not None:
        from drivetrain.memory.planning import format_bytes, format_seconds

        for one in planning.shown():
            needs = f"{format_bytes(one.peak_bytes)}, {format_seconds(one.step_seconds)} per step"
            rows.append(Row("planning", one.label, needs, "fits" if planning.fits(one) else "too large"))
    return plan_text(plan, extra=rows)
