"""A shard of the model on each process."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from drivetrain.errors import UnsupportedError
from drivetrain.interfaces import Backend, Prepared, PrepareRequest
from drivetrain.interfaces.norms import narrow_inputs
from drivetrain.memory.activations import ActivationCheckpointing, checkpoint_activations
from drivetrain.parallel.attention import GatheringAttention, SwappingAttention
from drivetrain.parallel.process_group import ProcessGroupHandle, init_process_group
from drivetrain.parallel.sequences import divide_sequences
from drivetrain.specs import Capability
from drivetrain_fsdp.accumulated import clear_gradients, gradients_so_far, put_gradients
from drivetrain_fsdp.checks import check_model, check_unit, ignored_parameters
from drivetrain_fsdp.materialize import Start, fill, find_start, replace_parameter
from drivetrain_fsdp.mesh import Mesh, build_mesh, mesh_sizes
from drivetrain_fsdp.options import FullyShardedDataParallelPlugin
from drivetrain_fsdp.precise import Precise
from drivetrain_fsdp.shards import cut_like, local, total_norm
from drivetrain_fsdp.strategy import choose_strategy
from drivetrain_fsdp.tensor_parallel import divide_layers
from drivetrain_fsdp.units import expected_collectives, set_prefetching, units_of
from drivetrain_fsdp.wrapping import choose_units

__all__ = ["FSDPBackend"]


class FSDPBackend(Backend):
    """Parameters, gradients and optimizer state are sharded by ``fully_shard``; parameters are whole only around their use.

    Example:
        >>> from drivetrain.interfaces import Backend
        >>> issubclass(FSDPBackend, Backend)
        True
    """

    _group: ProcessGroupHandle | None = None
    _mesh: Mesh | None = None
    #: The settings with the strategy that was found, where they say "auto".
    _chosen: FullyShardedDataParallelPlugin | None = None
    keeps_own_gradients = True
    #: Whether gradients were kept on each process for a while, beside the shards' own.
    _keeps_gradients = False

    # -- processes ---------------------------------------------------------------------------------------------------------

    @property
    def options(self) -> FullyShardedDataParallelPlugin:
        """The settings."""
        return self._chosen or self.context.options or FullyShardedDataParallelPlugin()

    @property
    def mesh(self) -> Mesh:
        """The mesh of processes."""
        assert self._mesh is not None, "setup() makes it"
        return self._mesh

    @property
    def _models(self) -> list[torch.nn.Module]:
        """The prepared models that are still there, in order."""
        return list(self._sharded)

    def setup(self) -> None:
        """Bring up the process group, or use the one that is there; then the mesh."""
        super().setup()
        sizes = mesh_sizes(self.context.process, self.options, self.context.handlers.get("ParallelismConfig"))
        handler = self.context.handlers.get("InitProcessGroupKwargs")
        given = handler.explicit() if handler is not None else {}
        self._group = init_process_group(
            self.context.process,
            device=self.device,
            device_backend=self.context.device.spec.communication_backend,
            debug=self.context.debug,
            **given,
        )
        self._sharded: weakref.WeakKeyDictionary[torch.nn.Module, None] = weakref.WeakKeyDictionary()
        self._plans: list[dict[str, str]] = []
        self._mesh = build_mesh(self.device, sizes)
        if sizes["tp"] > 1:  # what isn't divided has a gradient of its own on each of them
            self.precision.overflow_group = dist.group.WORLD

    def teardown(self) -> None:
        """Destroy the process group, and with it the mesh's, if it was made here."""
        if self._group is not None:
            self._group.destroy()

    @property
    def device_mesh(self) -> Any:
        """All dimensions of more than one process, by name."""
        return self.mesh.whole

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """Processes that hold different rows; None for all."""
        return None if self.data_world_size == self.context.process.world_size else self.mesh.data

    @property
    def data_rank(self) -> int:
        """This process's rank among those."""
        return dist.get_rank(self.mesh.data)

    @property
    def data_world_size(self) -> int:
        """Replicas times shards."""
        return self.mesh.sizes["dp_replicate"] * self.mesh.sizes["dp_shard"]

    @property
    def gradient_group(self) -> dist.ProcessGroup | None:
        """Those, and the ones that hold other parts of the same sequences."""
        return None if self.gradient_world_size == self.context.process.world_size else self.mesh.gradients

    @property
    def gradient_world_size(self) -> int:
        """Number of processes over which gradients are averaged."""
        return self.data_world_size * self.mesh.sequence_parts

    # -- objects -----------------------------------------------------------------------------------------------------------

    def prepare(self, request: PrepareRequest) -> Prepared:
        """As usual, once the strategy is known."""
        if self.options.sharding_strategy == "AUTO" and not all(request.evaluation):
            self._chosen = choose_strategy(request, self.context, self.options)
            self._mesh = build_mesh(self.device, mesh_sizes(self.context.process, self._chosen, None))
        return super().prepare(request)

    def prepare_model(self, model: torch.nn.Module, *, device_placement: bool, evaluation: bool) -> torch.nn.Module:
        """As usual, but that units are compiled one by one, without the hooks that gather them."""
        model = self.precision.convert_module(model)
        model = self.place_model(model, device_placement)
        if not evaluation:
            self.recompute_activations(model)
        if self.context.compiler is not None:
            for unit in choose_units(model, self.options) or [model]:
                self.context.compiler.inside_hooks(unit)
        return self.wrap_model(self.precision.wrap_forward(model), evaluation=evaluation)

    def place_model(self, model: torch.nn.Module, device_placement: bool) -> torch.nn.Module:
        """Nothing is moved yet: units are, one by one, so that the whole model is never on the device."""
        check_model(model, self._models, self.device, device_placement=device_placement)
        return model

    def recompute_activations(self, model: torch.nn.Module) -> None:
        """Also by the switch that Accelerate's plugin has: all units."""
        given = self.context.activations
        if given is None and self.options.activation_checkpointing:
            units = choose_units(model, self.options)
            checkpoint_activations(model, ActivationCheckpointing(), units)
            return
        super().recompute_activations(model)

    def wrap_model(self, model: torch.nn.Module, *, evaluation: bool) -> torch.nn.Module:
        """Shard each unit, then what is left."""
        start = find_start(model, self.options)
        self._divide_layers(model, start)
        ignored = ignored_parameters(model, self.options)
        for parameter in ignored:
            parameter.data = parameter.data.to(self.device)
        settings = self._settings(ignored)
        policy = settings["mp_policy"]
        precise = Precise(model, policy, self.precision, ignored)
        units = precise.with_units(choose_units(model, self.options, ignored))
        for unit in [*units, model]:
            self._shard(unit, ignored, {**settings, "mp_policy": precise.policy_of(unit)}, start)
        if policy.param_dtype is not None:
            narrow_inputs(model, self.device.type)
        if start is Start.EMPTY:
            shards_on = torch.device("cpu") if self.options.cpu_offload else self.device
            fill(model, self.device, shards_on, self.options.param_init_fn)
        set_prefetching(units, self.options)
        self._sharded[model] = None
        return model

    def _divide_layers(self, model: torch.nn.Module, start: Start) -> None:
        mesh = self.mesh.of("tp")
        if mesh is None:
            return
        if start is Start.RANK_0:
            raise UnsupportedError(
                "With tp_size above 1, rank 0 can't be the only one that has weights: make the model on every process, or on none "
                "(init_empty_weights)."
            )
        if start is Start.WHOLE and self.options.sync_module_states:
            for parameter in model.parameters():
                dist.broadcast(parameter.data, src=0)
        config = self.context.handlers["ParallelismConfig"]
        self._plans.append(divide_layers(model, mesh, config.tp_plan))

    def _settings(self, ignored: set[torch.nn.Parameter]) -> dict[str, Any]:
        return {
            "mesh": self.mesh.shards,
            "mp_policy": self._precision_policy(),
            "offload_policy": self._offload_policy(),
            "reshard_after_forward": self.options.reshard(),
            "ignored_params": ignored or None,
        }

    def _shard(
        self, unit: torch.nn.Module, ignored: set[torch.nn.Parameter], settings: dict[str, Any], start: Start
    ) -> None:
        check_unit(unit, _unsharded(unit, ignored))
        if start is not Start.EMPTY:
            for parameter in _unsharded(unit, ignored):
                self._place(unit, parameter, from_rank_0=start is Start.RANK_0)
        fully_shard(unit, **settings)

    def _place(self, unit: torch.nn.Module, parameter: torch.nn.Parameter, *, from_rank_0: bool) -> None:
        """Move one parameter to the device, with rank 0's values."""
        if parameter.is_meta:
            data = torch.empty_like(parameter, device=self.device)
        else:
            data = parameter.data.to(self.device).contiguous()
        if dist.get_world_size() > 1 and (from_rank_0 or self.options.sync_module_states):
            dist.broadcast(data, src=0)
        if parameter.is_meta:
            replace_parameter(unit, parameter, data)
        else:
            parameter.data = data

    def _precision_policy(self) -> MixedPrecisionPolicy:
        given = self.options.mixed_precision_policy
        if isinstance(given, dict):
            dtypes: dict[str, Any] = {k: getattr(torch, v) if isinstance(v, str) else v for k, v in given.items()}
            return MixedPrecisionPolicy(**dtypes)
        dtype = self.precision.compute_dtype
        if dtype not in (torch.bfloat16, torch.float16):
            return MixedPrecisionPolicy()
        # Autocast goes on choosing what is computed in which dtype; outputs are float32 by the precision.
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def _offload_policy(self) -> OffloadPolicy:
        if not self.options.cpu_offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.device.type != "cpu")

    def place_state(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Cut like the parameter."""
        if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or value.shape != parameter.shape:
            return super().place_state(parameter, value)
        return cut_like(value, parameter)

    def prepare_optimizer(self, optimizer: Any) -> Any:
        """Parameters on different meshes can't be updated by one kernel."""
        optimizer = super().prepare_optimizer(optimizer)
        for group in getattr(optimizer, "param_groups", ()):
            meshes = {id(p.device_mesh) if isinstance(p, DTensor) else 0 for p in group["params"]}
            if len(meshes) > 1 and "foreach" in group and not group.get("fused"):
                group["foreach"] = False
        return optimizer

    def parameter_names(self, models: Sequence[torch.nn.Module]) -> dict[int, str]:
        """Names of the shards, also where a root unit is still whole after an evaluation."""
        for model in models:
            self._reshard(model)
        return super().parameter_names(models)

    def _reshard(self, model: torch.nn.Module) -> None:
        for unit in units_of(model):
            unit.reshard()

    # -- one accumulation window -------------------------------------------------------------------------------------------

    def set_gradient_sync(self, model: torch.nn.Module, enabled: bool) -> None:
        """Without, gradients of whole parameters are kept on each process."""
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(enabled)
            self._keeps_gradients = self._keeps_gradients or not enabled

    def normalize_gradients(self, parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        """Each process multiplies what it holds."""
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor.to(grads[0].device))

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip by the norm over all shards, also of parameters on different meshes."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = total_norm(grads, float(norm_type), self.device)
        if grads:
            parts = [local(g) for g in grads]
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(parts, factor.to(parts[0].device))
        return norm

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Each process clips what it holds."""
        self.require(Capability.CLIP_VALUE, "clip_grad_value_")
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        grads = [local(p.grad) for p in parameters if p.grad is not None]
        if grads:
            torch._foreach_clamp_min_(grads, -clip_value)
            torch._foreach_clamp_max_(grads, clip_value)

    def zero_grad(self, optimizer: Any, set_to_none: bool = True) -> None:
        """Also what isn't reduced yet: a window that is dropped leaves nothing behind."""
        super().zero_grad(optimizer, set_to_none)
        if self._keeps_gradients:
            shards = {id(p) for p in self.optimizer_parameters(optimizer)}
            for model in self._models:
                clear_gradients(model, shards)

    def expected_collectives(self) -> dict[str, dict[str, int]]:
        """Gathers of each unit in forward, and in backward where it was sharded again; reductions at the window's end."""
        return expected_collectives(self._models, self.mesh, self.options)

    def context_parallel(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], keep: set[torch.Tensor]
    ) -> contextlib.AbstractContextManager[Any]:
        """Divide sequences over the mesh's ``cp`` or ``sp``."""
        for name, attention in (("cp", GatheringAttention), ("sp", SwappingAttention)):
            mesh = self.mesh.of(name)
            if mesh is not None:
                return divide_sequences(attention(mesh.get_group()), buffers, dims, keep)
        return super().context_parallel(buffers, dims, keep)

    # -- state under canonical names ---------------------------------------------------------------------------------------

    def load_model_state(
        self, model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load shards, or whole tensors of which each process takes its part."""
        self._reshard(model)
        here = model.state_dict()
        fitting = {
            name: cut_like(value, template)
            if isinstance(template := here.get(name), DTensor)
            and isinstance(value, torch.Tensor)
            and not isinstance(value, DTensor)
            and value.shape == template.shape
            else value
            for name, value in state.items()
        }
        return super().load_model_state(model, fitting, strict=strict)

    def window_gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Those of the shards, or this process's own where they aren't reduced yet."""
        self._reshard(model)
        local_ones = gradients_so_far(model)
        found = super().window_gradients(model)
        return found | {n: local_ones[id(p)] for n, p in model.named_parameters() if id(p) in local_ones}

    def load_window_gradients(self, model: torch.nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Gradients of whole parameters are kept until the window's end, where they are reduced."""
        self._reshard(model)
        super().load_window_gradients(model, {n: g for n, g in gradients.items() if isinstance(g, DTensor)})
        own = {
            id(p): gradients[n]
            for n, p in model.named_parameters()
            if n in gradients and not isinstance(gradients[n], DTensor)
        }
        put_gradients(model, own, self.device)
        self._keeps_gradients = self._keeps_gradients or bool(own)

    @contextlib.contextmanager
    def full_parameters(self, model: torch.nn.Module, *, write: bool = False) -> Iterator[torch.nn.Module]:
        """Gather all units; with ``write``, rank 0's values are cut into shards afterwards."""
        units = units_of(model)
        for unit in units:
            unit.unshard()
        try:
            yield model
            changed = {n: p.detach().clone() for n, p in model.named_parameters()} if write else {}
        finally:
            for unit in units:
                unit.reshard()
        if write:
            for value in changed.values():
                if not isinstance(value, DTensor):
                    dist.broadcast(value, src=0)
            self.load_model_state(model, changed, strict=False)

    def describe(self) -> dict[str, str]:
        """The strategy, the mesh, and the units."""
        facts = {
            "sharding": self.options.sharding_strategy,
            "mesh": " x ".join(f"{n}={s}" for n, s in self.mesh.sizes.items() if s > 1) or "one process",
        }
        for i, model in enumerate(self._models):
            name = f"model {i}" if len(self._models) > 1 else "units"
            facts[name] = f"{len(units_of(model))} of {type(model).__name__}"
        for plan in self._plans:
            styles = Counter(plan.values())
            facts["layers divided"] = ", ".join(f"{n} {style}" for style, n in sorted(styles.items()))
        return facts


def _unsharded(module: torch.nn.Module, ignored: set[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [p for p in module.parameters() if not isinstance(p, DTensor) and p not in ignored]
