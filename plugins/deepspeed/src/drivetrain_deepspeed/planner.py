"""Plans of ZeRO's stages, and the configuration that plain DeepSpeed takes for each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from drivetrain.interfaces import ShardingPlan, ShardingPlanner, TrainingRequest
from drivetrain.memory import Hardware, Layout, ModelProfile, predict, step_seconds
from drivetrain_deepspeed.sizes import Sizes
from drivetrain_deepspeed.zero_memory import ZeroMemory
from drivetrain_deepspeed.zero_time import zero_traffic

__all__ = ["DeepSpeedPlanner"]

_PRECISIONS = ("fp32", "bf16", "fp16")
_DIVIDES = (
    frozenset[str](),
    frozenset({"optimizer"}),
    frozenset({"optimizer", "gradients"}),
    frozenset({"optimizer", "gradients", "parameters"}),
)
#: DeepSpeed's own defaults, which are larger than most models.
_BUCKET, _PREFETCH, _PERSISTENT, _LIVE = 500_000_000, 50_000_000, 100_000, 1_000_000_000


class DeepSpeedPlanner(ShardingPlanner):
    """Stages 0 to 3, with and without offload; at stage 3 with parameters that stay gathered from forward to backward, or don't.

    Example:
        >>> from drivetrain.memory import known_hardware, profile_of_counts
        >>> from drivetrain.specs import ShardingPlannerSpec
        >>> planner = DeepSpeedPlanner(ShardingPlannerSpec(name="deepspeed", backend="deepspeed"))
        >>> profile = profile_of_counts(parameters=7e9, layers=32, hidden=4096, precision="bf16")
        >>> plans = planner.propose(profile, known_hardware("h100-sxm", devices=8), TrainingRequest(batch_size=8, offload=False))
        >>> {plan.strategy: round(plan.memory_bytes["optimizer"] / 1e9) for plan in plans if "," not in plan.strategy}
        {'ZeRO 0': 84, 'ZeRO 1': 11, 'ZeRO 2': 11, 'ZeRO 3': 11}
    """

    def propose(self, profile: ModelProfile, hardware: Hardware, request: TrainingRequest) -> Iterable[ShardingPlan]:
        """Each stage, place of state, micro-batch and recomputation; nothing in a precision that DeepSpeed doesn't have."""
        if profile.precision not in _PRECISIONS or profile.trainable_bytes == 0:
            return
        for variant in _variants(profile, hardware, offload=request.offload):
            for recompute in request.recompute:
                for micro_batch in request.micro_batches:
                    if request.divides(micro_batch, hardware.devices):
                        yield self._plan(profile, hardware, request, variant, micro_batch, recompute)

    def document(self, plan: ShardingPlan) -> str:
        """The configuration as JSON, which DeepSpeed itself takes, and ``DeepSpeedPlugin(hf_ds_config=...)``."""
        return json.dumps(plan.options["hf_ds_config"], indent=2) + "\n"

    def _plan(
        self,
        profile: ModelProfile,
        hardware: Hardware,
        request: TrainingRequest,
        variant: _Variant,
        micro_batch: int,
        recompute: str,
    ) -> ShardingPlan:
        devices = hardware.devices
        kind, stage, offload, sizes = variant
        layout = Layout(
            strategy=f"ZeRO {stage}, {kind}" if kind else f"ZeRO {stage}",
            shards=devices if stage else 1,
            replicas=1 if stage else devices,
            divides=_DIVIDES[stage],
            offload=offload,
            keeps_gathered=sizes.live >= profile.parameter_count,
            gather_itemsize=profile.compute_itemsize,
            reduce_itemsize=profile.compute_itemsize,
            sync_each_batch=stage > 1,
        )
        plan = predict(
            layout,
            profile,
            hardware,
            request,
            micro_batch=micro_batch,
            backend=self.spec.backend,
            recompute=recompute,
        )
        memory = ZeroMemory(profile, hardware, stage=stage, offload=offload, sizes=sizes)
        peak_at, at_peak = memory.peak(
            profile.timelines[recompute], samples=micro_batch, accumulation=plan.accumulation
        )
        traffic = zero_traffic(
            profile,
            hardware,
            stage=stage,
            offload=offload,
            sizes=sizes,
            accumulation=plan.accumulation,
            recomputes=profile.timelines[recompute].recompute is not None,
        )
        seconds = step_seconds(
            profile.timelines[recompute],
            traffic,
            profile,
            hardware,
            micro_batch=micro_batch,
            accumulation=plan.accumulation,
        )
        document = _document(profile, stage, offload, sizes, micro_batch, plan.accumulation, devices)
        return replace(
            plan,
            sync_each_batch=False,  # nothing that anybody sets
            options={"hf_ds_config": document},
            memory_bytes=at_peak,
            peak_at=peak_at,
            host_bytes=memory.host_bytes,
            communication_bytes=round(traffic.sent),
            step_seconds=seconds,
        )


class _Variant(NamedTuple):
    """What is special, the stage, what lives in the CPU's memory, and sizes of buckets."""

    kind: str
    stage: int
    offload: tuple[str, ...]
    sizes: Sizes


def _variants(profile: ModelProfile, hardware: Hardware, *, offload: bool) -> Iterator[_Variant]:
    """All that is proposed, whatever the micro-batch."""
    count = profile.parameter_count
    largest = max(p.numel for p in profile.parameters)
    units = [0] * len(profile.units)
    for parameter in profile.parameters:
        units[parameter.unit] += parameter.numel
    # Large enough that each parameter fits, small enough that they take little room.
    bucket = min(_BUCKET, max(largest, count // 50))
    low = Sizes(
        bucket=bucket,
        prefetch=min(_PREFETCH, max(units)),
        persistent=min(_PERSISTENT, count // 100),
        live=min(_LIVE, units[0] + 2 * max(units)),
    )
    places: list[tuple[str, ...]] = [()]
    if offload and hardware.device != "cpu":
        places.append(("optimizer", "gradients"))
    for stage in (0, 1, 2, 3) if hardware.devices > 1 else (1, 2, 3):  # stage 0 of one process is the backend "single"
        for place in places if stage else [()]:
            yield _Variant("", stage, place, low)
    large = replace(low, bucket=min(_BUCKET, count))
    if low.bucket < large.bucket:  # fewer reductions, where there is room for the bucket
        yield _Variant("large buckets", 1, (), large)
        yield _Variant("large buckets", 2, (), large)
    if low.live < count <= _LIVE:
        yield _Variant("parameters kept", 3, (), replace(large, live=_LIVE))
    if len(places) > 1:
        yield _Variant("", 3, ("parameters", "optimizer", "gradients"), low)


def _document(
    profile: ModelProfile,
    stage: int,
    offload: tuple[str, ...],
    sizes: Sizes,
    micro_batch: int,
    accumulation: int,
    devices: int,
) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero["reduce_bucket_size"] = sizes.bucket
        if stage < 3:
            zero["allgather_bucket_size"] = sizes.bucket
            zero["overlap_comm"] = False
        else:
            zero["stage3_prefetch_bucket_size"] = sizes.prefetch
            zero["stage3_param_persistence_threshold"] = sizes.persistent
            zero["stage3_max_live_parameters"] = sizes.live
            zero["stage3_max_reuse_distance"] = sizes.live
    if "optimizer" in offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if "parameters" in offload:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_batch_size": micro_batch * accumulation * devices,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        **({profile.precision: {"enabled": True}} if profile.precision != "fp32" else {}),
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
