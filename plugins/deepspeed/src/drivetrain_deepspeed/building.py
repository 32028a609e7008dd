"""Makes engines of what is prepared together."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed.runtime import lr_schedules

from drivetrain.config import GradScalerKwargs
from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain.interfaces import PrepareRequest
from drivetrain_deepspeed.checks import check_config, check_disk, check_engine, check_model
from drivetrain_deepspeed.config import Facts, micro_batch_of, resolve
from drivetrain_deepspeed.engine import Engine
from drivetrain_deepspeed.filling import fill
from drivetrain_deepspeed.matching import match
from drivetrain_deepspeed.partitions import Partition, make_partition
from drivetrain_deepspeed.state import load_optimizer_state

if TYPE_CHECKING:
    from drivetrain_deepspeed.backend import DeepSpeedBackend

__all__ = ["Builder", "Built", "PreparedModel"]

_PRECISIONS: dict[torch.dtype, Any] = {torch.float32: "no", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True, eq=False)
class PreparedModel:
    """What became of one model.

    Args:
        model: What the script gets.
        module: The script's own.
        engine: DeepSpeed's engine; None for a model that is whole and only evaluated.
        partition: Where the engine keeps values.
    """

    model: torch.nn.Module
    module: torch.nn.Module
    engine: Any = None
    partition: Partition | None = None


@dataclass(slots=True)
class Built:
    """What became of a request, in its order.

    Args:
        models: Of each model.
        optimizers: The torch optimizers.
        schedulers: The schedulers.
        engines: Of the models that are trained.
    """

    models: list[PreparedModel] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    engines: list[Engine] = field(default_factory=list)


class Builder:
    """Makes an engine of each model that has an optimizer.

    Args:
        backend: For whom.
        request: What is prepared.
    """

    def __init__(self, backend: DeepSpeedBackend, request: PrepareRequest) -> None:
        self.backend = backend
        self.request = request
        self.precision = backend.precision

    def build(self) -> Built:
        """Make the engines. Collective."""
        request = self.request
        owner = match(request.models, request.optimizers)
        trained = {i: j for j, i in owner.items()}
        built = Built(optimizers=list(request.optimizers), schedulers=list(request.schedulers))
        for i, model in enumerate(request.models):
            if i in trained:
                j = trained[i]
                made = self._train(model, i, request.optimizers[j], built)
                built.engines.append(made)
                built.optimizers[j] = made.optimizer
                built.models.append(PreparedModel(made.engine, model, made.engine, made.partition))
            else:
                built.models.append(self._evaluate(model, i))
        return built

    # -- models ----------------------------------------------------------------------------------------------------------------

    def _train(self, model: torch.nn.Module, number: int, optimizer: Any, built: Built) -> Engine:
        backend, request = self.backend, self.request
        check_model(model, placement=request.device_placement[number], device=backend.device)
        is_client = isinstance(optimizer, torch.optim.Optimizer)
        config = self._config(model, optimizer)
        stage = int(config["zero_optimization"]["stage"])
        schedule = config.pop("scheduler", None)
        groups = [list(g["params"]) for g in optimizer.param_groups] if is_client else []
        carried = _take_state(model, optimizer) if is_client else None
        self._ready(model, config)
        masters: list[torch.Tensor] = []
        if stage == 0 and self.precision.is_low and not _autocasts(config):
            trained = [p.detach() for g in groups for p in g if p.requires_grad]
            masters = [p.to(backend.device, torch.float32, copy=True) for p in trained]
        engine, _, _, _ = deepspeed.initialize(
            model=model,
            optimizer=optimizer if is_client else None,
            model_parameters=None if is_client else list(optimizer.params),
            config=config,
            dist_init_required=False,
        )
        check_engine(engine)
        _behave(engine)
        made = Engine(
            engine, groups or _groups_of(engine, stage), stage=stage, clips_to=float(config["gradient_clipping"] or 0.0)
        )
        _start(made, masters)
        if carried is not None:
            load_optimizer_state(made, {id(p): n for n, p in model.named_parameters()}, carried)
        self._schedule(made, optimizer, schedule, built)
        return made

    def _evaluate(self, model: torch.nn.Module, number: int) -> PreparedModel:
        """Stage 3 shards also what nobody trains; else it is whole on each process, and needs no engine."""
        backend = self.backend
        config = self._config(model, None)
        for name in ("optimizer", "scheduler"):
            config.pop(name, None)
        if config["zero_optimization"]["stage"] < 3 or not any(True for _ in model.parameters()):
            model = backend.place_model(model, self.request.device_placement[number])
            if _autocasts(config):
                return PreparedModel(self.precision.wrap_in_autocast(model), model)
            for parameter in model.parameters() if self.precision.is_low else ():
                if parameter.is_floating_point():
                    parameter.data = parameter.data.to(self.precision.compute_dtype)
            return PreparedModel(self.precision.wrap_forward(model), model)
        self._ready(model, config, trains=False)
        engine, _, _, _ = deepspeed.initialize(model=model, config=config, dist_init_required=False)
        _behave(engine)
        return PreparedModel(engine, model, engine, make_partition(engine, 3))

    def _ready(self, model: torch.nn.Module, config: dict[str, Any], *, trains: bool = True) -> None:
        """What happens to a model before its engine is made."""
        backend = self.backend
        if any(t.is_meta for t in itertools.chain(model.parameters(), model.buffers())):
            if config["zero_optimization"]["stage"] < 3:
                backend.place_model(model, True)  # says what to do
            if backend.options.zero3_init_flag is False:
                raise UnsupportedError(
                    f"{type(model).__name__} was made under init_empty_weights(), and zero3_init_flag=False says that models come with their values. "
                    "Leave the flag out, or make the model without."
                )
            fill(model, backend.device, config)
        if trains:
            backend.recompute_activations(model)
        self.precision.wrap_forward(model, casts=not _autocasts(config))

    # -- configuration ---------------------------------------------------------------------------------------------------------

    def _config(self, model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
        facts = self._facts(model, optimizer)
        config = copy.deepcopy(resolve(self.backend.options, facts))
        check_config(config)
        process = self.backend.context.process
        check_disk(
            config,
            optimizer,
            parameters=facts.parameter_count,
            processes=process.world_size,
            here=process.local_world_size,
        )
        # Core's windows may be shorter than the configuration says, and core says where they end.
        micro = int(config["train_micro_batch_size_per_gpu"])
        config["gradient_accumulation_steps"] = 1
        config["train_batch_size"] = micro * self.backend.context.process.world_size
        scaler = self.backend.context.handlers.get("GradScalerKwargs")
        if scaler is not None and "fp16" in config:
            config["fp16"].update(_scaling(scaler))
        return config

    def _facts(self, model: torch.nn.Module, optimizer: Any) -> Facts:
        context, request = self.backend.context, self.request
        is_client = isinstance(optimizer, torch.optim.Optimizer)
        schedulers = [s for s in request.schedulers if _is_placeholder(s)]
        placeholder = next((s for s in schedulers if getattr(s, "optimizer", optimizer) is optimizer), None)
        return Facts(
            world_size=self.backend.data_world_size,
            micro_batch_size=self._micro_batch_size(),
            accumulation_steps=context.gradient_accumulation_steps,
            precision=_PRECISIONS[self.precision.compute_dtype],
            device_type=self.backend.device.type,
            hidden_size=_hidden_size(model),
            parameter_count=sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()),
            client_optimizer=is_client,
            client_scheduler=placeholder is None and len(schedulers) < len(request.schedulers),
            **{**_said_by(None if is_client else optimizer), **_said_by(placeholder)},
        )

    def _micro_batch_size(self) -> int | None:
        """Rows per process and micro-batch; where loaders differ, what the settings say is taken if it is one of them."""
        config = self.backend.context.handlers.get("DataLoaderConfiguration")
        parts = self.backend.data_world_size if getattr(config, "split_batches", False) else 1
        sizes = [
            getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
            for loader in self.request.loaders
        ]
        rows = [max(1, int(size) // parts) for size in sizes if size]
        said = self.backend.options.value_of("train_micro_batch_size_per_gpu")
        return said if said in rows else micro_batch_of(rows, smallest=self.backend.options.is_train_batch_min)

    # -- schedulers ------------------------------------------------------------------------------------------------------------

    def _schedule(self, made: Engine, optimizer: Any, schedule: dict[str, Any] | None, built: Built) -> None:
        """The configuration's scheduler takes a placeholder's place; where there is none, the engine steps it."""
        for k, placeholder in enumerate(self.request.schedulers):
            if not _is_placeholder(placeholder) or getattr(placeholder, "optimizer", optimizer) is not optimizer:
                continue
            function = getattr(placeholder, "lr_scheduler_callable", None)
            if function is None and schedule is None:
                raise ConfigurationError(
                    f"{type(placeholder).__name__} stands for a scheduler in DeepSpeed's configuration, which has none. Add a section "
                    '"scheduler", give lr_scheduler_callable=..., or use a scheduler of torch.'
                )
            built.schedulers[k] = function(made.optimizer) if function is not None else _scheduler(made, schedule or {})
            return
        if schedule is not None:
            made.engine.lr_scheduler = _scheduler(made, schedule)


def _scheduler(made: Engine, section: dict[str, Any]) -> Any:
    name = section["type"]
    kind = getattr(lr_schedules, name, None) or getattr(torch.optim.lr_scheduler, name, None)
    if kind is None:
        raise ConfigurationError(
            f'DeepSpeed\'s configuration: there is no scheduler {name!r} ("scheduler": {{"type"}}).'
        )
    return kind(made.optimizer, **section.get("params", {}))


def _is_placeholder(scheduler: Any) -> bool:
    return getattr(type(scheduler), "drivetrain_kind", None) == "scheduler"


def _autocasts(config: dict[str, Any]) -> bool:
    return bool((config.get("torch_autocast") or {}).get("enabled"))


def _hidden_size(model: torch.nn.Module) -> int | None:
    """What a transformers model's configuration says; the largest of several."""
    config = getattr(model, "config", None)
    given = [getattr(config, n, None) for n in ("hidden_size", "d_model", "n_embd")] + list(
        getattr(config, "hidden_sizes", ()) or ()
    )
    return max((n for n in given if isinstance(n, int)), default=None)


