"""Plans for sharding a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drivetrain.memory.hardware import Hardware
from drivetrain.memory.profile import ModelProfile
from drivetrain.specs import ShardingPlannerSpec

__all__ = ["ShardingPlan", "ShardingPlanner", "TrainingRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """What is to be trained, and what may be changed to make it fit.

    Args:
        batch_size: Samples per optimizer step, over all devices.
        micro_batches: Sizes that a device's micro-batch may have, in samples.
        precision: Name of the precision.
        recompute: Kinds of recomputation that may be used, names of ``ModelProfile.timelines``.
        offload: Whether state may live in the CPU's memory.
        headroom: Share of a device's memory that is left free.

    Example:
        >>> request = TrainingRequest(batch_size=64, micro_batches=(1, 2, 8))
        >>> request.accumulation(micro_batch=2, devices=4)
        8
        >>> [m for m in request.micro_batches if request.divides(m, devices=16)]
        [1, 2]
    """

    batch_size: int
    micro_batches: tuple[int, ...] = (1,)
    precision: str = "fp32"
    recompute: tuple[str, ...] = ("none",)
    offload: bool = True
    headroom: float = 0.1

    def divides(self, micro_batch: int, devices: int) -> bool:
        """Whether micro-batches of this size make up the batch."""
        return self.batch_size % (micro_batch * devices) == 0

    def accumulation(self, micro_batch: int, devices: int) -> int:
        """Micro-batches per optimizer step.

        Args:
            micro_batch: Samples in each, on one device.
            devices: Number of devices that read different samples.
        """
        return self.batch_size // (micro_batch * devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingPlan:
    """One candidate.

    Args:
        backend: Backend that would run it.
        strategy: What distinguishes it from others of that backend, for people: "FULL_SHARD".
        options: Settings of that backend, fields of its options class.
        micro_batch: Samples of a device's micro-batch.
        accumulation: Micro-batches per optimizer step.
        recompute: Kind of recomputation, a name of ``ModelProfile.timelines``.
        offloaded: State that lives in the CPU's memory: "parameters", "gradients", "optimizer".
        sync_each_batch: Gradients are reduced at each micro-batch, not only at a window's last.
        memory_bytes: Predicted bytes per device at the fullest moment, by category: "parameters" (as they are kept), "gradients", "optimizer",
            "activations" (temporaries and inputs included), "gathered" (whole parameters for a while), "communication", "buffers".
        peak_at: Which moment that is, for people.
        host_bytes: Bytes in the CPU's memory per device.
        communication_bytes: Bytes that one device sends per optimizer step.
        step_seconds: Predicted time of one optimizer step, or None.
        notes: Clauses for people: why it is offered.

    Example:
        >>> ShardingPlan(backend="single", memory_bytes={"parameters": 4, "gradients": 4}).peak_bytes
        8
    """

    backend: str
    strategy: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    micro_batch: int = 1
    accumulation: int = 1
    recompute: str = "none"
    offloaded: tuple[str, ...] = ()
    sync_each_batch: bool = False
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    peak_at: str = ""
    host_bytes: int = 0
    communication_bytes: int = 0
    step_seconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Sum over the categories."""
        return sum(self.memory_bytes.values())

    @property
    def label(self) -> str:
        """All but the batch, in a few words.

        Example:
            >>> ShardingPlan(backend="toy", strategy="FULL", recompute="all", offloaded=("optimizer",)).label
            'toy FULL, recompute all, offload optimizer'
        """
        words = [f"{self.backend} {self.strategy}".strip()]
        if self.recompute != "none":
            words.append(f"recompute {self.recompute}")
        if self.offloaded:
            words.append("offload" if len(self.offloaded) == 3 else f"offload {'+'.join(self.offloaded)}")
        if self.sync_each_batch:
            words.append("sync each batch")
        return ", ".join(words)


class ShardingPlanner:
    """Proposes plans for one backend; core picks the fastest that fits.

    Most planners only say how each strategy lays tensors out over the devices, with a `drivetrain.memory.Layout`, and let
    `drivetrain.memory.predict` work out memory, communication and time.

    Args:
        spec: The descriptor.

    Example:
        >>> from drivetrain.memory import Layout, predict
        >>> class ToyPlanner(ShardingPlanner):
        ...     def propose(self, profile, hardware, request):
        ...         for micro_batch in request.micro_batches:
        ...             yield predict(Layout(), profile, hardware, request, micro_batch=micro_batch, backend="toy")
        >>> from drivetrain.memory import known_hardware, profile_of_counts
        >>> profile = profile_of_counts(parameters=1e8, layers=4, hidden=512, sequence=128)
        >>> planner = ToyPlanner(ShardingPlannerSpec(name="toy", backend="toy"))
        >>> [plan] = planner.propose(profile, known_hardware("t4"), TrainingRequest(batch_size=8))
        >>> plan.accumulation, plan.memory_bytes["optimizer"] // plan.memory_bytes["parameters"]
        (8, 2)
    """

    def __init__(self, spec: ShardingPlannerSpec) -> None:
        self.spec = spec

    def propose(self, profile: ModelProfile, hardware: Hardware, request: TrainingRequest) -> Iterable[ShardingPlan]:
        """Candidate plans: for each strategy, permitted micro-batch and permitted recomputation, whether it fits or not.

        Called in one process, with the same arguments in each if it is called in several; sends nothing.

        Args:
            profile: Of the model, its optimizer and one step, undivided.
            hardware: The devices: how many, their memory, arithmetic and links.
            request: What is to be trained, and what may be changed.
        """
        raise NotImplementedError

    def document(self, plan: ShardingPlan) -> str | None:
        """One of its plans as the backend's own library takes it, for ``drivetrain plan --output``; None where that has no such file."""
        return None
