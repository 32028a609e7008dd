"""FSDP2 behind the Backend interface: parameters become DTensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from drivetrain.interfaces import Backend
from drivetrain.parallel.process_group import ProcessGroupHandle, init_process_group


class FSDPBackend(Backend):
    """Each linear layer is a unit, and the rest is one: small models then have several, as large ones do."""

    _group: ProcessGroupHandle | None = None

    def setup(self) -> None:
        super().setup()
        self._group = init_process_group(
            self.context.process,
            device=self.device,
            device_backend=self.context.device.spec.communication_backend,
        )
        self._mesh = init_device_mesh(self.device.type, (self.context.process.world_size,))

    def teardown(self) -> None:
        if self._group is not None:
            self._group.destroy()

    # -- objects -----------------------------------------------------------------------------------------------------------

    def wrap_model(self, model: torch.nn.Module, *, evaluation: bool) -> torch.nn.Module:
        """Core points optimizers at the parameters that are there afterwards."""
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                fully_shard(module, mesh=self._mesh)
        return fully_shard(model, mesh=self._mesh)  # what is left: LayerNorm, embeddings

    def place_state(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or value.shape != parameter.shape:
            return super().place_state(parameter, value)
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)  # each cuts its own

    def parameter_names(self, models: Sequence[torch.nn.Module]) -> dict[int, str]:
        for model in models:
            assert isinstance(model, FSDPModule)
            model.reshard()  # after an evaluation the root unit still has its whole parameters
        return super().parameter_names(models)

    # -- one accumulation window -------------------------------------------------------------------------------------------

    def set_gradient_sync(self, model: torch.nn.Module, enabled: bool) -> None:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(enabled)

    def normalize_gradients(self, parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        grads = [p.grad for p in parameters if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        if local:
            torch._foreach_mul_(local, factor)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
