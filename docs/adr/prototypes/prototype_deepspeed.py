"""DeepSpeed's engine behind the Backend interface: it owns backward, clipping, step and precision; core owns the window."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

from drivetrain.errors import ConfigurationError, NotPreparedError, UnsupportedError
from drivetrain.interfaces import Backend, Precision, Prepared, PrepareRequest, Shards, WindowView
from drivetrain.parallel.process_group import ProcessGroupHandle, init_process_group

# Compiled at each init_distributed otherwise, and used by inference alone.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class EngineFloat16(Precision):
    """fp16 as the engine does it: parameters, scale and overflow are its own, and core scales nothing.

    Args:
        chosen: The precision that was asked for.
    """

    compute_dtype = torch.float16

    def __init__(self, chosen: Precision) -> None:
        super().__init__(chosen.spec, device_type=chosen.device_type, options=chosen.options)
        self.engine: Any = None

    def state_dict(self) -> dict[str, Any]:
        """The scale, which lives in the engine's optimizer."""
        return {"scale": float(self.engine.optimizer.cur_scale)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            self.engine.optimizer.cur_scale = state["scale"]


class DeepSpeedBackend(Backend):
    """One engine, of one model and the torch optimizer that updates it."""

    _group: ProcessGroupHandle | None = None
    _engine: Any = None
    _skipped = False
    _complete = True
    _groups: list[list[torch.Tensor]]

    def __init__(self, spec: Any, context: Any) -> None:
        super().__init__(spec, context)
        if context.precision.compute_dtype is torch.float16:
            self.precision = EngineFloat16(context.precision)
        self.stage = 2 if context.options is None else context.options.stage

    def setup(self) -> None:
        super().setup()
        self._group = init_process_group(
            self.context.process,
            device=self.device,
            device_backend=self.context.device.spec.communication_backend,
        )

    def teardown(self) -> None:
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
        if self._group is not None:
            self._group.destroy()

    # -- objects -----------------------------------------------------------------------------------------------------------

    def prepare(self, request: PrepareRequest) -> Prepared:
        if not request.models and not request.optimizers:
            return Prepared(schedulers=list(request.schedulers))
        if len(request.models) != 1 or len(request.optimizers) != 1 or self._engine is not None:
            raise NotPreparedError("One model and its optimizer make an engine: give both to one call of prepare().")
        (model,), (optimizer,) = request.models, request.optimizers
        known = {id(p) for p in model.parameters()}
        if optimizer.state or not all(id(p) in known for g in optimizer.param_groups for p in g["params"]):
            raise UnsupportedError("The optimizer must be a new one, of this model's parameters alone.")
        # The engine replaces the groups' parameters by flat shards. Schedulers stay core's: they write into the same groups.
        self._groups = [list(g["params"]) for g in optimizer.param_groups]
        self._engine, inner, _, _ = deepspeed.initialize(
            model=self.precision.wrap_forward(self.precision.convert_module(model).to(self.device)),
            optimizer=optimizer,
            config=self._config(request),
            dist_init_required=False,
        )
        if isinstance(self.precision, EngineFloat16):
            self.precision.engine = self._engine
        return Prepared(models=[self._engine], optimizers=[inner], schedulers=list(request.schedulers))

    def _config(self, request: PrepareRequest) -> dict[str, Any]:
        sizes = [size for loader in request.loaders if (size := getattr(loader, "batch_size", None))]
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": sizes[0] if sizes else 1,
            "gradient_accumulation_steps": 1,  # core's windows may be shorter; it says where they end
            "gradient_clipping": 0.0,  # 1.0 by default
            "zero_optimization": {"stage": self.stage},
        }
        if isinstance(self.precision, EngineFloat16):
            if not self.stage:
                raise UnsupportedError("At stage 0 the engine's fp16 optimizer is another one: use stage 1.")
            config["fp16"] = {"enabled": True, "auto_cast": True, "initial_scale_power": 8, "hysteresis": 1}
        return config

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.module if model is self._engine else model  # type: ignore[return-value]

    def optimizer_parameters(self, optimizer: Any) -> list[torch.Tensor]:
        return [p for group in self._groups for p in group]

    # -- one accumulation window -------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, window: WindowView, **kwargs: Any) -> None:
        engine = self._engine
        # At stages 1 and 2 a second backward after the boundary's would overwrite what that one reduced: the boundary is put off
        # until gradients are needed, so that several losses per micro-batch and windows cut by the script work.
        self._complete = self.stage not in (1, 2)
        engine.set_gradient_accumulation_boundary(window.last and self._complete)
        engine.backward(loss, scale_wrt_gas=False, **kwargs)

    def _complete_gradients(self) -> None:
        if self._complete:
            return
        engine = self._engine
        engine.set_gradient_accumulation_boundary(True)
        if self.stage == 1:
            engine.allreduce_gradients()
        else:
            engine.optimizer.finalize_gradient_accumulation_boundary()
        self._complete = True

    def normalize_gradients(self, parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        if self.stage:  # the engine divides gradients and norm by this when it steps
            zero = self._engine.optimizer
            zero.override_loss_scale(zero.cur_scale / float(factor))
        else:
            super().normalize_gradients(parameters, factor)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """The norm now, by the engine's own functions; the clipping when it steps, by this maximum."""
        given = list(parameters)
        if not self.stage:
            return super().clip_grad_norm_(given, max_norm, norm_type)
        if norm_type != 2.0 or {id(p) for p in self.optimizer_parameters(None)} - {id(p) for p in given}:
            raise ConfigurationError("The engine clips by the 2-norm of all of the optimizer's parameters, no other.")
        self._complete_gradients()
        zero = self._engine.optimizer
        groups = zero._get_norm_groups() if self.stage == 3 else [zero.scaled_global_norm()]
        scaled = combine_grad_norm_groups(groups)
        zero.clip_grad = 0.0 if max_norm == float("inf") else max_norm
        return torch.where(scaled < 0, float("inf"), scaled / zero.loss_scale)  # -1 stands for an overflow

    def optimizer_step(self, optimizer: Any, closure: Any | None = None) -> Any:
        if closure is not None:
            raise UnsupportedError("The engine steps without a closure.")
        self._complete_gradients()
        self._engine.step()
        self._skipped = not self._engine.was_step_applied()
        if self.stage:  # both held for this step
            self._engine.optimizer.clip_grad = 0.0
            self._engine.optimizer.custom_loss_scaler = False

    def step_was_skipped(self, optimizer: Any) -> bool:
        return self._skipped

    def end_window(self) -> None:
        """The engine has adapted its scale in its step."""

    # -- state under canonical names: nothing is put together ------------------------------------------------------------------

    def _shards(self, parameter: Any, key: str | None = None) -> Shards | None:
        """What this process has of a parameter's fp32 master, or of one of its optimizer states; None if it isn't trained."""
        if self.stage == 3:
            if not parameter.requires_grad:
                return None
            values = (
                safe_get_local_fp32_param(parameter) if key is None else safe_get_local_optimizer_state(parameter, key)
            )
            start = min(self.context.process.rank * values.numel(), parameter.ds_numel)
            values = values[: parameter.ds_numel - start]  # the last ones are padded
            return Shards.of_range(values, start=start, shape=parameter.ds_shape)
        if not hasattr(parameter, "_hp_mapping"):
            return None
        mapping = parameter._hp_mapping
        if mapping is None:  # all of it is on other processes
            return Shards.of_range(torch.empty(0, device=self.device), start=0, shape=parameter.shape)
        return Shards.of_range(
            mapping.get_hp_fragment(key), start=mapping.lp_fragment_address.start, shape=parameter.shape
        )

    def _set_shards(self, parameter: Any, value: Shards, key: str | None = None) -> None:
        values = value.flat()
        if self.stage == 3:
            padded = torch.zeros_like(parameter.ds_tensor, dtype=values.dtype)
            padded[: values.numel()] = values
            if key is None:
                safe_set_local_fp32_param(parameter, padded)
            else:
                safe_set_local_optimizer_state(parameter, padded, key)
        elif parameter._hp_mapping is not None:
            parameter._hp_mapping.get_hp_fragment(key).data.copy_(values)

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        module = self.unwrap(model)
        state = dict(module.state_dict())
        if self.stage:
            known: dict[int, Shards | None] = {}  # tied parameters are one value
            for name, parameter in module.named_parameters(remove_duplicate=False):
                if id(parameter) not in known:
                    known[id(parameter)] = self._shards(parameter)
                state[name] = known[id(parameter)] or state[name]
        return state

    def load_model_state(
        self, model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        module = self.unwrap(model)
        if not self.stage:
            return super().load_model_state(model, state, strict=strict)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        sharded = {n: v for n, v in state.items() if isinstance(v, Shards)}
        rest = {n: v for n, v in state.items() if n not in sharded}
        result = module.load_state_dict(rest, strict=False)
        for name, value in sharded.items():  # what can fail on one process comes before the first collective
            self._set_shards(parameters[name], value)
        for name, value in sharded.items():
            whole = value.full_tensor()  # one at a time, for the copy that forward uses
            with deepspeed.zero.GatheredParameters([parameters[name]], modifier_rank=0, enabled=self.stage == 3):
                parameters[name].data.copy_(whole)
        return [n for n in result.missing_keys if n not in sharded], list(result.unexpected_keys)

    def state_layout(self, parameter: torch.Tensor) -> Any:
        return (self._shards(parameter) if self.stage else None) or parameter

    def optimizer_state(self, optimizer: Any, models: Sequence[torch.nn.Module]) -> dict[str, Any]:
        if not self.stage:
            return super().optimizer_state(optimizer, models)
        names = self.parameter_names(models)
        state: dict[str, dict[str, Any]] = {}
        for flat, parameters in self._flat_buffers():
            values = optimizer.optimizer.state.get(flat, {})
            for parameter in parameters:
                state[names[id(parameter)]] = {
                    key: self._shards(parameter, key) if _is_sharded(value, flat) else value
                    for key, value in values.items()
                }
        groups = [
            {**{k: v for k, v in g.items() if k != "params"}, "params": [names[id(p)] for p in parameters]}
            for g, parameters in zip(optimizer.param_groups, self._groups, strict=True)
        ]
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(self, optimizer: Any, models: Sequence[torch.nn.Module], state: Mapping[str, Any]) -> None:
        if not self.stage:
            return super().load_optimizer_state(optimizer, models, state)
        names = self.parameter_names(models)
        for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})
        for flat, parameters in self._flat_buffers():
            here = optimizer.optimizer.state[flat]
            for parameter in parameters:
                for key, value in state["state"].get(names[id(parameter)], {}).items():
                    if not isinstance(value, Shards):
                        here[key] = value
                    elif key not in here:
                        here[key] = torch.zeros_like(flat)
        if self.stage < 3:
            optimizer._lazy_init_hp_params_optimizer_state()  # links the parameters to parts of these buffers
        for parameter in self.optimizer_parameters(None):
            for key, value in state["state"].get(names[id(parameter)], {}).items():
                if isinstance(value, Shards):
                    self._set_shards(parameter, value, key)
        return None

    def _flat_buffers(self) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
        """The flat fp32 shards that the inner optimizer updates, each with the parameters that it has parts of, here or elsewhere."""
        zero = self._engine.optimizer
        if self.stage == 3:
            return list(zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True))
        return list(zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True))


def _is_sharded(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == flat.shape
