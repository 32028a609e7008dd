"""FSDP2 behind the Backend interface: parameters become DTensors, and optimizers are pointed at them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from drivetrain.errors import NotPreparedError
from drivetrain.interfaces import Backend, Prepared, PrepareRequest
from drivetrain.parallel.process_group import ProcessGroupHandle, init_process_group


class FSDPBackend(Backend):
    """Each module with children of its own is one unit; the units' parameters are sharded over all processes."""

    _group: ProcessGroupHandle | None = None

    def setup(self) -> None:
        super().setup()
        self._group = init_process_group(
            self.context.process,
            device=self.device,
            device_backend=self.context.device.spec.communication_backend,
        )
        self._mesh = init_device_mesh(self.device.type, (self.context.process.world_size,))
        # What took the place of a parameter that no longer is any model's, while something (an optimizer) still holds it.
        self._successors: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def teardown(self) -> None:
        if self._group is not None:
            self._group.destroy()

    # -- objects -----------------------------------------------------------------------------------------------------------

    def prepare(self, request: PrepareRequest) -> Prepared:
        before = [dict(m.named_parameters(remove_duplicate=False)) for m in request.models]
        prepared = super().prepare(PrepareRequest(**{**_fields(request), "optimizers": ()}))
        for old, model in zip(before, prepared.models, strict=True):
            for name, new in model.named_parameters(remove_duplicate=False):
                self._successors[id(old[name])] = weakref.ref(old[name]), new
        prepared.optimizers = [self.prepare_optimizer(o) for o in request.optimizers]
        return prepared

    def wrap_model(self, model: torch.nn.Module, *, evaluation: bool) -> torch.nn.Module:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                fully_shard(module, mesh=self._mesh)
        return fully_shard(model, mesh=self._mesh)  # what is left: LayerNorm, embeddings

    def prepare_optimizer(self, optimizer: Any) -> Any:
        state = {}
        for group in optimizer.param_groups:
            old, group["params"] = group["params"], [self._successor(p) for p in group["params"]]
            for before, after in zip(old, group["params"], strict=True):
                if before in optimizer.state:
                    state[after] = {k: _sharded_like(after, v) for k, v in optimizer.state[before].items()}
        optimizer.state.clear()
        optimizer.state.update(state)
        return optimizer

    def _successor(self, parameter: torch.Tensor) -> torch.Tensor:
        if isinstance(parameter, DTensor):
            return parameter
        reference, new = self._successors.get(id(parameter), (None, parameter))
        if reference is None or reference() is not parameter:
            raise NotPreparedError(
                "The optimizer updates a parameter of no prepared model: prepare the model first, or both in one call."
            )
        return new

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


def _fields(request: PrepareRequest) -> dict[str, Any]:
    return {name: getattr(request, name) for name in PrepareRequest.__slots__}


def _sharded_like(parameter: torch.Tensor, value: Any) -> Any:
    """Optimizer state that has the parameter's shape, sharded like it; each process cuts its own part out."""
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape or isinstance(value, DTensor):
        return value
    assert isinstance(parameter, DTensor)
    return distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
