"""Profiles a model by running one training step on fake tensors: nothing is computed, no memory is taken."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from drivetrain.errors import UnsupportedError
from drivetrain.memory.activations import ActivationCheckpointing, checkpoint_activations
from drivetrain.memory.blocks import repeated_blocks
from drivetrain.memory.loss import default_loss
from drivetrain.memory.profile import ModelProfile, Moment, OptimizerProfile, ParameterProfile, Stretch, Timeline
from drivetrain.memory.tracing import CONSTANT, GRADIENT, Recorded, StepTrace

__all__ = ["profile_model"]


def profile_model(
    model: torch.nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    loss: Callable[[torch.nn.Module, Any], torch.Tensor] | None = None,
    precision: Any = None,
    recompute: Mapping[str, ActivationCheckpointing | None] | None = None,
    units: Sequence[torch.nn.Module] | None = None,
    samples: int | None = None,
) -> ModelProfile:
    """What a training step of a model needs, found by running forward, backward and step once on fake tensors.

    Neither the model nor the optimizer is changed, and the model may be on the meta device. Each kind of recomputation is traced with the batch and with one
    twice as large, so that other sizes can be told.

    Args:
        model: The model, not prepared.
        batch: A micro-batch: tensors whose first dimension counts samples, in any structure. None: only parameters, buffers and optimizer state are told.
        optimizer: The optimizer of this model, or what makes one of parameters; None: AdamW.
        loss: Computes the loss of ``(model, batch)``; None: `drivetrain.memory.default_loss`.
        precision: A `drivetrain.interfaces.Precision`; None: all is done in the parameters' dtype.
        recompute: Kinds of recomputation to trace; None: "none", and "all" if the model repeats blocks.
        units: Modules that are gathered and recomputed as one; None: the blocks that the model repeats.
        samples: Samples in ``batch``; None: the first dimension of its first tensor.

    Raises:
        UnsupportedError: If the model's shapes depend on values, which fake tensors don't have.

    Example:
        >>> import torch
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> model = torch.nn.Sequential(block(), block(), torch.nn.Linear(8, 2))
        >>> profile = profile_model(model, (torch.ones(4, 8), torch.zeros(4, dtype=torch.long)))
        >>> profile.units, profile.optimizer.state // profile.parameter_bytes, sorted(profile.timelines)
        (('', '0', '1'), 2, ['all', 'none'])
    """
    blocks = list(repeated_blocks(model) if units is None else units)
    if recompute is None:
        recompute = {"none": None, "all": ActivationCheckpointing()} if repeated_blocks(model) else {"none": None}
    step = loss or default_loss
    count = samples or (1 if batch is None else _samples(batch))
    run = _Run(model, blocks, optimizer, step, precision)
    timelines = {}
    for name, options in recompute.items():
        settings = None if options is None else options.to_kwargs()
        if batch is None:
            timelines[name] = Timeline(stretches=(), recompute=settings)
            continue
        small, large = run.trace(batch, count, 1, options), run.trace(batch, count, 2, options)
        timelines[name] = Timeline(stretches=_stretches(small, large, count), recompute=settings)
    compute = None if precision is None else precision.compute_dtype
    return ModelProfile(
        name=type(model).__name__,
        parameters=run.parameters,
        units=run.unit_names,
        buffers=sum(b.nbytes for b in model.buffers()),
        optimizer=run.trace_optimizer(),
        timelines=timelines,
        inputs=sum(t.nbytes for t in tree_leaves(batch) if isinstance(t, torch.Tensor)) / count,
        precision="fp32" if precision is None else precision.spec.name,
        compute_itemsize=(compute or torch.float32).itemsize,
    )


def _samples(batch: Any) -> int:
    found = next((t for t in tree_leaves(batch) if isinstance(t, torch.Tensor) and t.ndim), None)
    if found is None:
        raise UnsupportedError("The batch has no tensor with a dimension of samples: say samples=.")
    return int(found.shape[0])


class _Run:
    """Runs a fake copy of the model."""

    def __init__(
        self, model: torch.nn.Module, blocks: list[torch.nn.Module], optimizer: Any, loss: Any, precision: Any
    ) -> None:
        self.model, self.blocks, self.optimizer, self.loss, self.precision = model, blocks, optimizer, loss, precision
        names = {id(m): n for n, m in model.named_modules()}
        self.unit_names = ("", *(names[id(b)] for b in blocks))
        with self._fakes() as copied:
            self.parameters = self._describe(copied)

    @contextlib.contextmanager
    def _fakes(self) -> Iterator[_Copied]:
        with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            copied = _Copied(self.model, self.blocks, self.optimizer, mode)
            if self.precision is not None:
                copied.model = self.precision.convert_module(copied.model)
            try:
                yield copied
            except (DynamicOutputShapeException, DataDependentOutputException) as error:
                raise UnsupportedError(
                    f"{type(self.model).__name__} can't be traced without values: {error}. Its shapes depend on them (torch.nonzero, masks as indices, "
                    ".item()). Profile it with loss= that leaves this part out, or plan by its counts."
                ) from error

    def _describe(self, copied: _Copied) -> tuple[ParameterProfile, ...]:
        owners: dict[int, int] = {}
        for i, block in enumerate(copied.blocks, 1):
            for parameter in block.parameters():
                owners[id(parameter)] = 0 if id(parameter) in owners else i
        inside = {id(m) for b in copied.blocks for m in b.modules()}
        for module in copied.model.modules():
            if id(module) not in inside:
                owners.update((id(p), 0) for p in module._parameters.values() if p is not None)
        return tuple(
            ParameterProfile(
                name=name,
                shape=tuple(p.shape),
                itemsize=p.element_size(),
                trainable=p.requires_grad,
                unit=owners.get(id(p), 0),
            )
            for name, p in copied.model.named_parameters()
        )

    def trace(self, batch: Any, count: int, times: int, options: ActivationCheckpointing | None) -> list[Recorded]:
        """One forward and backward with ``times`` the batch."""
        with self._fakes() as copied:
            model = copied.model
            if options is not None:
                checkpoint_activations(model, options, copied.blocks)
            if self.precision is not None:
                model = self.precision.wrap_forward(model)
            model.train()
            inputs = tree_map(lambda t: _repeated(t, count, times), batch)
            trace = StepTrace()
            trace.know(model.parameters(), CONSTANT, parameters=True)
            trace.know([*model.buffers(), *_tensors(inputs)], CONSTANT)
            _watch(trace, model, copied.blocks)
            with trace:
                trace.enter("forward", 0)
                loss = self.loss(model, inputs)
                trace.enter("backward", 0)
                loss.backward()
                trace.note()
            del loss
        return trace.stretches

    def trace_optimizer(self) -> OptimizerProfile:
        """Two steps on one parameter of each kind: the first one makes the state."""
        with self._fakes() as copied:
            name, one_by_one = type(copied.optimizer).__name__, self._step(copied, at_once=False)
        with self._fakes() as copied:
            alone = self._step(copied, at_once=False, alone=True)
        with self._fakes() as copied:
            at_once = self._step(copied, at_once=True)
        return OptimizerProfile(
            name=name,
            state=one_by_one.state,
            temporaries=one_by_one.temporaries,
            temporaries_alone=alone.temporaries,
            temporaries_at_once=round(at_once.temporaries * at_once.scale),
            operations=at_once.operations,
        )

    def _step(self, copied: _Copied, *, at_once: bool, alone: bool = False) -> _Step:
        optimizer = copied.optimizer
        if alone:
            every = [p for group in optimizer.param_groups for p in group["params"]]
            largest = max(every, key=torch.Tensor.numel, default=None)
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p is largest]
        counts: dict[torch.Tensor, int] = {}
        everything = 0
        for group in optimizer.param_groups:
            kinds: dict[Any, torch.Tensor] = {}
            for parameter in group["params"]:
                # Steps on float32 copies make all copies at once.
                alike = (parameter.shape if parameter.dtype is torch.float32 else id(parameter)), parameter.dtype
                first = kinds.setdefault(alike, parameter)
                counts[first] = counts.get(first, 0) + 1
                everything += parameter.nbytes
            group["params"] = list(kinds.values())
            if at_once and "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
        for parameter in counts:
            parameter.grad = torch.empty_like(parameter)
        scales = self.precision is not None and self.precision.scales
        if self.precision is not None:
            self.precision.adopt_optimizer(optimizer)
        step = optimizer.step if self.precision is None or scales else lambda: self.precision.step(optimizer)
        trace = StepTrace()
        trace.know(counts, CONSTANT)
        trace.know([p.grad for p in counts if p.grad is not None], CONSTANT)
        with trace:
            step()
            trace.know(_tensors(list(optimizer.state.values())), CONSTANT)
            trace.enter("step", 0)
            step()
        state = sum(
            number
            * sum(
                {id(t.untyped_storage()): t.untyped_storage().nbytes() for t in _tensors(optimizer.state[p])}.values()
            )
            for p, number in counts.items()
        )
        second = trace.stretches[-1]
        return _Step(
            state=state,
            temporaries=max(bytes_ for bytes_, _, _ in second.moments),
            operations=second.operations,
            scale=everything / max(1, sum(p.nbytes for p in counts)),
        )


class _Step(NamedTuple):
    """What an optimizer's step needed: state of all parameters, temporaries and operations of those that stood for all, and how many times larger all are."""

    state: int
    temporaries: int
    operations: int
    scale: float