def _said_by(placeholder: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {} if placeholder is None else placeholder.facts()
    return facts


def _scaling(given: GradScalerKwargs) -> dict[str, Any]:
    """Torch's settings of the loss scale in DeepSpeed's words.

    Raises:
        UnsupportedError: For what its scaler can't do.
    """
    values = given.explicit()
    if not values.get("enabled", True):
        return {"loss_scale": 1.0}
    if values.get("growth_factor", 2.0) != 2.0 or values.get("backoff_factor", 0.5) != 0.5:
        raise UnsupportedError(
            "GradScalerKwargs: DeepSpeed's scaler doubles and halves. Leave growth_factor and backoff_factor out."
        )
    found: dict[str, Any] = {}
    if "init_scale" in values:
        power = math.log2(values["init_scale"])
        if not power.is_integer():
            raise UnsupportedError(
                f"GradScalerKwargs(init_scale={values['init_scale']:g}): DeepSpeed's scaler takes powers of two, such as {2.0 ** round(power):g}."
            )
        found["initial_scale_power"] = int(power)
    if "growth_interval" in values:
        found["loss_scale_window"] = values["growth_interval"]
    return found


def _take_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
    """A state that the optimizer comes with, by parameter name; it goes on where the engine keeps it."""
    if not optimizer.state:
        return None
    names = {id(p): n for n, p in model.named_parameters()}
    state = {names[id(p)]: dict(values) for p, values in optimizer.state.items()}
    groups = [
        {**{k: v for k, v in g.items() if k != "params"}, "params": [names[id(p)] for p in g["params"]]}
        for g in optimizer.param_groups
    ]
    optimizer.state.clear()
    return {"state": state, "param_groups": groups}


def _groups_of(engine: Any, stage: int) -> list[list[Any]]:
    """The parameters of each group of an optimizer that DeepSpeed made from its configuration."""
    zero = engine.optimizer
    if stage == 3:
        groups: list[list[Any]] = [[] for _ in zero.optimizer.param_groups]
        for number, parameters in enumerate(zero.fp16_groups):
            groups[zero.sub_group_to_group_id[number]] += parameters
        return groups
    if stage:
        return [list(group) for group in zero.bit16_groups]
    return (
        [list(g) for g in zero.fp16_groups]
        if hasattr(zero, "fp16_groups")
        else [g["params"] for g in zero.param_groups]
    )


def _behave(engine: Any) -> None:
    """``train()`` and ``eval()`` return the model, and its mode is its own, as with any module."""
    engine.train = functools.partial(torch.nn.Module.train, engine)
    engine.eval = functools.partial(torch.nn.Module.eval, engine)


def _start(made: Engine, masters: Sequence[torch.Tensor]) -> None:
    """Undo what the making of an optimizer did too much."""
    inner, zero = made.optimizer, made.zero
    if made.stage and zero.optimizer is not inner:  # Adagrad is made anew, without its groups
        for buffer, _ in made.partition.buffers():
            inner.state[buffer] = zero.optimizer.state[buffer]
        zero.optimizer = inner
    if made.stage == 0 and hasattr(zero, "fp32_groups"):
        inner.state.clear()  # it made a step on gradients of zero
        for number, (low, high) in enumerate(made.partition.pairs()):
            high.data.copy_(masters[number] if masters else low)
