"""Data parallel training in forty lines: a replica on each process, gradients averaged after the last backward of a window."""

from __future__ import annotations

import torch
import torch.distributed as dist

from drivetrain.interfaces import Backend
from drivetrain.parallel.process_group import init_process_group


class AcmeBackend(Backend):
    """Averages gradients with one all-reduce per window."""

    def __init__(self, spec, context):
        super().__init__(spec, context)
        self._models = {}  # each with whether its gradients are averaged
        self._group = None

    def setup(self):
        super().setup()
        if self.context.process.is_distributed:
            self._group = init_process_group(
                self.context.process,
                device=self.device,
                device_backend=self.context.device.spec.communication_backend,
            )

    def teardown(self):
        if self._group is not None:
            self._group.destroy()

    def wrap_model(self, model, *, evaluation):
        if self.data_world_size > 1:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), src=0)
        if not evaluation:
            self._models[model] = True
        return model

    def set_gradient_sync(self, model, enabled):
        self._models[model] = enabled

    def backward(self, loss, window, **kwargs):
        super().backward(loss, window, **kwargs)
        dtype = getattr(torch, (self.context.options.dtype if self.context.options else "float32"))
        models = [model for model, averaged in self._models.items() if averaged]
        gradients = [p.grad for model in models for p in model.parameters() if p.grad is not None]
        if not gradients or self.data_world_size == 1:
            return
        flat = torch.cat([g.flatten() for g in gradients]).to(dtype)
        dist.all_reduce(flat)
        flat = flat.float() / self.data_world_size
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def expected_collectives(self):
        return {"micro_batch": {}, "window": {"all_reduce": 1}}
