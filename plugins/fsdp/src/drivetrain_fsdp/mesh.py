"""The mesh of processes, and who of them holds which rows and which shards."""

from __future__ import annotations

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

_NAMES = ("dp_replicate", "dp_shard", "cp", "tp")


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
    made: list[dist.ProcessGroup]

    def of(self, name: str) -> DeviceMesh | None:
        """The part of the mesh along one dimension; None if that has one process."""
        return self.whole[name] if self.sizes[name] > 1 else None

    def destroy(self) -> None:
        """End the process groups that were made for it."""
        for group in self.made:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self.made = []


def mesh_sizes(
    process: ProcessInfo, options: FullyShardedDataParallelPlugin, config: ParallelismConfig | None
) -> dict[str, int]:
    """Size of each dimension.

    Raises:
        ConfigurationError: If strategy and mesh contradict each other, or machines have different numbers of processes.

    Example:
        >>> mesh_sizes(ProcessInfo(world_size=8, local_world_size=4), FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD"), None)
        {'dp_replicate': 2, 'dp_shard': 4, 'cp': 1, 'tp': 1}
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
    """Make the mesh. Collective.

    Args:
        device: Where this process computes.
        sizes: Size of each dimension.
    """
    before = set(_groups())
    names = [n for n in _NAMES if sizes[n] > 1] or ["dp_shard"]
    whole = init_device_mesh(device.type, tuple(sizes[n] for n in names), mesh_dim_names=tuple(names))
    data = _flat(whole, names, ("dp_replicate", "dp_shard"), "dp")
    gradients = _flat(whole, names, ("dp_replicate", "dp_shard", "cp"), "dp_cp")
    shards = _shard_mesh(device, whole, names, sizes)
    made = [g for g in _groups() if g not in before]
    return Mesh(whole, sizes, shards, data, gradients, made)


def _groups() -> list[Any]:
    found: list[Any] = list(dist.distributed_c10d._world.pg_map)
    return found


def _flat(whole: DeviceMesh, names: list[str], wanted: tuple[str, ...], name: str) -> dist.ProcessGroup:
    """The group over some dimensions of the mesh; of this process alone if none of them has more."""
    present = tuple(n for n in names if n in wanted)
    if len(present) == len(names):
        return dist.group.WORLD  # type: ignore[return-value]
    if not present:
        mine = [dist.new_group([r]) for r in range(dist.get_world_size())]
        return mine[dist.get_rank()]  # type: ignore[return-value]
    if len(present) == 1:
        return whole[present[0]].get_group()
    return whole[present]._flatten(name).get_group()


def _shard_mesh(device: torch.device, whole: DeviceMesh, names: list[str], sizes: dict[str, int]) -> DeviceMesh:
    """Replicas and shards; sequences' parts hold shards as well."""
    shard = tuple(n for n in names if n in ("dp_shard", "cp"))
    if len(shard) == 2:
        flat = whole[shard]._flatten("dp_shard_cp")
        return flat if sizes["dp_replicate"] == 1 else DeviceMesh._concatenate([whole["dp_replicate"], flat])
    if shard and sizes["dp_replicate"] == 1:
        return whole[shard[0]]
    if shard:
        return whole["dp_replicate", shard[0]]
    # Nothing is sharded: replicas of one process each.
    lonely = {**sizes, "dp_shard": 1}
    order = [n for n in _NAMES if n == "dp_shard" or lonely[n] > 1]
    full = init_device_mesh(device.type, tuple(lonely[n] for n in order), mesh_dim_names=tuple(order))
    return full["dp_replicate", "dp_shard"] if sizes["dp_replicate"] > 1 else full["dp_shard"]
