"""What one process sends and does in a step under ZeRO, as DeepSpeed 0.19 implements it. Imports no torch.

Stages 1 and 2 sum up gradients whole, bucket by bucket, of which each process keeps its part, and gather the weights once per step; stage 1 reduces in a
window's last micro-batch, stage 2 in each. Stage 3 gathers parameters as it prefetches them, scatters sums of buckets in each micro-batch, and gathers each
small parameter, of which every process keeps a copy, by itself after the step. The optimizer steps on one flat tensor from stage 1 on.

Collectives and their bytes were counted. What DeepSpeed does around them in Python was measured on CPU ranks, with models of four and forty modules with one
parameter of two elements each, and is said as multiples of a small operation.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from drivetrain.memory import Hardware, ModelProfile, Traffic
from drivetrain_deepspeed.sizes import Sizes

__all__ = ["zero_traffic"]

#: Elements of a bucket of stage 0.
_WHOLE_BUCKET = 500_000_000
#: For each bucket that is reduced; for each parameter in one.
_BUCKET_OPERATIONS, _REDUCED_OPERATIONS = 650, 16
#: At stage 3: for each module with parameters that is run forward and backward; for each parameter that is gathered by itself.
_MODULE_OPERATIONS, _GATHERED_OPERATIONS = 520, 110


def zero_traffic(
    profile: ModelProfile,
    hardware: Hardware,
    *,
    stage: int,
    offload: tuple[str, ...],
    sizes: Sizes,
    accumulation: int,
    recomputes: bool,
) -> Traffic:
    """What a process sends and does in an optimizer step.

    Args:
        profile: The model, undivided.
        hardware: The devices.
        stage: ZeRO's stage.
        offload: State in the CPU's memory: "parameters", "optimizer", "gradients".
        sizes: Of buckets.
        accumulation: Micro-batches per step.
        recomputes: Whether forward runs again in backward.

    Example:
        >>> from drivetrain.memory import known_hardware, profile_of_counts
        >>> profile = profile_of_counts(parameters=1e8, layers=4, hidden=512, sequence=128)
        >>> settings = {"offload": (), "sizes": Sizes(bucket=10**9), "accumulation": 2, "recomputes": False}
        >>> sent = [zero_traffic(profile, known_hardware("t4", devices=4), stage=stage, **settings).sent for stage in range(4)]
        >>> sent[0] < sent[1] < sent[2]
        True
    """
    devices, width = hardware.devices, profile.compute_itemsize
    trained = [p for p in profile.parameters if p.trainable]
    elements = [p.numel for p in trained]
    whole = sum(elements) * width
    optimizer = profile.optimizer
    traffic = Traffic(shards=devices)
    state = 2 * (2 * 4 * sum(elements) + optimizer.state)  # read and written once
    if not stage:
        traffic.sum_up(whole, ceil(sum(elements) / _WHOLE_BUCKET), times=1)
        traffic.operations = len(trained)
        at_once = hardware.steps_at_once
        traffic.stepped = state if at_once else max(state, 3 * 4 * optimizer.operations * sum(elements))
        traffic.step_operations = optimizer.operations * (1 if at_once else len(trained))
        return traffic
    reductions = 1 if stage == 1 else accumulation
    buckets = _buckets(reversed(elements), sizes.bucket)
    traffic.operations = reductions * (buckets * _BUCKET_OPERATIONS + len(trained) * _REDUCED_OPERATIONS)
    traffic.copied = reductions * 4 * whole  # into buckets and out of them
    if stage < 3:
        traffic.sum_up(whole, buckets, times=reductions)
        traffic.gather(whole, 1, times=1)
    else:
        traffic.scatter(whole, buckets, times=reductions)
        _gathers(traffic, profile, sizes, accumulation=accumulation, recomputes=recomputes)
    # fp32 gradients of the part are made, and weights in the dtype of computation.
    traffic.copied += (2 * 4 + 2 * width) * sum(elements) / devices
    on_host = "optimizer" in offload
    at_once = hardware.steps_at_once or on_host
    traffic.stepped = (state if at_once else max(state, 3 * 4 * optimizer.operations * sum(elements))) / devices
    traffic.step_operations = 0 if on_host else optimizer.operations
    traffic.steps_on_host = on_host
    if "gradients" in offload:
        traffic.host += reductions * whole / devices + whole / devices  # and weights back
    if "parameters" in offload:
        traffic.host += 2 * accumulation * sum(p.numel for p in profile.parameters) * width / devices
    return traffic


def _gathers(traffic: Traffic, profile: ModelProfile, sizes: Sizes, *, accumulation: int, recomputes: bool) -> None:
    """Stage 3: large parameters before they are used, small ones after the step."""
    width = profile.compute_itemsize
    divided = [p.numel for p in profile.parameters if p.numel >= sizes.persistent]
    kept = sizes.live >= sum(divided)
    passes = 1 if kept else 2
    number = _buckets(divided, max(sizes.prefetch, 1))
    traffic.gather(width * sum(divided), number, times=passes * accumulation)
    traffic.copied += accumulation * passes * 2 * width * sum(divided)
    modules = {p.name.rpartition(".")[0] for p in profile.parameters}
    runs = 1.5 if recomputes else 1
    traffic.operations += accumulation * runs * len(modules) * _MODULE_OPERATIONS
    small = [p.numel for p in profile.parameters if p.trainable and p.numel < sizes.persistent]
    traffic.gather(width * sum(small), len(small), times=1)
    traffic.operations += len(small) * _GATHERED_OPERATIONS


def _buckets(elements: Iterable[int], limit: int) -> int:
    """How many buckets take so many elements each; a larger one is alone."""
    number = held = 0
    for size in elements:
        if held and held + size > limit:
            number, held = number + 1, 0
        held += size
    return number + bool(held)
