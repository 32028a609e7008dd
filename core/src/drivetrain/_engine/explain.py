"""What ``accelerator.explain()`` says."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drivetrain._engine.plan import PreparePlan, Row
from drivetrain._engine.report import plan_text
from drivetrain.interfaces import Backend

__all__ = ["explain"]


def explain(plan: PreparePlan, backend: Backend, models: Sequence[torch.nn.Module]) -> str:
    """The plan, what the backend adds, and what each prepared model computes in."""
    rows = [Row("backend", name, value, "") for name, value in backend.describe().items()]
    for model in models:
        inner = backend.unwrap(model)
        for pattern, dtype in backend.precision.describe(inner).items():
            rows.append(Row("precision", f"{type(inner).__name__} {pattern}", dtype, ""))
    return plan_text(plan, extra=rows)
