"""What a training step of a model needs: the facts that planners work with. Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["ModelProfile", "Moment", "OptimizerProfile", "ParameterProfile", "Stretch", "Timeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterProfile:
    """One parameter.

    Args:
        name: Its name in the model.
        shape: Its shape.
        itemsize: Bytes per element, as it is trained.
        trainable: Whether it gets gradients.
        unit: Index of the unit that it belongs to; 0 is what belongs to no repeated block.

    Example:
        >>> weight = ParameterProfile(name="weight", shape=(3, 2), itemsize=4)
        >>> weight.nbytes, weight.shard_bytes(2)
        (24, 16)
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int = 4
    trainable: bool = True
    unit: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.numel * self.itemsize

    def shard_bytes(self, shards: int, itemsize: int | None = None) -> int:
        """Bytes of the largest shard: rows are divided, and padded to equally many.

        Args:
            shards: Number of processes.
            itemsize: Bytes per element; None: the parameter's own.
        """
        rows = self.shape[0] if self.shape else 1
        if not rows:
            return 0
        return math.ceil(rows / shards) * (self.numel // rows) * (itemsize or self.itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Bytes that exist at one moment of a step, besides parameters, buffers and optimizer state.

    Args:
        fixed: Activations and temporaries whatever the batch.
        per_sample: The same per sample of the micro-batch.
        copies: Copies of parameters in the dtype of computation.
        gradients: Whole gradients of parameters.

    Example:
        >>> Moment(fixed=10, per_sample=2).activations(4)
        18
    """

    fixed: float = 0.0
    per_sample: float = 0.0
    copies: int = 0
    gradients: int = 0

    def activations(self, samples: float) -> int:
        """Activations and temporaries of a micro-batch, in bytes."""
        return max(0, round(self.fixed + self.per_sample * samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One unit's part of a forward or backward.

    Args:
        phase: "forward" or "backward".
        unit: Index of the unit that computes.
        peaks: The moments of which one has most bytes; which one depends on the size of the micro-batch.
        end: The last moment.
        flops: Floating-point operations of matrix products, convolutions and attention, per sample.
        moved: Bytes that all other operations read and write, per sample.
        flops_squared, moved_squared: What comes to these per sample and other sample, where samples meet: in routing by one-hot products, for one.
        operations: Number of operations, whatever the batch.
    """

    phase: Literal["forward", "backward"]
    unit: int
    peaks: tuple[Moment, ...] = (Moment(),)
    end: Moment = Moment()
    flops: float = 0.0
    moved: float = 0.0
    flops_squared: float = 0.0
    moved_squared: float = 0.0
    operations: int = 0

    def peak(self, samples: float) -> Moment:
        """The moment with most bytes, for a micro-batch of so many samples.

        Example:
            >>> few, many = Moment(fixed=10), Moment(per_sample=2)
            >>> Stretch(phase="forward", unit=0, peaks=(few, many)).peak(8) is many
            True
        """
        return max(self.peaks, key=lambda m: m.activations(samples) + m.copies + m.gradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Forward and backward of one micro-batch, stretch by stretch.

    Args:
        stretches: In the order of time.
        recompute: Settings of the `ActivationCheckpointing` under which it was traced; None for none.

    Example:
        >>> forward = Stretch(phase="forward", unit=0, flops=2.0)
        >>> Timeline(stretches=(forward, Stretch(phase="backward", unit=0, flops=4.0))).flops
        6.0
    """

    stretches: tuple[Stretch, ...]
    recompute: Mapping[str, Any] | None = None

    @property
    def flops(self) -> float:
        """Floating-point operations per sample."""
        return sum(s.flops for s in self.stretches)

    @property
    def moved(self) -> float:
        """Bytes that operations other than matrix products read and write, per sample."""
        return sum(s.moved for s in self.stretches)

    def work(self, samples: int) -> tuple[float, float]:
        """Floating-point operations of a micro-batch, and bytes that other operations read and write.

        Example:
            >>> together = Stretch(phase="forward", unit=0, flops=2.0, flops_squared=1.0, moved=4.0)
            >>> Timeline(stretches=(together,)).work(3)
            (15.0, 12.0)
        """
        flops = sum(s.flops * samples + s.flops_squared * samples**2 for s in self.stretches)
        return flops, sum(s.moved * samples + s.moved_squared * samples**2 for s in self.stretches)

    @property
    def operations(self) -> int:
        """Number of operations of a micro-batch."""
        return sum(s.operations for s in self.stretches)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerProfile:
    """What stepping needs, for all trainable parameters on one device.

    Args:
        name: The optimizer's class.
        state: Bytes of its state.
        temporaries: Most bytes of temporaries in one step that goes from parameter to parameter.
        temporaries_alone: The same in a step on the largest parameter alone: fewer, where a temporary of one parameter lives until the next one's is there.
        temporaries_at_once: The same in a step that works on all parameters at once, as on accelerators.
        operations: Number of operations of a step that works on all at once.

    Example:
        >>> OptimizerProfile(name="SGD").state
        0
    """

    name: str = "none"
    state: int = 0
    temporaries: int = 0
    temporaries_alone: int = 0
    temporaries_at_once: int = 0
    operations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A model, its optimizer and one training step, on one device and undivided.

    Args:
        name: The model's class, or where the figures come from.
        parameters: All parameters, each once.
        units: Names of the units that are gathered and recomputed as one; ``units[0]`` is what belongs to none.
        buffers: Bytes of buffers.
        optimizer: What stepping needs.
        timelines: Forward and backward by kind of recomputation: "none", "all", or others.
        inputs: Bytes of a sample's inputs.
        precision: Name of the precision it was made with.
        compute_itemsize: Bytes per element in which matrix products compute.
        traced: Whether the model was traced; False: rules of thumb.

    Example:
        >>> weight = ParameterProfile(name="w", shape=(2, 2))
        >>> ModelProfile(name="toy", parameters=(weight,), timelines={"none": Timeline(stretches=())}).parameter_count
        4
    """

    name: str
    parameters: tuple[ParameterProfile, ...]
    units: tuple[str, ...] = ("",)
    buffers: int = 0
    optimizer: OptimizerProfile = OptimizerProfile()
    timelines: Mapping[str, Timeline] = field(default_factory=dict)
    inputs: float = 0.0
    precision: str = "fp32"
    compute_itemsize: int = 4
    traced: bool = True

    @property
    def parameter_count(self) -> int:
        """Number of elements of all parameters."""
        return sum(p.numel for p in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(p.nbytes for p in self.parameters)

    @property
    def trainable_bytes(self) -> int:
        """Bytes of the parameters that get gradients."""
        return sum(p.nbytes for p in self.parameters if p.trainable)

    def to_dict(self) -> dict[str, Any]:
        """The sums, as JSON-like data."""
        return {
            "name": self.name,
            "parameters": self.parameter_count,
            "parameter_bytes": self.parameter_bytes,
            "trainable_bytes": self.trainable_bytes,
            "buffer_bytes": self.buffers,
            "optimizer": self.optimizer.name,
            "optimizer_bytes": self.optimizer.state,
            "precision": self.precision,
            "units": len(self.units) - 1,
            "flops_per_sample": {name: t.flops for name, t in self.timelines.items()},
            "traced": self.traced,
        }
