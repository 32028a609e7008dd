"""Plans that shard with ``fully_shard``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from drivetrain.interfaces import ShardingPlan, ShardingPlanner, TrainingRequest
from drivetrain.memory import Hardware, Layout, ModelProfile, predict

__all__ = ["FSDPPlanner"]

_ALL = frozenset({"parameters", "gradients", "optimizer"})

#: What ``fully_shard`` runs around a unit, and for each of its parameters, as multiples of a small operation: hooks, views and collectives' own Python.
#: Measured on units of one to sixteen parameters of two elements each, on CPU ranks (torch 2.13).
_UNIT_OPERATIONS, _PARAMETER_OPERATIONS = 80, 7
#: What an optimizer's operation on a DTensor takes: AdamW, SGD and Adagrad on 40 parameters of at most 64 elements took 6.6 to 10 times as long as on tensors.
_STEP_OPERATIONS = 7


class FSDPPlanner(ShardingPlanner):
    """All strategies of `FullyShardedDataParallelPlugin`, with and without the CPU's memory.

    Example:
        >>> from drivetrain.memory import known_hardware, profile_of_counts
        >>> from drivetrain.specs import ShardingPlannerSpec
        >>> planner = FSDPPlanner(ShardingPlannerSpec(name="fsdp", backend="fsdp"))
        >>> profile = profile_of_counts(parameters=7e9, layers=32, hidden=4096, precision="bf16")
        >>> plans = planner.propose(profile, known_hardware("h100-sxm", devices=8), TrainingRequest(batch_size=8, offload=False))
        >>> {plan.strategy: round(plan.memory_bytes["optimizer"] / 1e9) for plan in plans}
        {'FULL_SHARD': 7, 'SHARD_GRAD_OP': 7, 'NO_SHARD': 56}
    """

    def propose(self, profile: ModelProfile, hardware: Hardware, request: TrainingRequest) -> Iterable[ShardingPlan]:
        """Each strategy, micro-batch and recomputation; with accumulation also with gradients that are reduced at each micro-batch."""
        if hardware.devices < 2 or _mixes_dtypes(profile):
            return
        for layout in _layouts(profile, hardware, offload=request.offload):
            for recompute in request.recompute:
                for micro_batch in request.micro_batches:
                    if request.divides(micro_batch, hardware.devices):
                        if layout.sync_each_batch and request.accumulation(micro_batch, hardware.devices) == 1:
                            continue
                        yield predict(
                            layout,
                            profile,
                            hardware,
                            request,
                            micro_batch=micro_batch,
                            backend=self.spec.backend,
                            recompute=recompute,
                        )


def _layouts(profile: ModelProfile, hardware: Hardware, *, offload: bool) -> Iterator[Layout]:
    """What each strategy does to a model's state."""
    devices, near = hardware.devices, hardware.devices_per_machine
    shapes = {
        "FULL_SHARD": (devices, 1, False),
        "SHARD_GRAD_OP": (devices, 1, True),
        "HYBRID_SHARD": (near, devices // near, False),
        "HYBRID_SHARD_ZERO2": (near, devices // near, True),
        "NO_SHARD": (1, devices, True),
    }
    if near >= devices or devices % near:
        del shapes["HYBRID_SHARD"], shapes["HYBRID_SHARD_ZERO2"]
    # In a lower precision parameters are gathered in its dtype, and gradients reduced in float32.
    low = profile.compute_itemsize < 4
    for strategy, (shards, replicas, keeps) in shapes.items():
        for offloaded in (False, True) if offload and hardware.device != "cpu" and shards > 1 else (False,):
            for each_batch in (False, True):
                yield Layout(
                    strategy=strategy,
                    options={"sharding_strategy": strategy, **({"cpu_offload": True} if offloaded else {})},
                    shards=shards,
                    replicas=replicas,
                    divides=_ALL,
                    offload=("parameters", "gradients", "optimizer") if offloaded else (),
                    keeps_gathered=keeps,
                    gather_itemsize=profile.compute_itemsize if low else None,
                    reduce_itemsize=4 if low else None,
                    gather_copies=1.0 if shards > 1 else 0.0,
                    sync_each_batch=each_batch,
                    unit_operations=_UNIT_OPERATIONS,
                    parameter_operations=_PARAMETER_OPERATIONS,
                    step_operations=_STEP_OPERATIONS,
                )


def _mixes_dtypes(profile: ModelProfile) -> bool:
    """Whether a unit trains parameters of two dtypes, which `fully_shard` refuses."""
    sizes = {(p.unit, p.itemsize) for p in profile.parameters if p.trainable}
    return len(sizes) > len({unit for unit, _ in sizes})
