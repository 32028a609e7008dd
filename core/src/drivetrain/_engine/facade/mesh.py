"""The mesh that processes form, under the names by which scripts ask an Accelerator for it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from drivetrain._engine.assemble import Parts
    from drivetrain.interfaces import Backend

__all__ = ["MeshFacade"]


class MeshFacade:
    """Dimensions of parallelism, this process's rank in each, and sequences that processes share."""

    backend: Backend
    _parts: Parts

    @property
    def parallelism_config(self) -> Any:
        """The ``ParallelismConfig`` that was given; None for none."""
        return self._parts.plan.options.get("ParallelismConfig")

    @property
    def torch_device_mesh(self) -> Any:
        """The mesh that processes form, a ``torch.distributed.DeviceMesh``; None where they form none."""
        return self.backend.device_mesh

    @property
    def tensor_parallel_rank(self) -> int:
        """This process's rank among those that share each layer; 0 where none do."""
        return self._mesh_rank("tp")

    @property
    def context_parallel_rank(self) -> int:
        """This process's rank among those that share sequences and gather keys; 0 where none do."""
        return self._mesh_rank("cp")

    @property
    def sequence_parallel_rank(self) -> int:
        """This process's rank among those that share sequences and swap them for heads; 0 where none do."""
        return self._mesh_rank("sp")

    @property
    def data_parallel_rank(self) -> int:
        """This process's rank among those that hold different rows.

        Example:
            >>> from drivetrain import Accelerator
            >>> Accelerator(cpu=True).data_parallel_rank
            0
        """
        return self.backend.data_rank

    @property
    def data_parallel_shard_rank(self) -> int:
        """This process's rank among those over which a replica's parameters are sharded; 0 where they aren't."""
        return self._mesh_rank("dp_shard")

    def _mesh_rank(self, dimension: str) -> int:
        mesh = self.backend.device_mesh
        if mesh is None or dimension not in (mesh.mesh_dim_names or ()):
            return 0
        return int(mesh.get_local_rank(dimension))

    def maybe_context_parallel(
        self,
        buffers: Sequence[torch.Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[torch.Tensor] | None = None,
    ) -> contextlib.AbstractContextManager[Any]:
        """Inside, processes that share sequences hold a part of each, and attention sees all of it.

        Around forward and backward of each batch, with ``ParallelismConfig(cp_size=...)`` or ``sp_size``. It does nothing where both are 1.

        Args:
            buffers: Tensors with a dimension of the sequence (token ids, labels already shifted, positions): divided in place.
            buffer_seq_dims: That dimension of each.
            no_restore_buffers: Those that may stay divided afterwards, which saves their copy back.

        Example:
            >>> import torch
            >>> from drivetrain import Accelerator
            >>> ids = torch.arange(4).view(1, 4)
            >>> with Accelerator(cpu=True).maybe_context_parallel([ids], [1]):
            ...     ids.shape
            torch.Size([1, 4])
        """
        return self.backend.context_parallel(
            list(buffers or ()), list(buffer_seq_dims or ()), set(no_restore_buffers or ())
        )
