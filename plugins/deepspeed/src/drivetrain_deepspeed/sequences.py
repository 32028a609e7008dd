"""Processes that hold parts of the same sequences. DeepSpeed counts them as data parallel, which is right: their gradients are averaged, too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drivetrain.errors import UnsupportedError
from drivetrain.parallel.attention import GatheringAttention, SwappingAttention
from drivetrain.parallel.config import ParallelismConfig
from drivetrain.parallel.sequences import SharedAttention

__all__ = ["SequenceMesh"]

_ATTENTION: dict[str, type[SharedAttention]] = {"cp": GatheringAttention, "sp": SwappingAttention}


@dataclass(frozen=True, slots=True)
class SequenceMesh:
    """Who reads which rows, and who shares their sequences.

    Args:
        whole: The mesh, its dimensions by name.
        data: Processes that read different rows, of which this is one.
        sequence: Processes that share sequences, of which this is one; None where none do.
        dimension: How: "cp" or "sp".
    """

    whole: DeviceMesh
    data: dist.ProcessGroup
    sequence: dist.ProcessGroup | None
    dimension: str

    @classmethod
    def make(cls, device: torch.device, config: ParallelismConfig, world_size: int) -> SequenceMesh:
        """Form it. Collective.

        Args:
            device: Where this process computes.
            config: What was asked for.
            world_size: Number of processes.

        Raises:
            UnsupportedError: For dimensions that an engine doesn't have.
        """
        sizes = config.sizes(world_size)
        if sizes["tp"] > 1:
            raise UnsupportedError(
                f"ParallelismConfig(tp_size={sizes['tp']}): DeepSpeed's engines don't divide layers here. Leave it out, or use backend='fsdp'."
            )
        if sizes["dp_replicate"] > 1:
            raise UnsupportedError(
                f"ParallelismConfig(dp_replicate_size={sizes['dp_replicate']}): ZeRO divides its state over all processes. Leave it out; "
                'DeepSpeed\'s own "zero_hpz_partition_size" keeps parameters whole within a machine.'
            )
        dimension = next((name for name in _ATTENTION if sizes[name] > 1), "")
        names = ("dp_shard", dimension) if dimension else ("dp_shard",)
        whole = init_device_mesh(device.type, tuple(sizes[n] for n in names), mesh_dim_names=names)
        sequence = whole.get_group(dimension) if dimension else None
        return cls(whole, whole.get_group("dp_shard"), sequence, dimension)

    def attention(self) -> SharedAttention | None:
        """What sees whole sequences; None where each process has them."""
        return None if self.sequence is None else _ATTENTION[self.dimension](self.sequence)

    def describe(self) -> str:
        """In a few words, for people."""
        sizes: tuple[Any, ...] = tuple(self.whole.shape)
        return " x ".join(f"{n}={s}" for n, s in zip(self.whole.mesh_dim_names or (), sizes, strict=True))
