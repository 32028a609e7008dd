"""The mesh of processes, and who of them holds which rows and which shards."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from drivetrain.errors import ConfigurationError
from drivetrain.parallel.config import ParallelismConfig
from drivetrain.specs import ProcessInfo
from drivetrain_fsdp.options import FullyShardedDataParallelPlugin

__all__ = ["Mesh", "build_mesh", "mesh_sizes"]

_NAMES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
#: Those whose processes hold parts of the same sequences: they share parameters' shards with the processes that see other rows.
_SEQUENCES = ("cp", "sp")


@dataclass(slots=True)
class Mesh:
    """The mesh and what is asked of it.

    Args:
        whole: All dimensions by name.
        sizes: Size of each dimension, those of size 1 included.
        shards: What ``fully_shard`` works on: one dimension, or replicas and shards.
        data: Processes that hold different rows, of which this is one.
        gradients: Processes over which gradients are averaged, of which this is one.
    """

    whole: DeviceMesh
    sizes: dict[str, int]
    shards: DeviceMesh
    data: dist.ProcessGroup
    gradients: dist.ProcessGroup

    @property
    def sequence_parts(self) -> int:
        """Into how many parts sequences are divided."""
        return math.prod(self.sizes[name] for name in _SEQUENCES)

    def of(self, name: str) -> DeviceMesh | None:
        """The part of the mesh along one dimension; None if that has one process."""
        return self.whole[name] if self.sizes[name] > 1 else None


def mesh_sizes(
    process: ProcessInfo, options: FullyShardedDataParallelPlugin, config: ParallelismConfig | None
) -> dict[str, int]:
    """Size of each dimension.

    Raises:
        ConfigurationError: If strategy and mesh contradict each other, or machines have different numbers of processes.

    Example:
        >>> mesh_sizes(ProcessInfo(world_size=8, local_world_size=4), FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD"), None)
        {'dp_replicate': 2, 'dp_shard': 4, 'cp': 1, 'sp': 1, 'tp': 1}
    """
    world = process.world_size
    strategy = options.sharding_strategy
    if config is not None:
        sizes = config.sizes(world)
        said = config.dp_replicate_size > 1 or (config.dp_shard_size or 0) > 1
        if options.replicates and said:
            raise ConfigurationError(
                f"sharding_strategy={strategy!r} says how many replicas there are, and so does ParallelismConfig. Leave the strategy at "
                "'FULL_SHARD' or 'SHARD_GRAD_OP'."
            )
    else:
        sizes = ParallelismConfig().sizes(world)
    if not options.replicates:
        return sizes
    shards = 1 if strategy == "NO_SHARD" else min(process.local_world_size, sizes["dp_shard"])
    if sizes["dp_shard"] % shards:
        raise ConfigurationError(
            f"sharding_strategy={strategy!r} shards over the {shards} processes of a machine, and there are {world} in all. Start equally many on "
            "each machine, or say ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)."
        )
    return {**sizes, "dp_replicate": sizes["dp_shard"] // shards, "dp_shard": shards}


def build_mesh(device: torch.device, sizes: dict[str, int]) -> Mesh:
    """Make the mesh, or take the one that is there. Collective.

    A mesh lives as long as the job's process group. torch keeps what it found out about DTensors by equal meshes, so that the groups of one that is
    equal to a later one must not end before.

    Args:
        device: Where this process computes.
        sizes: Size of each dimension.
    """
    there = _meshes.setdefault(dist.group.WORLD, {})
    key = device.type, tuple(sizes.items())
    if key not in there:
        there[key] = _make(device, sizes)
    return there[key]


#: By the process group that they are parts of: it mirrors torch's own groups, which are process-wide.
_meshes: weakref.WeakKeyDictionary[Any, dict[Any, Mesh]] = weakref.WeakKeyDictionary()


def _make(device: torch.device, sizes: dict[str, int]) -> Mesh:
    # The dimension of shards is there in any case: what is sharded must have one, if only of one process.
    names = tuple(n for n in _NAMES if sizes[n] > 1 or n == "dp_shard")
    whole = init_device_mesh(device.type, tuple(sizes[n] for n in names), mesh_dim_names=names)
    shards = _joined(whole, ("dp_shard", *_SEQUENCES), "dp_shard_cp")
    if sizes["dp_replicate"] > 1:
        shards = DeviceMesh._concatenate([whole["dp_replicate"], shards])
    data = _joined(whole, ("dp_replicate", "dp_shard"), "dp").get_group()
    gradients = _joined(whole, ("dp_replicate", "dp_shard", *_SEQUENCES), "dp_cp").get_group()
    return Mesh(whole, sizes, shards, data, gradients)


def _joined(whole: DeviceMesh, wanted: tuple[str, ...], name: str) -> DeviceMesh:
    """One dimension made of several of the mesh."""
    present = tuple(n for n in whole.mesh_dim_names or () if n in wanted)
    if len(present) == 1:
        return whole[present[0]]
    return whole[present]._flatten(name)