class _Copied:
    """A model and its optimizer whose tensors are fake."""

    def __init__(
        self, model: torch.nn.Module, blocks: list[torch.nn.Module], optimizer: Any, mode: FakeTensorMode
    ) -> None:
        memo: dict[int, Any] = {}
        for parameter in model.parameters():
            fake = torch.nn.Parameter(
                torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype),
                requires_grad=parameter.requires_grad,
            )
            memo[id(parameter)] = fake
        for buffer in model.buffers():
            memo[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
        self.model: torch.nn.Module = copy.deepcopy(model, memo)
        self.blocks: list[torch.nn.Module] = [memo[id(b)] for b in blocks]
        self._optimizer, self._memo = optimizer, memo
        # Scripts make optimizers before a precision converts the model: state that is there from the start has the dtype of then.
        is_made = optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
        self._early: torch.optim.Optimizer | None = (
            None if is_made else optimizer([p for p in self.model.parameters() if p.requires_grad])
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The copy's optimizer, without state."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if self._optimizer is None:
            return torch.optim.AdamW(trained)
        if self._early is not None:
            held = {id(p) for group in self._early.param_groups for p in group["params"]}
            if held == {id(p) for p in trained}:
                return self._early
            made: torch.optim.Optimizer = self._optimizer(trained)
            return made
        given = self._optimizer
        groups = [
            {**g, "params": [self._memo[id(p)] for p in g["params"] if id(p) in self._memo and p.requires_grad]}
            for g in given.param_groups
        ]
        fresh: torch.optim.Optimizer = copy.copy(given)
        fresh.__setstate__(
            {"defaults": given.defaults, "state": {}, "param_groups": [g for g in groups if g["params"]]}
        )
        fresh.state = defaultdict(dict)
        return fresh


def _repeated(value: Any, count: int, times: int) -> Any:
    """A fake of a tensor of the batch, with so many times the samples."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = list(value.shape)
    if shape and shape[0] == count:
        shape[0] *= times
    return torch.empty(shape, dtype=value.dtype)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _watch(trace: StepTrace, model: torch.nn.Module, blocks: list[torch.nn.Module]) -> None:
    """Tell the trace when a unit computes, and which tensors became gradients."""

    def leave(unit: int) -> None:
        if (trace.phase, trace.unit) == ("backward", unit):
            trace.enter("backward", 0)

    def before(unit: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            trace.enter("forward", unit)
            for tensor in _tensors((args, kwargs)):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: leave(unit))

        return hook

    def after(unit: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            for tensor in _tensors(output if not hasattr(output, "to_tuple") else output.to_tuple()):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: trace.enter("backward", unit))
            trace.enter("forward", 0)

        return hook

    for i, block in enumerate(blocks, 1):
        block.register_forward_pre_hook(before(i), with_kwargs=True)
        block.register_forward_hook(after(i))
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: trace.know([p.grad], GRADIENT))


def _stretches(small: list[Recorded], large: list[Recorded], count: int) -> tuple[Stretch, ...]:
    """Straight lines through what two sizes of the batch gave, moment by moment."""
    if [(s.phase, s.unit, len(s.moments)) for s in small] != [(s.phase, s.unit, len(s.moments)) for s in large]:
        raise UnsupportedError(
            "The model does something else with a batch twice as large: it can't be planned by a trace."
        )
    return tuple(
        Stretch(
            phase=a.phase,  # type: ignore[arg-type]
            unit=a.unit,
            peaks=_fullest([_moment(*pair, count) for pair in zip(a.moments, b.moments, strict=True)]),
            end=_moment(a.moments[-1], b.moments[-1], count),
            **_work(a, b, count),
            operations=a.operations,
        )
        for a, b in zip(small, large, strict=True)
        if a.operations
    )


def _work(small: Recorded, large: Recorded, count: int) -> dict[str, float]:
    """A parabola through nothing and what two sizes of the batch gave, where it bends upwards; else a straight line."""
    found: dict[str, float] = {}
    for name in ("flops", "moved"):
        one, two = getattr(small, name), getattr(large, name)
        bend = (two - 2 * one) / (2 * count**2)
        if bend * count < 1e-6 * one / count:
            bend, slope = 0.0, (two - one) / count  # without what any batch needs
        else:
            slope = one / count - bend * count
        found |= {name: slope, f"{name}_squared": bend}
    return found


def _moment(one: tuple[int, int, int], two: tuple[int, int, int], count: int) -> Moment:
    slope = (two[0] - one[0]) / count
    return Moment(fixed=one[0] - slope * count, per_sample=slope, copies=one[1], gradients=one[2])


def _fullest(moments: list[Moment]) -> tuple[Moment, ...]:
    """Those that are the fullest for some size of the micro-batch, with copies and gradients or without."""
    found: dict[Moment, None] = {}
    for samples in (0, *(2**i for i in range(17))):
        for counts in (1, 0):
            key = lambda m, n=samples, c=counts: m.fixed + m.per_sample * n + c * (m.copies + m.gradients)  # noqa: E731
            found[max(moments, key=key)] = None
    return tuple(found)
