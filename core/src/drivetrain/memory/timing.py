"""How long a step takes, well enough to order plans. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from drivetrain.memory.hardware import Hardware
from drivetrain.memory.profile import ModelProfile, Timeline

__all__ = ["Traffic", "step_seconds"]

#: Of what is hidden behind something longer, this share still shows: the first gather, the last reduction and the first operations have nothing to hide behind.
_SHOWS = 0.1


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What one device sends in an optimizer step, and moves to and from the CPU's memory.

    Rings are assumed: gathering or scattering S bytes over n devices sends ``S * (n - 1) / n`` from each, an all-reduce twice that (Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).

    Args:
        shards: Devices over which state is divided: neighbours.
        replicas: How often it exists.
        gathered: Bytes sent to the other shards so that state becomes whole.
        scattered: Bytes sent to the other shards so that they get their part of sums.
        summed: Bytes sent to the other shards so that each gets the whole of sums.
        among_replicas: Bytes sent to the other replicas.
        collectives: Number of collectives.
        operations: Operations that the backend runs by itself, around those of the model and its optimizer.
        copied: Bytes that it reads and writes in the device's memory: into flat buffers and out of them.
        host: Bytes that move between the device and the CPU's memory.
        stepped: Bytes of parameters, gradients and state that the optimizer reads and writes.
        step_operations: Operations that it starts.
        steps_on_host: The optimizer steps in the CPU's memory.

    Example:
        >>> traffic = Traffic(shards=4)
        >>> traffic.gather(100, 2, times=3)
        >>> traffic.sent, traffic.collectives
        (225.0, 6)
    """

    shards: int = 1
    replicas: int = 1
    gathered: float = 0.0
    scattered: float = 0.0
    summed: float = 0.0
    among_replicas: float = 0.0
    collectives: int = 0
    operations: float = 0.0
    copied: float = 0.0
    host: float = 0.0
    stepped: float = 0.0
    step_operations: float = 0.0
    steps_on_host: bool = False

    @property
    def sent(self) -> float:
        """Bytes that one device sends."""
        return self.gathered + self.scattered + self.summed + self.among_replicas

    def gather(self, size: float, number: int, *, times: int) -> None:
        """Shards become whole: ``size`` bytes in so many collectives."""
        if self.shards > 1:
            self.gathered += size * (self.shards - 1) / self.shards * times
            self.collectives += number * times

    def scatter(self, size: float, number: int, *, times: int) -> None:
        """Each device gets its part of a sum of ``size`` bytes, in so many collectives."""
        if self.shards > 1:
            self.scattered += size * (self.shards - 1) / self.shards * times
            self.collectives += number * times

    def sum_up(self, size: float, number: int, *, times: int) -> None:
        """Each shard gets the whole of a sum of ``size`` bytes, in so many collectives."""
        if self.shards > 1:
            self.summed += 2 * size * (self.shards - 1) / self.shards * times
            self.collectives += number * times

    def reduce(self, size: float, number: int, *, times: int) -> None:
        """Replicas agree on ``size`` bytes."""
        if self.replicas > 1:
            self.among_replicas += 2 * size * (self.replicas - 1) / self.replicas * times
            self.collectives += number * times


def step_seconds(
    timeline: Timeline,
    traffic: Traffic,
    profile: ModelProfile,
    hardware: Hardware,
    *,
    micro_batch: int,
    accumulation: int,
) -> float:
    """Predicted time of one optimizer step.

    Matrix products take their operations over the device's arithmetic; everything else its bytes over the memory's bandwidth, or the time that starting an
    operation takes, whichever is longer, and a tenth of the other; the backend's own operations and copies come on top. Communication hides behind computing where devices can do both at once.

    Args:
        timeline: Forward and backward of a micro-batch.
        traffic: What is sent and moved.
        profile: The model.
        hardware: The devices.
        micro_batch: Samples per micro-batch and device.
        accumulation: Micro-batches per step.

    Example:
        >>> from drivetrain.memory import known_hardware, profile_of_counts
        >>> profile = profile_of_counts(parameters=1e9, layers=16, hidden=2048, sequence=1024, precision="bf16")
        >>> timeline = profile.timelines["none"]
        >>> devices = known_hardware("a100-80gb")
        >>> step_seconds(timeline, Traffic(), profile, devices, micro_batch=8, accumulation=1) > 0.1
        True
    """
    flops, moved = timeline.work(micro_batch)
    products, others = flops / hardware.flops_of(profile.compute_itemsize), moved / hardware.memory_bandwidth
    started = accumulation * timeline.operations * hardware.launch + traffic.operations * hardware.launch
    working = accumulation * (products + others) + traffic.copied / hardware.memory_bandwidth
    computing = _beside(working, started) if hardware.overlaps else working + started
    near = hardware.bandwidth(traffic.shards)
    sending = (
        traffic.gathered * hardware.gather_factor / near
        + traffic.scattered * hardware.scatter_factor / near
        + traffic.summed / near
        + traffic.among_replicas / hardware.bandwidth(traffic.replicas, apart=traffic.shards)
        + traffic.collectives * hardware.latency
    )
    moving = traffic.host / hardware.host_bandwidth
    if hardware.overlaps:
        together = _beside(computing, max(sending, moving))
    else:
        together = computing + sending + moving
    speed = hardware.host_bandwidth if traffic.steps_on_host else hardware.memory_bandwidth
    times = traffic.stepped / speed, traffic.step_operations * hardware.launch
    return together + (max(times) if hardware.overlaps else sum(times))


def _beside(one: float, two: float) -> float:
    """Seconds of two things that hide behind each other."""
    return max(one, two) + _SHOWS * min(one, two)
