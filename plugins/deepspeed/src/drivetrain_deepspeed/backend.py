"""DeepSpeed's engines behind the Backend interface: they own backward, clipping, step and precision; core owns the window."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from drivetrain.errors import ConfigurationError, NotPreparedError, UnsupportedError
from drivetrain.interfaces import Backend, Prepared, PrepareRequest, WindowView
from drivetrain.parallel.process_group import ProcessGroupHandle, init_process_group
from drivetrain.parallel.sequences import divide_sequences
from drivetrain_deepspeed import communication, state
from drivetrain_deepspeed.building import Builder, PreparedModel
from drivetrain_deepspeed.engine import Engine
from drivetrain_deepspeed.graphs import engines_in
from drivetrain_deepspeed.options import DeepSpeedPlugin
from drivetrain_deepspeed.partitions import Partition
from drivetrain_deepspeed.precision import EnginePrecision
from drivetrain_deepspeed.sequences import SequenceMesh

__all__ = ["DeepSpeedBackend"]


class DeepSpeedBackend(Backend):
    """One engine for each model that is trained.

    Example:
        >>> from drivetrain.interfaces import Backend
        >>> issubclass(DeepSpeedBackend, Backend)
        True
    """

    _group: ProcessGroupHandle | None = None
    _mesh: SequenceMesh | None = None

    def __init__(self, spec: Any, context: Any) -> None:
        super().__init__(spec, context)
        self.precision: EnginePrecision = EnginePrecision(context.precision)
        self._local_rank = communication.LocalRank(context.process, context.torch_device)
        self._engines: list[Engine] = []
        self._prepared: dict[int, PreparedModel] = {}  # by the id of what `prepare` gave
        self._places: dict[int, Partition] = {}  # by the id of a parameter

    # -- processes -------------------------------------------------------------------------------------------------------------

    @property
    def options(self) -> DeepSpeedPlugin:
        """The settings of what is prepared next."""
        return self.selected_options or DeepSpeedPlugin()

    def setup(self) -> None:
        """Bring up the process group, or use the one that is there, and let DeepSpeed use it, too."""
        super().setup()
        communication.choose_accelerator(self.device)
        self.precision.check_device()
        handler = self.context.handlers.get("InitProcessGroupKwargs")
        given = handler.explicit() if handler is not None else {}
        self._group = init_process_group(
            self.context.process,
            device=self.device,
            device_backend=self.context.device.spec.communication_backend,
            debug=self.context.debug,
            **given,
        )
        communication.join()
        config = self.context.handlers.get("ParallelismConfig")
        if config is not None:
            self._mesh = SequenceMesh.make(self.device, config, self.context.process.world_size)
        plugin = self.context.handlers.get("GradientAccumulationPlugin")
        stage = self.options.value_of("zero_stage")
        if stage < 2 and getattr(plugin, "sync_each_batch", False) and self.context.process.rank == 0:
            warnings.warn(
                f"sync_each_batch=True has no effect: DeepSpeed reduces gradients once per window at stage {stage}. Stages 2 and 3 reduce them in each "
                "backward.",
                stacklevel=2,
            )

    def teardown(self) -> None:
        """Take the engines apart; destroy the process group, if it was made here. Idempotent."""
        self.forget()
        self._local_rank.remove()
        if self._group is not None:
            communication.leave()
            self._group.destroy()
            self._group = None

    @property
    def device_mesh(self) -> Any:
        """Processes that read different rows, and those that share sequences; None where no ``ParallelismConfig`` asks for one."""
        return None if self._mesh is None else self._mesh.whole

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """Processes that read different rows; None for all."""
        return None if self._mesh is None or self._mesh.sequence is None else self._mesh.data

    @property
    def data_rank(self) -> int:
        """This process's rank among those."""
        group = self.data_group
        return super().data_rank if group is None else dist.get_rank(group)

    @property
    def data_world_size(self) -> int:
        """Number of processes that read different rows."""
        group = self.data_group
        return super().data_world_size if group is None else dist.get_world_size(group)

    @property
    def gradient_group(self) -> dist.ProcessGroup | None:
        """All: an engine averages gradients over all processes, and items are counted over them."""
        return None

    @property
    def gradient_world_size(self) -> int:
        """Number of processes."""
        return self.context.process.world_size

    def context_parallel(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], keep: set[torch.Tensor]
    ) -> contextlib.AbstractContextManager[Any]:
        """Divide sequences over the processes that share them."""
        attention = None if self._mesh is None else self._mesh.attention()
        if attention is None:
            return super().context_parallel(buffers, dims, keep)
        return divide_sequences(attention, buffers, dims, keep)

    # -- objects ---------------------------------------------------------------------------------------------------------------

    def prepare(self, request: PrepareRequest) -> Prepared:
        """Make an engine of each model and its optimizer."""
        if request.models or request.optimizers:
            self._local_rank.put()
        built = Builder(self, request).build()
        self._prepared |= {id(entry.model): entry for entry in built.models}
        for entry in built.models:
            if entry.partition is not None:
                self._places.update({id(p): entry.partition for p in entry.module.parameters()})
        self._engines += built.engines
        self.precision.scaled += [e.zero for e in built.engines if self.precision.compute_dtype is torch.float16]
        return Prepared(
            models=[entry.model for entry in built.models], optimizers=built.optimizers, schedulers=built.schedulers
        )

    def forget(self) -> None:
        """Take the engines apart."""
        for entry in self._prepared.values():
            if entry.engine is not None:
                entry.engine.destroy()
        communication.forget_modules()
        self._prepared.clear()
        self._places.clear()
        self._engines.clear()
        self.precision.scaled.clear()

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The user's model in an engine."""
        entry = self._prepared.get(id(model))
        return model if entry is None else entry.module

    def _engine(self, optimizer: Any) -> Engine:
        return next(engine for engine in self._engines if engine.optimizer is optimizer)

    def optimizer_parameters(self, optimizer: Any) -> list[torch.Tensor]:
        """Those of the model: the optimizer itself updates buffers of DeepSpeed's."""
        return self._engine(optimizer).parameters

    # -- one accumulation window -----------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, window: WindowView, **kwargs: Any) -> None:
        """Through the engine whose model the loss is of; other engines in the graph follow it."""
        if not self._engines:
            raise NotPreparedError(
                "There is no engine to run backward: DeepSpeed trains models that are prepared together with their optimizer, "
                "accelerator.prepare(model, optimizer, ...)."
            )
        unknown = sorted(kwargs.keys() - {"retain_graph"})
        if unknown:
            raise UnsupportedError(f"DeepSpeed's backward takes no {', '.join(unknown)}. Leave it out.")
        engines = self._engines if len(self._engines) == 1 else engines_in(loss, self._engines)
        if len(engines) > 1 and self.precision.scaled:
            raise UnsupportedError(
                "The loss goes through several models that are trained, and in fp16 each has a loss scale of its own. Freeze those that this loss "
                'isn\'t for (requires_grad_(False)), or use mixed_precision="bf16".'
            )
        if not engines:
            raise ConfigurationError("The loss doesn't depend on any parameter of a prepared model.")
        if kwargs.get("retain_graph") and any(engine.stage == 3 for engine in engines):
            raise UnsupportedError(
                "backward(retain_graph=True): at stage 3 DeepSpeed lets go of parameters in backward, so that no graph can be run twice. Add the losses up, "
                "and call backward once."
            )
        for engine in engines:
            engine.begin_backward()
        with contextlib.ExitStack() as stack:
            for other in engines[1:]:
                stack.enter_context(other.followed())
            engines[0].engine.backward(loss, scale_wrt_gas=False, **kwargs)

    def normalize_gradients(self, parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        """The engine's step divides by the inverse."""
        for engine in self._engines_of(parameters):
            engine.normalize(factor)

    def _engines_of(self, parameters: Iterable[torch.Tensor]) -> list[Engine]:
        given = list(parameters)
        return [engine for engine in self._engines if any(engine.holds(p) for p in given)]

    def unscale_(self, optimizer: Any) -> None:
        """The engine does it."""

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """The norm now; the engine clips when it steps."""
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        engines = self._engines_of(given)
        if not engines:
            return torch.zeros((), device=self.device)
        if len(engines) > 1:
            raise UnsupportedError(
                "clip_grad_norm_ got parameters of several models, and each of DeepSpeed's engines clips its own. Call it once for each model."
            )
        engines[0].refuse_parts(given)
        return engines[0].clip(float(max_norm), float(norm_type))

    def optimizer_step(self, optimizer: Any, closure: Any | None = None) -> Any:
        """Step the engine, and with it a scheduler that the configuration gave it."""
        if closure is not None:
            raise UnsupportedError("DeepSpeed's engine steps without a closure.")
        self._engine(optimizer).step()

    def step_was_skipped(self, optimizer: Any) -> bool:
        """Whether gradients had overflowed on some process."""
        return self._engine(optimizer).skipped

    def zero_grad(self, optimizer: Any, set_to_none: bool = True) -> None:
        """Also what the engine keeps aside of parameters."""
        self._engine(optimizer).zero_grad()

    def end_window(self) -> None:
        """The engine has adapted its scale in its step."""

    def expected_collectives(self) -> dict[str, dict[str, int]]:
        """Reductions of gradients, and what the step sends: the norm, and the weights that others have updated."""
        micro: Counter[str] = Counter()
        window: Counter[str] = Counter()
        for engine in self._engines:
            inside, end = engine.expected_collectives(self.context.process.world_size)
            micro, window = micro + inside, window + end
        return {"micro_batch": dict(micro), "window": dict(window)}

    def local_gradients(self, parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Reduced ones: parts of them at stages 1 to 3."""
        wanted = {id(p) for p in parameters}
        return [pair for engine in self._engines_of(parameters) for pair in engine.gradients() if id(pair[0]) in wanted]

    def window_gradients(self, model: torch.nn.Module) -> dict[str, Any]:
        """As the step will use them; parts of them at stages 1 to 3."""
        engine = next((e for e in self._engines if e.engine is model), None)
        if engine is None:
            return {}
        values = {id(p): g for p, g in engine.gradients()}
        named = engine.engine.module.named_parameters()
        return {n: engine.partition.cut(p, values.get(id(p))) for n, p in named if values and engine.holds(p)}

    # -- state under canonical names -------------------------------------------------------------------------------------------

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Trained parameters in fp32, whatever the engine computes in; parts of them as `Shards`."""
        partition = self._partition(model)
        return super().model_state(model) if partition is None else state.model_state(self.unwrap(model), partition)

    def load_model_state(
        self, model: torch.nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Write each process's part; then all round and gather what forward uses."""
        partition = self._partition(model)
        if partition is None:
            return super().load_model_state(model, state_dict, strict=strict)
        return state.load_model_state(self.unwrap(model), partition, state_dict, strict=strict)

    def _partition(self, model: torch.nn.Module) -> Partition | None:
        entry = self._prepared.get(id(model))
        return None if entry is None else entry.partition

    def optimizer_state(self, optimizer: Any, models: Sequence[torch.nn.Module]) -> dict[str, Any]:
        """Of each parameter, in parts; and of a scheduler that the engine steps."""
        return state.optimizer_state(self._engine(optimizer), self.parameter_names(models))

    def load_optimizer_state(
        self, optimizer: Any, models: Sequence[torch.nn.Module], state_dict: Mapping[str, Any]
    ) -> None:
        """Write each process's part."""
        state.load_optimizer_state(self._engine(optimizer), self.parameter_names(models), state_dict)

    def state_layout(self, parameter: torch.Tensor) -> Any:
        """As the parameter's fp32 values lie."""
        partition = self._places.get(id(parameter))
        return parameter if partition is None else partition.layout(parameter)

    @contextlib.contextmanager
    def full_parameters(self, model: torch.nn.Module, *, write: bool = False) -> Iterator[torch.nn.Module]:
        """Gather all; with ``write``, rank 0's values are taken over."""
        entry = self._prepared.get(id(model))
        if entry is None or entry.partition is None:
            yield self.unwrap(model)
            return
        module, partition = entry.module, entry.partition
        with partition.whole(module):
            yield module
            changed = {n: p.detach().clone() for n, p in module.named_parameters()} if write else {}
        if write:
            for value in changed.values():
                torch.distributed.broadcast(value, src=0)
            for name, parameter in module.named_parameters():
                partition.write(parameter, changed[name])
            partition.refresh()

    def describe(self) -> dict[str, str]:
        """The stage, and what is an engine."""
        facts = {"engine": f"DeepSpeed {deepspeed.__version__}"}
        if self._mesh is not None:
            facts["mesh"] = self._mesh.describe()
        for i, engine in enumerate(self._engines):
            name = f"model {i}" if len(self._engines) > 1 else "model"
            facts[name] = f"{type(engine.engine.module).__name__}, ZeRO stage {engine.stage}"
        return facts
