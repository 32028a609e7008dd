"""Plans for sharding a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain.specs import ShardingPlannerSpec

__all__ = ["ShardingPlan", "ShardingPlanner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """One candidate.

    Args:
        backend: Backend that would run it.
        options: Settings of that backend.
        memory_bytes: Predicted peak per device, in bytes, by category ("parameters", "gradients", "optimizer", "activations", "buffers").
        communication_bytes: Bytes that one device sends and receives per optimizer step.
        step_seconds: Predicted time of one optimizer step, or None.
        notes: Clauses for people: why it is offered.

    Example:
        >>> ShardingPlan(backend="single", memory_bytes={"parameters": 4, "gradients": 4}).peak_bytes
        8
    """

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    communication_bytes: int = 0
    step_seconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Sum over the categories."""
        return sum(self.memory_bytes.values())


class ShardingPlanner:
    """Proposes plans for one backend; core picks the cheapest that fits.

    Args:
        spec: The descriptor.
    """

    def __init__(self, spec: ShardingPlannerSpec) -> None:
        self.spec = spec

    def propose(self, profile: Mapping[str, Any], hardware: Mapping[str, Any]) -> Iterable[ShardingPlan]:
        """Candidate plans.

        Args:
            profile: Of the model: parameter count and bytes, activation bytes per sample, optimizer state per parameter.
            hardware: World size, device memory in bytes, link speed in bytes per second.
        """
        raise NotImplementedError
