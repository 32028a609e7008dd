"""From how a strategy lays tensors out over devices to memory, communication and time. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain.interfaces.sharding_planner import ShardingPlan, TrainingRequest
from drivetrain.memory.hardware import Hardware
from drivetrain.memory.profile import ModelProfile, Moment, ParameterProfile, Timeline
from drivetrain.memory.timing import Traffic, step_seconds

__all__ = ["Layout", "predict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a strategy divides a model's state over the devices, and what it holds on the way. The default is one device, or a replica on each.

    Args:
        strategy: Its name, for people.
        options: Settings of the backend that make it so.
        shards: Devices over which state is divided.
        replicas: How often all state exists; ``shards * replicas`` devices read different samples.
        divides: Which state is divided over ``shards``: "parameters", "gradients", "optimizer". Parameters that are divided are gathered unit by unit.
        offload: Which state lives in the CPU's memory.
        keeps_gathered: Gathered parameters stay from forward to backward.
        gather_itemsize: Bytes per element of gathered parameters; None: as they are trained. In another dtype than the trained one they need no further
            copies in the dtype of computation.
        reduce_itemsize: Bytes per element of gradients on their way; None: as they are trained.
        ahead_forward, ahead_backward: Units that are gathered while another one computes.
        gather_copies: Flat buffers, as large as the unit, that exist beside a unit's gathered parameters.
        reduce_copies: The same beside gradients that are reduced.
        bucket_copies: Buffers as large as all gradients, which exist all the time.
        gradients_in_buckets: Gradients live in those buffers, not beside them.
        buffer_bytes: Bytes of other buffers, which exist all the time.
        sync_each_batch: Gradients are reduced at each micro-batch. Otherwise whole gradients stay on each device until the last.
        unit_operations: Operations that the backend runs by itself whenever a unit is gathered, or its gradients are reduced.
        parameter_operations: The same for each parameter.
        step_operations: The same for each of the optimizer's operations on a parameter, that operation included.

    Example:
        >>> Layout(strategy="ZeRO 1", shards=8, divides=frozenset({"optimizer"})).devices
        8
    """

    strategy: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    shards: int = 1
    replicas: int = 1
    divides: frozenset[str] = frozenset()
    offload: tuple[str, ...] = ()
    keeps_gathered: bool = False
    gather_itemsize: int | None = None
    reduce_itemsize: int | None = None
    ahead_forward: int = 0
    ahead_backward: int = 1
    gather_copies: float = 1.0
    reduce_copies: float = 1.0
    bucket_copies: float = 0.0
    gradients_in_buckets: bool = False
    buffer_bytes: int = 0
    sync_each_batch: bool = False
    unit_operations: int = 0
    parameter_operations: int = 0
    step_operations: int = 1

    @property
    def devices(self) -> int:
        """Devices that read different samples."""
        return self.shards * self.replicas


def predict(
    layout: Layout,
    profile: ModelProfile,
    hardware: Hardware,
    request: TrainingRequest,
    *,
    micro_batch: int,
    backend: str,
    recompute: str = "none",
    notes: tuple[str, ...] = (),
) -> ShardingPlan:
    """A plan with its predicted memory, communication and time.

    The step is walked through stretch by stretch: what its trace holds at each one's fullest moment, the parameters that are gathered then, and the gradients
    that are whole or divided by then. The fullest moment of all is the peak.

    Args:
        layout: How state is divided.
        profile: The model on one device, undivided.
        hardware: The devices.
        request: What is trained.
        micro_batch: Samples per micro-batch and device.
        backend: Backend that would run it.
        recompute: A name of ``profile.timelines``.
        notes: Clauses for people.

    Example:
        >>> from drivetrain.memory import known_hardware, profile_of_counts
        >>> profile = profile_of_counts(parameters=1e9, layers=16, hidden=2048, sequence=1024, precision="bf16")
        >>> devices, request = known_hardware("a100-80gb", devices=8), TrainingRequest(batch_size=64)
        >>> everything = frozenset({"parameters", "gradients", "optimizer"})
        >>> whole = predict(Layout(replicas=8), profile, devices, request, micro_batch=1, backend="toy")
        >>> shards = predict(Layout(shards=8, divides=everything), profile, devices, request, micro_batch=1, backend="toy")
        >>> round(whole.memory_bytes["optimizer"] / shards.memory_bytes["optimizer"])
        8
    """
    accumulation = request.accumulation(micro_batch, layout.devices)
    timeline = profile.timelines[recompute]
    memory = _Memory(layout, profile, hardware, accumulates=accumulation > 1)
    peak_at, at_peak = max(memory.moments(timeline, micro_batch), key=lambda m: sum(m[1].values()))
    traffic = memory.traffic(accumulation)
    return ShardingPlan(
        backend=backend,
        strategy=layout.strategy,
        options=layout.options,
        micro_batch=micro_batch,
        accumulation=accumulation,
        recompute=recompute,
        offloaded=layout.offload,
        sync_each_batch=layout.sync_each_batch and accumulation > 1,
        memory_bytes=at_peak,
        peak_at=peak_at,
        host_bytes=memory.host_bytes,
        communication_bytes=round(traffic.sent),
        step_seconds=step_seconds(
            timeline, traffic, profile, hardware, micro_batch=micro_batch, accumulation=accumulation
        ),
        notes=notes,
    )


