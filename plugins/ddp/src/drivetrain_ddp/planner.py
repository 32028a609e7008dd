"""Plans with a replica on each device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from drivetrain.interfaces import ShardingPlan, ShardingPlanner, TrainingRequest
from drivetrain.memory import Hardware, Layout, ModelProfile, predict

__all__ = ["DDPPlanner"]


class DDPPlanner(ShardingPlanner):
    """Replicas. Gradients are copied into buckets, which are there all the time, or live in them.

    Example:
        >>> from drivetrain.memory import known_hardware, profile_of_counts
        >>> from drivetrain.specs import ShardingPlannerSpec
        >>> planner = DDPPlanner(ShardingPlannerSpec(name="ddp", backend="ddp"))
        >>> profile = profile_of_counts(parameters=1e8, layers=4, hidden=512, sequence=128)
        >>> plans = list(planner.propose(profile, known_hardware("t4", devices=2), TrainingRequest(batch_size=8)))
        >>> [(plan.strategy, plan.accumulation) for plan in plans]
        [('', 4), ('gradients in buckets', 4)]
        >>> plans[0].memory_bytes["communication"] == profile.trainable_bytes
        True
    """

    def propose(self, profile: ModelProfile, hardware: Hardware, request: TrainingRequest) -> Iterable[ShardingPlan]:
        """Each micro-batch and recomputation, with both kinds of buckets."""
        if hardware.devices < 2:
            return
        for layout in self._layouts(hardware):
            for recompute in request.recompute:
                for micro_batch in request.micro_batches:
                    if request.divides(micro_batch, hardware.devices):
                        yield predict(
                            layout,
                            profile,
                            hardware,
                            request,
                            micro_batch=micro_batch,
                            backend=self.spec.backend,
                            recompute=recompute,
                        )

    def _layouts(self, hardware: Hardware) -> Iterator[Layout]:
        yield Layout(replicas=hardware.devices, bucket_copies=1.0, parameter_operations=1)
        yield Layout(
            strategy="gradients in buckets",
            options={"gradient_as_bucket_view": True},
            replicas=hardware.devices,
            bucket_copies=1.0,
            gradients_in_buckets=True,
            parameter_operations=1,
        )
