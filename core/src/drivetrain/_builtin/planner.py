"""Plans for one device."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.interfaces import ShardingPlan, ShardingPlanner, TrainingRequest
from drivetrain.memory import Hardware, Layout, ModelProfile, predict

__all__ = ["SinglePlanner"]


class SinglePlanner(ShardingPlanner):
    """Everything on one device.

    Example:
        >>> from drivetrain.memory import known_hardware, profile_of_counts
        >>> from drivetrain.specs import ShardingPlannerSpec
        >>> planner = SinglePlanner(ShardingPlannerSpec(name="single", backend="single"))
        >>> profile = profile_of_counts(parameters=1e8, layers=4, hidden=512, sequence=128)
        >>> [plan.micro_batch for plan in planner.propose(profile, known_hardware("t4"), TrainingRequest(batch_size=8, micro_batches=(1, 8)))]
        [1, 8]
    """

    def propose(self, profile: ModelProfile, hardware: Hardware, request: TrainingRequest) -> Iterable[ShardingPlan]:
        """Each micro-batch and recomputation, where there is one device."""
        if hardware.devices > 1:
            return
        for recompute in request.recompute:
            for micro_batch in request.micro_batches:
                if request.divides(micro_batch, 1):
                    yield predict(
                        Layout(),
                        profile,
                        hardware,
                        request,
                        micro_batch=micro_batch,
                        backend=self.spec.backend,
                        recompute=recompute,
                    )