class _Memory:
    """The bytes of one device under a layout."""

    def __init__(self, layout: Layout, profile: ModelProfile, hardware: Hardware, *, accumulates: bool) -> None:
        self.layout, self.profile, self.hardware = layout, profile, hardware
        self.accumulates = accumulates
        divides, offload = layout.divides, layout.offload
        units: list[list[ParameterProfile]] = [[] for _ in profile.units]
        for parameter in profile.parameters:
            units[parameter.unit].append(parameter)
        self.counts = [len(unit) for unit in units]
        self.trained = trained = [[p for p in unit if p.trainable] for unit in units]
        shards = layout.shards
        self.gathered = [_sum(unit, shards, layout.gather_itemsize) * shards for unit in units]
        self.whole = [sum(p.nbytes for p in unit) for unit in trained]
        self.cut = [_sum(unit, shards, None) for unit in trained] if "gradients" in divides else self.whole
        self.reduced = [_sum(unit, shards, layout.reduce_itemsize) * shards for unit in trained]
        # The share of trained state that a device steps on.
        total = sum(self.whole)
        own = sum(_sum(unit, shards, None) for unit in trained) if "optimizer" in divides else total
        self.share = own / total if total else 1.0
        parameters = sum(
            _sum(unit, shards, None) if "parameters" in divides else sum(p.nbytes for p in unit) for unit in units
        )
        state = round(profile.optimizer.state * self.share)
        self.host_bytes = 0
        for name, count in (("parameters", parameters), ("gradients", sum(self.cut)), ("optimizer", state)):
            self.host_bytes += count if name in offload else 0
        self.parameters = 0 if "parameters" in offload else parameters
        self.state = 0 if "optimizer" in offload else state
        steps = profile.optimizer
        at_once = hardware.steps_at_once and "optimizer" not in offload
        temporaries = round((steps.temporaries_at_once if at_once else steps.temporaries) * self.share)
        self.step_temporaries = 0 if "optimizer" in offload else temporaries
        self.host_bytes += temporaries if "optimizer" in offload else 0
        self.constant = {
            "parameters": self.parameters,
            "optimizer": self.state,
            "buffers": profile.buffers + layout.buffer_bytes,
            "buckets": round(layout.bucket_copies * total),
        }

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered before they are used."""
        return "parameters" in self.layout.divides

    def moments(self, timeline: Timeline, samples: int) -> Iterator[tuple[str, dict[str, int]]]:
        """What is in memory at each moment that may be the fullest, with its name."""
        inputs = round(self.profile.inputs * samples)
        finished: set[int] = set()
        last = {s.unit: i for i, s in enumerate(timeline.stretches) if s.phase == "backward"}
        reducing = -1  # the unit whose gradients were reduced last
        reached = 0  # the last unit of forward so far
        for i, stretch in enumerate(timeline.stretches):
            unit = stretch.unit
            reached = max(reached, unit)
            name = f"{stretch.phase} of {self.profile.units[unit] or 'what belongs to no unit'}"
            for moment in stretch.peaks:
                yield (
                    name,
                    self._sum_up(
                        activations=self._activations(moment, samples) + inputs,
                        gathered=self._gathered(stretch.phase, unit, finished, reached),
                        gradients=self._gradients(moment, stretch.phase, unit, finished),
                        communication=self._communication(stretch.phase, unit, reducing),
                    ),
                )
            if stretch.phase == "backward" and unit and last[unit] == i:
                kept = self._activations(stretch.end, samples) + inputs
                yield from self._reduction(unit, finished, activations=kept)
                finished.add(unit)
                reducing = unit
        yield from self._reduction(0, finished, activations=inputs)
        gone = "gradients" in self.layout.offload or self.layout.gradients_in_buckets
        gradients = 0 if gone else sum(self.cut)
        yield "optimizer step", self._sum_up(activations=self.step_temporaries, gradients=gradients)

    def _reduction(self, unit: int, finished: set[int], *, activations: int) -> Iterator[tuple[str, dict[str, int]]]:
        """A unit's parameters are gone, its whole gradients go into a flat buffer, and out of that comes their shard."""
        if "gradients" not in self.layout.divides:
            return
        name = f"reduction of {self.profile.units[unit] or 'what belongs to no unit'}"
        gathered = self._gathered("backward", 0, finished | {unit}, 0) if unit else 0
        ahead = self._ahead_backward(unit)
        held = self._held(set(range(len(self.whole))) if self.accumulates else finished)
        flat = round(self.reduced[unit] * self.layout.reduce_copies)
        yield (
            name,
            self._sum_up(
                activations=activations,
                gathered=gathered,
                gradients=held + self.whole[unit],
                communication=flat + ahead,
            ),
        )
        shards = self.layout.shards
        low = self.layout.reduce_itemsize
        cast = sum(p.shard_bytes(shards) for p in self.trained[unit] if low not in (None, p.itemsize))
        staged = round(self.reduced[unit] * self.hardware.staging) if shards > 1 else 0
        yield (
            name,
            self._sum_up(
                activations=activations,
                gathered=gathered,
                gradients=held + self.reduced[unit] // shards + cast,
                communication=flat + staged + ahead,
            ),
        )

    def _sum_up(
        self, *, activations: int = 0, gathered: int = 0, gradients: int = 0, communication: int = 0
    ) -> dict[str, int]:
        constant = self.constant
        return {
            "parameters": constant["parameters"],
            "gradients": gradients,
            "optimizer": constant["optimizer"],
            "activations": activations,
            "gathered": gathered,
            "communication": constant["buckets"] + communication,
            "buffers": constant["buffers"],
        }

    def _activations(self, moment: Moment, samples: int) -> int:
        casts = self.gathers and self.layout.gather_itemsize is not None
        return moment.activations(samples) + (0 if casts else moment.copies)

    def _gathered(self, phase: str, unit: int, finished: set[int], reached: int) -> int:
        """Whole parameters that exist while a unit computes."""
        if not self.gathers:
            return 0
        if not self.layout.keeps_gathered:
            return self.gathered[0] + (self.gathered[unit] if unit else 0)
        if phase == "forward":
            return self.gathered[0] + sum(self.gathered[1 : reached + 1])
        return sum(size for i, size in enumerate(self.gathered) if i not in finished)

    def _held(self, finished: set[int]) -> int:
        """Gradients of units whose backward is over."""
        whole = self.accumulates and not self.layout.sync_each_batch
        if "gradients" in self.layout.offload and not whole:
            return 0
        return sum((self.reduced if whole and self.gathers else self.whole if whole else self.cut)[u] for u in finished)

    def _gradients(self, moment: Moment, phase: str, unit: int, finished: set[int]) -> int:
        """Gradients of earlier units as they are kept, and those of this one, whole.

        A gradient that was just computed is a temporary until it is added to the one that is there, or copied into its bucket.
        """
        if self.layout.gradients_in_buckets:  # those that aren't reduced yet are beside them
            return sum(self.whole) if self.accumulates else 0
        before = sum(self.whole[u] for u in finished)
        fresh = max(0, moment.gradients - before) if phase == "backward" else 0
        if self.accumulates:  # from the second micro-batch on, all have some already
            return self._held(set(range(len(self.whole)))) + (fresh if "gradients" in self.layout.divides else 0)
        return self._held(finished) + fresh

    def _communication(self, phase: str, unit: int, reducing: int) -> int:
        """Flat buffers of gathers and reductions."""
        reduces = phase == "backward" and "gradients" in self.layout.divides and reducing >= 0
        buffers = round(self.reduced[reducing] * self.layout.reduce_copies) if reduces else 0
        if not self.gathers:
            return buffers
        if phase == "forward":
            ahead = sum(self.gathered[unit + 1 : unit + 1 + self.layout.ahead_forward])
            return buffers + round((self.gathered[unit] + ahead) * self.layout.gather_copies)
        return buffers + self._ahead_backward(unit)

    def _ahead_backward(self, unit: int) -> int:
        """Flat buffers of the units that are gathered while one computes backward."""
        if not self.gathers or self.layout.keeps_gathered or not unit:
            return 0
        first = max(1, unit - self.layout.ahead_backward)
        return round(sum(self.gathered[first:unit]) * self.layout.gather_copies)

    def traffic(self, accumulation: int) -> Traffic:
        """What one device sends per optimizer step, and moves from and to the CPU's memory."""
        layout = self.layout
        traffic = Traffic(shards=layout.shards, replicas=layout.replicas)
        backwards = accumulation if layout.sync_each_batch else 1
        if self.gathers:
            again = [g for g in self.gathered[1:] if g] if not layout.keeps_gathered else []
            first = [g for g in self.gathered if g]
            traffic.gather(sum(first) + sum(again), len(first) + len(again), times=accumulation)
        if layout.shards > 1 and layout.divides & {"gradients", "optimizer"}:
            present = [r for r in self.reduced if r]
            traffic.scatter(sum(present), len(present), times=backwards)
            if not self.gathers:  # parameters that were stepped on elsewhere
                traffic.gather(sum(p.nbytes for p in self.profile.parameters if p.trainable), 1, times=1)
        share = sum(self.reduced) / layout.shards if layout.divides & {"gradients"} else sum(self.reduced)
        traffic.reduce(share, max(1, len([r for r in self.reduced if r])), times=backwards)
        self._handle(traffic, accumulation, backwards)
        self._step(traffic)
        if "parameters" in layout.offload:
            passes = (2 if not layout.keeps_gathered else 1) * accumulation
            traffic.host += sum(self.gathered) / layout.shards * passes
        if "gradients" in layout.offload:
            traffic.host += sum(self.cut) * backwards
        traffic.steps_on_host = "optimizer" in layout.offload
        return traffic

    def _step(self, traffic: Traffic) -> None:
        """What the optimizer goes through. Without one kernel for all parameters each of its operations reads two tensors and writes one, for each parameter."""
        optimizer, whole = self.profile.optimizer, sum(self.whole)
        state = 2 * (2 * whole + optimizer.state)  # read and written once
        if self.hardware.steps_at_once or "optimizer" in self.layout.offload:
            traffic.stepped = state * self.share
            traffic.step_operations = optimizer.operations if "optimizer" not in self.layout.offload else 0
            return
        traffic.stepped = max(state, 3 * optimizer.operations * whole) * self.share
        parameters = sum(len(unit) for unit in self.trained)
        traffic.step_operations = optimizer.operations * parameters * self.layout.step_operations

    def _handle(self, traffic: Traffic, accumulation: int, backwards: int) -> None:
        """What the backend does by itself: operations around units and parameters, copies into flat buffers and out of them."""
        layout, shards = self.layout, self.layout.shards
        units = [i for i, count in enumerate(self.counts) if count]
        if self.gathers:
            again = 1 if layout.keeps_gathered else 2  # what belongs to no unit stays gathered
            times = {i: accumulation * (again if i else 1) for i in units}
            traffic.operations += sum(t * self._operations(self.counts[i]) for i, t in times.items())
            traffic.copied += sum(2 * t * self.gathered[i] * (1 + 1 / shards) for i, t in times.items())
        trained = [(len(self.trained[i]), self.reduced[i]) for i in units if self.trained[i]]
        traffic.operations += backwards * sum(self._operations(count) for count, _ in trained)
        if layout.divides & {"gradients", "optimizer"}:
            traffic.copied += backwards * sum(2 * size * (1 + 1 / shards) for _, size in trained)
        elif layout.bucket_copies and not layout.gradients_in_buckets:
            traffic.copied += backwards * sum(4 * size for _, size in trained)  # into the bucket and back

    def _operations(self, parameters: int) -> int:
        return self.layout.unit_operations + parameters * self.layout.parameter_operations


def _sum(parameters: list[ParameterProfile], shards: int, itemsize: int | None) -> int:
    return sum(p.shard_bytes(shards, itemsize) for p in parameters)
