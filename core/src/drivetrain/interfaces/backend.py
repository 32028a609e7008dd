"""How models, optimizers and gradients live across processes."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain.interfaces.device import Device
from drivetrain.interfaces.precision import Precision
from drivetrain.specs import BackendSpec, Capability, ProcessInfo

if TYPE_CHECKING:
    from drivetrain.memory.activations import ActivationCheckpointing

__all__ = ["Backend", "BackendContext", "PrepareRequest", "Prepared", "WindowView"]


class WindowView(Protocol):
    """What a backend sees of the accumulation window that a micro-batch belongs to."""

    #: Position of the micro-batch in its window, from 0.
    index: int
    #: Whether the window ends with this micro-batch: gradients are reduced, optimizers step.
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendContext:
    """What a backend is made with. Everything here was resolved; a backend reads no environment variable.

    Args:
        process: Who this process is.
        device: The device type's functions.
        torch_device: Where this process computes.
        precision: Dtype and scaling; the backend owns it and decides where it applies.
        options: The backend's own options object (of ``spec.options``), or None if the spec has none.
        named_options: Where several were given, all of them by name; ``options`` is the first.
        handlers: Other options objects that the user gave, by class name (``InitProcessGroupKwargs``, ``AutocastKwargs``).
        gradient_accumulation_steps: Micro-batches per window.
        debug: Collectives are to be checked as thoroughly as can be, at the cost of speed.
        compiler: Called with a module after it was placed and before it is wrapped; compiles it (regionally) in place; its
            ``inside_hooks`` compiles one module without its hooks. None where models aren't compiled.
        activations: Which blocks compute their activations again in backward (an `ActivationCheckpointing`); None for none.
    """

    process: ProcessInfo
    device: Device
    torch_device: torch.device
    precision: Precision
    options: Any = None
    named_options: Mapping[str, Any] = field(default_factory=dict)
    handlers: Mapping[str, Any] = field(default_factory=dict)
    gradient_accumulation_steps: int = 1
    debug: bool = False
    compiler: Any = None
    activations: ActivationCheckpointing | None = None


@dataclass(slots=True, kw_only=True)
class PrepareRequest:
    """All objects of one ``prepare`` call, by kind, in the order given. Loaders are for information (batch sizes): core prepares them.

    Args:
        models: Models, not prepared yet.
        optimizers: torch optimizers (or the backend's own placeholders).
        schedulers: Learning-rate schedulers (or placeholders).
        loaders: The user's data loaders.
        device_placement: For each model, whether to move it to the device.
        evaluation: For each model, whether it is only evaluated: no gradient synchronisation is set up.
    """

    models: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    loaders: Sequence[Any] = ()
    device_placement: Sequence[bool] = ()
    evaluation: Sequence[bool] = ()


@dataclass(slots=True, kw_only=True)
class Prepared:
    """What takes the place of the request's objects, each list as long as the request's."""

    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)


class Backend:
    """How models, optimizers and gradients live across processes. It owns a `Precision`.

    The base class trains in one process on one device; a subclass overrides what differs. No method is called through pluggy:
    from ``prepare`` on, core holds the object and calls it.

    Args:
        spec: The descriptor.
        context: What was resolved.
    """

    def __init__(self, spec: BackendSpec, context: BackendContext) -> None:
        self.spec = spec
        self.context = context
        self.precision = context.precision
        self.device = context.torch_device
        # What took the place of a parameter, for as long as something (an optimizer) holds that one.
        self._successors: Any = WeakTensorKeyDictionary()
        self._earlier: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        #: The options that count for what is prepared next.
        self.selected_options = context.options

    # -- processes ---------------------------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Make this process ready: current device, process group. Only checks variables, never sets them."""
        self.context.device.activate(self.device)

    def teardown(self) -> None:
        """Undo `setup`; called by ``end_training``. Idempotent."""

    def select_options(self, name: str) -> None:
        """Let others of the options that were given by name count, for what is prepared from now on.

        Raises:
            ConfigurationError: If none has that name.
        """
        self.selected_options = self.options_named(name)

    def options_named(self, name: str) -> Any:
        """One of the options that were given by name.

        Raises:
            ConfigurationError: If none has that name.
        """
        named = self.context.named_options
        if name not in named:
            known = (
                f"There are {', '.join(map(repr, named))}."
                if named
                else "The Accelerator was given one object, not a dict of several."
            )
            raise ConfigurationError(f"No options of the backend {self.spec.name!r} are called {name!r}. {known}")
        return named[name]

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """Processes that hold different data; None for all (or when there is one process)."""
        return None

    @property
    def data_rank(self) -> int:
        """This process's rank among those that hold different data."""
        return self.context.process.rank

    @property
    def data_world_size(self) -> int:
        """Number of processes that hold different data: N of every mean over the global batch."""
        return self.context.process.world_size

    @property
    def device_mesh(self) -> Any:
        """The mesh that processes form (a ``torch.distributed.DeviceMesh`` with named dimensions); None where they form none."""
        return None

    @property
    def gradient_group(self) -> dist.ProcessGroup | None:
        """Processes over which gradients are averaged: those that hold different data, and those that hold parts of the same rows.

        Item counts (``backward(loss, weight=n)``) are summed over it. A backend that divides sequences says here with whom.
        """
        return self.data_group

    @property
    def gradient_world_size(self) -> int:
        """Number of processes in `gradient_group`."""
        return self.data_world_size

    @property
    def micro_batches_per_call(self) -> int:
        """Micro-batches that one call of a prepared model takes: all of a window's where a schedule owns forward and backward, else one.

        Loaders hand out so many at once, joined along the rows, and windows are that many times shorter. The call runs the schedule and
        returns the mean loss, as a tensor whose autograd function multiplies the gradients so far by what arrives in `backward`.
        """
        return self.context.gradient_accumulation_steps if Capability.OWNS_SCHEDULE in self.spec.capabilities else 1

    # -- objects -----------------------------------------------------------------------------------------------------------

    def prepare(self, request: PrepareRequest) -> Prepared:
        """Prepare all objects at once.

        Optimizers update the parameters of the prepared models afterwards: where a model's parameters were replaced (by shards, by
        ones on a device that can't share memory with the old ones), their groups and state are pointed at the new ones.
        """
        models = []
        for model, placement, evaluation in zip(
            request.models, request.device_placement, request.evaluation, strict=True
        ):
            before = dict(model.named_parameters(remove_duplicate=False))
            prepared = self.prepare_model(model, device_placement=placement, evaluation=evaluation)
            models.append(prepared)
            for name, parameter in self.unwrap(prepared).named_parameters(remove_duplicate=False):
                if name in before and before[name] is not parameter:
                    self._successors[before[name]] = parameter
        if self._successors:
            for optimizer in list(self._earlier):  # prepared before their models
                self.prepare_optimizer(optimizer)
        optimizers = [self.prepare_optimizer(o) for o in request.optimizers]
        self._earlier.update(o for o in request.optimizers if isinstance(o, torch.optim.Optimizer))
        return Prepared(models=models, optimizers=optimizers, schedulers=list(request.schedulers))

    def prepare_model(self, model: torch.nn.Module, *, device_placement: bool, evaluation: bool) -> torch.nn.Module:
        """Convert, place, make recompute, compile, wrap one model, in this order."""
        model = self.precision.convert_module(model)
        model = self.place_model(model, device_placement)
        model = self.precision.wrap_forward(model)
        if not evaluation:
            self.recompute_activations(model)
        if self.context.compiler is not None:
            self.context.compiler(model)
        return self.wrap_model(model, evaluation=evaluation)

    def place_model(self, model: torch.nn.Module, device_placement: bool) -> torch.nn.Module:
        """Move a model to the device, if it is to be moved.

        Raises:
            UnsupportedError: For weights on the meta device, which this backend has no way to fill.
        """
        empty = [n for n, t in itertools.chain(model.named_parameters(), model.named_buffers()) if t.is_meta]
        if empty:
            raise UnsupportedError(
                f"{', '.join(empty[:3])} of {type(model).__name__} have no values: the model was made under init_empty_weights(). The backend "
                f"{self.spec.name!r} keeps whole models: make it without, or use a backend that shards."
            )
        return model.to(self.device) if device_placement else model

    def recompute_activations(self, model: torch.nn.Module) -> None:
        """Make blocks of a model compute their activations again in backward, where that was asked for."""
        if self.context.activations is not None:
            from drivetrain.memory.activations import checkpoint_activations

            checkpoint_activations(model, self.context.activations)

    def wrap_model(self, model: torch.nn.Module, *, evaluation: bool) -> torch.nn.Module:
        """Set up gradient synchronisation for a model that is in place; `unwrap` undoes it."""
        return model

    def prepare_optimizer(self, optimizer: Any) -> Any:
        """Prepare one optimizer after its models; here: it updates the parameters that these have now, and its state fits them."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        for group in optimizer.param_groups:
            for i, old in enumerate(group["params"]):
                new = self._successors.get(old)
                if new is not None:
                    group["params"][i] = new
                    if old in optimizer.state:
                        optimizer.state[new] = optimizer.state.pop(old)
        for parameter, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim > 0:
                    state[name] = self.place_state(parameter, value)
        if optimizer not in self._earlier:
            self.precision.adopt_optimizer(optimizer)
        return optimizer

    def place_state(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """One tensor of a parameter's optimizer state as it has to be beside it: on its device, sharded like it."""
        return value if value.device == parameter.device else value.to(parameter.device)

    def unwrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """The user's model under what `wrap_model` put around it."""
        return model

    def forget(self) -> None:
        """All prepared objects were forgotten (``free_memory``): let go of what keeps them here."""

    def optimizer_parameters(self, optimizer: Any) -> list[torch.Tensor]:
        """The parameters of models that an optimizer updates, as the models have them, in the order of its groups.

        A backend whose optimizer works on buffers of its own (flat shards, fp32 copies) says here which parameters they stand for.
        """
        return [p for group in optimizer.param_groups for p in group["params"]]

    # -- one accumulation window -------------------------------------------------------------------------------------------

    def set_gradient_sync(self, model: torch.nn.Module, enabled: bool) -> None:
        """Whether the next forward and backward of ``model`` reduce gradients across processes. Called only when it changes."""

    def backward(self, loss: torch.Tensor, window: WindowView, **kwargs: Any) -> None:
        """Back-propagate a loss that core has weighted already; ``kwargs`` go to ``Tensor.backward``."""
        (self.precision.scale(loss) if self.precision.scales else loss).backward(**kwargs)

    def normalize_gradients(self, parameters: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply accumulated gradients by a 0-d factor on the device, without reading it on the host.

        Called at most once per window, before unscaling, clipping and the step, when losses were weighted with item counts: the factor is
        ``reference * N / (sum of items over the global window)``.
        """
        grads = [p.grad for p in parameters if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    def local_gradients(self, parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What this process has of accumulated gradients, for whoever looks at them: pairs of a parameter and values, of any shape.

        A backend that keeps gradients elsewhere than on parameters gives them here.
        """
        return [(p, _local(p.grad)) for p in parameters if p.grad is not None]

    def unscale_(self, optimizer: Any) -> None:
        """Undo the loss scale in the optimizer's gradients."""
        self.precision.unscale_(optimizer)

    def clip_grad_norm_(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip by the global norm over all shards.

        Returns:
            The true global norm before clipping, a 0-d tensor equal on every rank.
        """
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip each gradient element to ``[-clip_value, clip_value]``."""
        self.require(Capability.CLIP_VALUE, "clip_grad_value_")
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def optimizer_step(self, optimizer: Any, closure: Any | None = None) -> Any:
        """Step the optimizer at a window's end (or skip, see `step_was_skipped`); return what its step returned."""
        return self.precision.step(optimizer, closure)

    def step_was_skipped(self, optimizer: Any) -> bool:
        """Whether the last step of this optimizer was skipped, because of overflow on any process."""
        return self.precision.was_skipped(optimizer)

    def zero_grad(self, optimizer: Any, set_to_none: bool = True) -> None:
        """Clear gradients after a window."""
        optimizer.zero_grad(set_to_none=set_to_none)

    def end_window(self) -> None:
        """All optimizers of the window have stepped."""
        self.precision.update()

    def context_parallel(
        self, buffers: Sequence[torch.Tensor], dims: Sequence[int], keep: set[torch.Tensor]
    ) -> contextlib.AbstractContextManager[Any]:
        """Context in which processes that share sequences hold a part of each; nothing where none do.

        Args:
            buffers: Tensors with a dimension of the sequence, divided in place and put together again.
            dims: That dimension of each.
            keep: Those that stay divided afterwards.
        """
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def join(self, models: Sequence[torch.nn.Module]) -> Iterator[None]:
        """Let ranks run out of batches at different times inside this context."""
        self.require(Capability.UNEVEN_INPUTS, "join_uneven_inputs")
        yield

    def expected_collectives(self) -> dict[str, dict[str, int]]:
        """Collectives that training sends, by name ("all_reduce"), per "micro_batch" (without sync) and per "window"; the kit counts them."""
        return {"micro_batch": {}, "window": {}}

    def read_later(self, tensors: Sequence[torch.Tensor]) -> Future[list[float]]:
        """Snapshot 0-d tensors that may still be being computed, without waiting for the device.

        Later changes of the tensors don't change the result.
        """
        future: Future[list[float]] = Future()
        if all(t.device.type == "cpu" for t in tensors):
            future.set_result([float(t.item()) for t in tensors])
            return future
        return _read_from_device(tensors)

    # -- state under canonical names ---------------------------------------------------------------------------------------

    def model_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """Parameters and persistent buffers by the unwrapped model's names. Collective.

        Sharded values are DTensors, or `Shards` where no DTensor describes what this process holds: it isn't put together here.
        """
        return dict(self.unwrap(model).state_dict())

    def load_model_state(
        self, model: torch.nn.Module, state: Mapping[str, Any], *, strict: bool = True
    ) -> tuple[list[str], list[str]]:
        """Load what `model_state` returned, at this or another world size. May be collective: then what can fail on one process comes first.

        Returns:
            Names that are missing and names that are unexpected; both empty when ``strict``, which raises instead.
        """
        result = self.unwrap(model).load_state_dict(dict(state), strict=strict)
        return list(result.missing_keys), list(result.unexpected_keys)

    def optimizer_state(self, optimizer: Any, models: Sequence[torch.nn.Module]) -> dict[str, Any]:
        """Optimizer state by parameter name.

        Returns:
            ``{"state": {parameter name: {key: value}}, "param_groups": [{..., "params": [parameter names]}]}``, where names of the i-th
            of several models start with ``"{i}."``.
        """
        names = self.parameter_names(models)
        groups = [
            {**{k: v for k, v in g.items() if k != "params"}, "params": [names[id(p)] for p in g["params"]]}
            for g in optimizer.param_groups
        ]
        state = {names[id(p)]: dict(s) for p, s in optimizer.state.items()}
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(self, optimizer: Any, models: Sequence[torch.nn.Module], state: Mapping[str, Any]) -> None:
        """Load what `optimizer_state` returned, at this or another world size; collective as `load_model_state` is."""
        names = self.parameter_names(models)
        order = [names[id(p)] for g in optimizer.param_groups for p in g["params"]]
        index = {name: i for i, name in enumerate(order)}
        saved = [n for g in state["param_groups"] for n in g["params"]]
        if saved != order:
            differing = sorted(set(saved) ^ set(order)) or ["their order"]
            raise UnsupportedError(
                f"The optimizer's parameters differ from the checkpoint's: {', '.join(differing[:5])}. "
                "Build the optimizer with the same parameter groups as the saved one."
            )
        optimizer.load_state_dict(
            {
                "state": {index[n]: s for n, s in state["state"].items()},
                "param_groups": [{**g, "params": [index[n] for n in g["params"]]} for g in state["param_groups"]],
            }
        )

    @contextlib.contextmanager
    def full_parameters(self, model: torch.nn.Module, *, write: bool = False) -> Iterator[torch.nn.Module]:
        """Inside, the model's parameters are whole: for what can't work on shards. Collective.

        Args:
            model: A prepared model.
            write: Keep what the block changes.

        Yields:
            The unwrapped model.
        """
        yield self.unwrap(model)

    #: Whether a process can go on with whole gradients of its own inside a window also where parameters are shards.
    keeps_own_gradients = False

    def window_gradients(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """Gradients of an open accumulation window by parameter name: this process's own; DTensors or `Shards` of what is reduced already."""
        named = self.unwrap(model).named_parameters()
        return {name: p.grad.detach() for name, p in named if p.grad is not None}

    def load_window_gradients(self, model: torch.nn.Module, gradients: Mapping[str, torch.Tensor]) -> None:
        """Go on with gradients that `window_gradients` gave, here or on other processes, and with no others."""
        for name, parameter in self.unwrap(model).named_parameters():
            gradient = gradients.get(name)
            if gradient is None:
                parameter.grad = None
            elif parameter.grad is not None and type(gradient) is type(parameter.grad):
                parameter.grad.copy_(gradient)  # it may be a view into a bucket
            else:
                parameter.grad = self.place_state(parameter, gradient)

    def state_layout(self, parameter: torch.Tensor) -> Any:
        """How optimizer state of a parameter's shape lies on the processes: a DTensor or `Shards` with any values; a plain tensor for whole state.

        `load_optimizer_state` gets it laid out like that.
        """
        return parameter

    def parameter_names(self, models: Sequence[torch.nn.Module]) -> dict[int, str]:
        """Canonical name of each parameter, by ``id``; a tied parameter has its first name."""
        names: dict[int, str] = {}
        for i, model in enumerate(models):
            prefix = f"{i}." if len(models) > 1 else ""
            for name, parameter in self.unwrap(model).named_parameters():
                names.setdefault(id(parameter), prefix + name)
        return names

    # -- for people --------------------------------------------------------------------------------------------------------

    def require(self, capability: Capability, what: str) -> None:
        """Raise `UnsupportedError` unless ``capability`` is declared."""
        if capability not in self.spec.capabilities:
            raise UnsupportedError(
                f"{what} needs the capability {capability.value!r}, which the backend {self.spec.name!r} doesn't have. "
                "`drivetrain plugins --kind backend` lists backends with their capabilities."
            )

    def describe(self) -> dict[str, str]:
        """Facts for ``explain()``: setting to value."""
        return {}


def _local(grad: Any) -> torch.Tensor:
    if hasattr(grad, "to_local"):
        grad = grad.to_local()
    values: torch.Tensor = grad.coalesce().values() if grad.is_sparse else grad
    return values


def _read_from_device(tensors: Sequence[torch.Tensor]) -> Future[list[float]]:
    """One stack and one non-blocking copy per device; the event is waited for when the result is read."""
    by_device: dict[torch.device, list[int]] = {}
    for i, t in enumerate(tensors):
        by_device.setdefault(t.device, []).append(i)
    copies: list[tuple[list[int], torch.Tensor, Any]] = []
    for device, indices in by_device.items():
        stacked = torch.stack(
            [
                tensors[i].detach().reshape(()).to(torch.float64 if device.type == "cpu" else torch.float32)
                for i in indices
            ]
        )
        if device.type == "cpu":
            copies.append((indices, stacked, None))
            continue
        module = torch.get_device_module(device)
        host = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=device.type == "cuda")
        host.copy_(stacked, non_blocking=True)
        event = module.Event()
        event.record()
        copies.append((indices, host, event))
    return _DeviceRead(copies, len(tensors))


class _DeviceRead(Future[list[float]]):
    """A future whose result waits for the copies' events, on the thread that asks for it."""

    def __init__(self, copies: list[tuple[list[int], torch.Tensor, Any]], count: int) -> None:
        super().__init__()
        self._copies = copies
        self._count = count

    def result(self, timeout: float | None = None) -> list[float]:
        if not self.done():
            values = [0.0] * self._count
            for indices, host, event in self._copies:
                if event is not None:
                    event.synchronize()
                for i, value in zip(indices, host.tolist(), strict=True):
                    values[i] = value
            self.set_result(values)
        return super().result(timeout)
