"""How processes form a mesh, under Accelerate's names. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from drivetrain.config.options import Options
from drivetrain.errors import ConfigurationError

__all__ = ["ParallelismConfig"]

Size = Annotated[int, msgspec.Meta(ge=1)]

#: Dimensions of the mesh, the outermost first: neighbours in the last one are neighbours on a machine.
_DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "sp", "tp")


@dataclass
class ParallelismConfig(Options):
    """The mesh that processes form: replicas, shards, parts of a sequence, parts of a layer.

    The sizes' product is the number of processes.

    Args:
        dp_replicate_size: Replicas, which see different rows and average gradients.
        dp_shard_size: Processes over which parameters are sharded; they see different rows. None: all processes that the other sizes leave.
        tp_size: Tensor parallel: processes that share each layer, and see the same rows.
        cp_size: Context parallel: processes that hold parts of the same sequences.
        sp_size: Ulysses' sequence parallel: processes that hold parts of the same sequences, and swap them for heads around attention. The heads must be
            divisible by it. Not together with cp_size.
        tp_plan: How layers are divided, by patterns of module names: ``{"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"}``. Empty: the
            model's own plan, or else one that is derived from its attention and MLP blocks.
        cp_comm_strategy: "allgather": keys and values of the whole sequence come together for each attention. For all-to-alls there is sp_size.
        cp_backend: "torch", the only one: backends compute attention by torch.
        sp_backend: Name of the backend that is to divide sequences: another one refuses it. None: the one that is used.

    Example:
        >>> config = ParallelismConfig(dp_replicate_size=2, tp_size=2)
        >>> config.sizes(8)
        {'dp_replicate': 2, 'dp_shard': 2, 'cp': 1, 'sp': 1, 'tp': 2}
        >>> config.sizes(6)
        Traceback (most recent call last):
        ...
        drivetrain.errors.ConfigurationError: ParallelismConfig(dp_replicate_size=2, tp_size=2) doesn't divide 6 processes.
    """

    dp_replicate_size: Size = 1
    dp_shard_size: Size | None = None
    tp_size: Size = 1
    cp_size: Size = 1
    sp_size: Size = 1
    tp_plan: dict[str, str] = field(default_factory=dict)
    cp_comm_strategy: Literal["allgather", "alltoall"] = "allgather"
    cp_backend: Literal["torch"] = "torch"
    sp_backend: str | None = None

    def __post_init__(self) -> None:
        self.validate()
        if self.sp_size > 1 and self.cp_size > 1:
            raise ConfigurationError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} both divide sequences. Give one of them: sp_size where it divides the heads of "
                "attention, cp_size else."
            )
        if self.cp_comm_strategy != "allgather":
            raise ConfigurationError(
                "cp_comm_strategy='alltoall' isn't offered. Leave it out: 'allgather' is exact with every mask; sp_size swaps parts by all-to-alls."
            )
        if self.tp_plan and self.tp_size == 1:
            raise ConfigurationError("tp_plan divides layers over tp_size processes, and that is 1. Give tp_size too.")

    def sizes(self, world_size: int) -> dict[str, int]:
        """Size of each dimension, the outermost first.

        Raises:
            ConfigurationError: If their product isn't the number of processes.
        """
        given = {
            "dp_replicate": self.dp_replicate_size,
            "dp_shard": self.dp_shard_size or 1,
            "cp": self.cp_size,
            "sp": self.sp_size,
            "tp": self.tp_size,
        }
        rest, remainder = divmod(world_size, math.prod(given.values()))
        if remainder or (self.dp_shard_size is not None and rest != 1):
            said = ", ".join(f"{d}_size={getattr(self, f'{d}_size')}" for d in _DIMENSIONS if given[d] > 1)
            what = "doesn't divide" if remainder else f"is for {world_size // rest} processes, not for"
            tail = " processes." if remainder else "."
            raise ConfigurationError(f"ParallelismConfig({said}) {what} {world_size}{tail}")
        if self.dp_shard_size is None:
            given["dp_shard"] = rest
        return given

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are divided."""
        return self.tp_size > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are divided, and keys and values gathered."""
        return self.cp_size > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are divided, and swapped for heads."""
        return self.sp_size > 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are replicas."""
        return self.dp_replicate_size > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether parameters are sharded over processes that see different rows, as far as it was said."""
        return self.dp_shard_size is None or self.dp_shard_size > 1

    @property
    def non_data_parallel_size(self) -> int:
        """Processes that see the same rows, or parts of them."""
        return self.tp_size * self.cp_size * self.sp_size
