"""The user's object. It passes on to a backend, an accumulator, loaders, trackers and checkpoints, and knows none of them by name."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from drivetrain._engine.accumulation import Accumulator
from drivetrain._engine.assemble import assemble, dismantle
from drivetrain._engine.facade.collectives import CollectiveFacade
from drivetrain._engine.facade.gradients import GradientFacade
from drivetrain._engine.facade.mesh import MeshFacade
from drivetrain._engine.facade.processes import ProcessFacade
from drivetrain._engine.facade.resuming import ResumeFacade
from drivetrain._engine.facade.settings import SettingsFacade
from drivetrain._engine.optimizer import PreparedOptimizer
from drivetrain._engine.plan import PreparePlan
from drivetrain._engine.prepare import PreparedObjects, kind_of
from drivetrain._engine.scheduler import PreparedScheduler
from drivetrain.data.config import DataLoaderConfiguration
from drivetrain.errors import ConfigurationError
from drivetrain.interfaces import PrepareRequest
from drivetrain.specs import Capability

__all__ = ["Accelerator"]


class Accelerator(
    SettingsFacade,
    ProcessFacade,
    MeshFacade,
    CollectiveFacade,
    GradientFacade,
    ResumeFacade,
):
    """Runs one training script on whatever it finds: one device, many, a cluster.

    Every argument that isn't given is taken from the environment (``DRIVETRAIN_<NAME>``), the configuration file, or the default, in
    this order. `explain` says what was chosen and why.

    Args:
        backend: Name of a backend, its options object, or "auto".
        device: Name of a device, or "auto".
        cpu: Use the CPU even where an accelerator is present.
        mixed_precision: "no", "bf16", "fp16", or the name of an installed precision.
        gradient_accumulation_steps: Micro-batches per optimizer step.
        gradient_accumulation_plugin: The same with more settings.
        dataloader_config: How loaders are sharded and moved.
        device_placement: Move models, optimizer state and batches to the device.
        split_batches: Short for ``DataLoaderConfiguration(split_batches=...)``.
        log_with: Names of trackers, "all", or tracker objects.
        project_dir: Directory for checkpoints and logs.
        project_config: The same with more settings.
        step_scheduler_with_optimizer: Schedulers step only when their optimizer did.
        step_scheduler_per_process: Schedulers step as often per optimizer step as there are processes, as Accelerate's do.
        on_nonfinite: "raise" an error or "skip" the step when a loss or a gradient isn't finite; "ignore" by default.
        rng_types: Generators whose state is made equal on all processes at each start of an epoch.
        kwargs_handlers: Options objects of core and plugins.
        dynamo_backend: Compile models with this backend of ``torch.compile``.
        dynamo_plugin: The same with more settings.
        parallelism_config: The mesh that processes form, a ``ParallelismConfig``.
        resume: "auto" to go on from the project's newest checkpoint, if there is one, or a checkpoint's path; see `resume`.
        config_file: Path of a configuration file.
        **options: Keywords that plugins accept, such as options objects of backends.

    Raises:
        ConfigurationError: For a value of a wrong type, or a contradiction.
        PluginNotFoundError: For the name of something that isn't installed.
        UnsupportedError: When what was asked for can't be done together.

    Example:
        >>> import torch
        >>> from drivetrain import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(4, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> accelerator.backward(model(torch.ones(2, 4)).mean())
        >>> optimizer.step()
        >>> accelerator.step
        1
    """

    def __init__(
        self,
        *,
        device_placement: bool | None = None,
        split_batches: bool | None = None,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int | None = None,
        cpu: bool | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool | None = None,
        step_scheduler_per_process: bool | None = None,
        on_nonfinite: str | None = None,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        parallelism_config: Any = None,
        backend: Any = None,
        device: str | None = None,
        resume: str | os.PathLike[str] | None = None,
        config_file: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "options", "__class__") and v is not None}
        self._parts = parts = assemble({**given, **{k: v for k, v in options.items() if v is not None}})
        self.backend = parts.backend
        self._control = parts.control
        self._debug = parts.plan.settings.debug
        self._trigger = parts.trigger
        self._stopper = parts.stopper
        self._loader_stack = parts.loader_stack
        self.dataloader_config = parts.dataloader_config
        self.project_configuration = parts.project_configuration
        self.step_scheduler_with_optimizer = parts.plan.settings.step_scheduler_with_optimizer
        self.device_placement = parts.plan.settings.device_placement
        self.gradient_state: Accumulator = parts.accumulator
        self._objects = PreparedObjects()
        if self.gradient_state.gradient_world_size > 1:
            from drivetrain._engine.uneven import UnevenGuard

            self._loader_stack.guard = UnevenGuard(self.gradient_state, self._objects.by_kind["model"])
        if parts.plan.settings.on_nonfinite != "ignore":
            from drivetrain._engine.nonfinite import NonfiniteGuard

            self.gradient_state.guard = NonfiniteGuard(self, skip=parts.plan.settings.on_nonfinite == "skip")
        self._custom_objects: list[Any] = []
        if parts.plan.trackers or parts.plan.tracker_objects:
            self._hub  # noqa: B018 - what is wrong with trackers that were asked for is said here, not at the first log
        self._resume_from = parts.plan.settings.resume
        parts.registry.notify("drivetrain_after_start", accelerator=self)

    # -- what was chosen ---------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> PreparePlan:
        """What was chosen, what was rejected, and where each value came from."""
        return self._parts.plan

    def explain(self) -> str:
        """The plan as a table for people, with what runs in which precision.

        Example:
            >>> from drivetrain import Accelerator
            >>> "single" in Accelerator(cpu=True).explain()
            True
        """
        from drivetrain._engine.explain import explain

        return explain(self.plan, self.backend, self._models, self._parts.planning)

    @property
    def distributed_type(self) -> Any:
        """What Accelerate calls the kind of run: a member of ``DistributedType``."""
        from drivetrain.state import DistributedType

        declared = self.plan.backend.distributed_type
        return (
            DistributedType(declared) if declared else DistributedType.of_device(self.device.type, self.num_processes)
        )

    @property
    def state(self) -> Any:
        """This Accelerator's settings under the names of Accelerate's ``AcceleratorState``."""
        from drivetrain.state import AcceleratorState

        return AcceleratorState(self)

    # -- preparing ---------------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Prepare models, optimizers, schedulers and loaders; other objects pass through. Twice is the same as once.

        Args:
            *args: Objects, in any order.
            device_placement: For each object, whether to move it to the device; default: as in the constructor.

        Returns:
            The prepared objects in the same order; a single one bare.

        Example:
            >>> import torch
            >>> from drivetrain import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> model = torch.nn.Linear(1, 1)
            >>> accelerator.prepare(model) is accelerator.prepare(model)
            True
        """
        if device_placement is None:
            placements = [self.device_placement] * len(args)
        elif len(device_placement) != len(args):
            raise ConfigurationError(
                f"prepare(device_placement=...) needs one entry for each of the {len(args)} objects, got {len(device_placement)}."
            )
        else:
            placements = list(device_placement)
        self._parts.registry.notify("drivetrain_before_prepare", accelerator=self, objects=args)
        results = self._prepare_all(args, placements)
        self._parts.registry.notify("drivetrain_after_prepare", accelerator=self, objects=tuple(results))
        return results[0] if len(results) == 1 else tuple(results)

    def _prepare_all(
        self, things: Sequence[Any], placements: Sequence[bool], *, evaluation: bool = False, slice_fn: Any = None
    ) -> list[Any]:
        searching = sys.modules.get("drivetrain.memory.batch_size")
        probe = None if searching is None else searching.running_probe()
        if probe is not None:
            probe.agree()  # wrapping models sends messages
        kinds = [kind_of(t) for t in things]
        new: dict[str, list[tuple[Any, bool]]] = {"model": [], "optimizer": [], "scheduler": [], "loader": []}
        seen: set[int] = set()
        for thing, kind, placement in zip(things, kinds, placements, strict=True):
            if kind != "other" and id(thing) not in seen and self._objects.find(thing) is None:
                new[kind].append((thing, placement))
                seen.add(id(thing))
        if not evaluation:
            self._objects.trained += len(new["model"])
            if self._objects.trained > 1 and new["model"]:
                self.backend.require(Capability.MULTIPLE_MODELS, "preparing more than one model to train")
        request = PrepareRequest(
            models=[t for t, _ in new["model"]],
            optimizers=[t for t, _ in new["optimizer"]],
            schedulers=[t for t, _ in new["scheduler"]],
            loaders=[t for t, _ in new["loader"]],
            device_placement=[p for _, p in new["model"]],
            evaluation=[evaluation] * len(new["model"]),
        )
        if self.plan.alternatives and new["model"] and not evaluation and not any(self._objects.by_kind.values()):
            from drivetrain._engine.replan import reconsider

            reconsider(self, request)
        prepared = self.backend.prepare(request)
        for (original, _), model in zip(new["model"], prepared.models, strict=True):
            self._objects.add("model", original, model)
        if probe is not None and new["model"]:
            probe.watch(self)
        for (original, _), inner in zip(new["optimizer"], prepared.optimizers, strict=True):
            self._objects.add("optimizer", original, self._wrap_optimizer(inner))
        for (original, _), inner in zip(new["scheduler"], prepared.schedulers, strict=True):
            self._objects.add("scheduler", original, self._wrap_scheduler(inner))
        for original, placement in new["loader"]:
            self._objects.add("loader", original, self._wrap_loader(original, placement, slice_fn))
        return [t if k == "other" else self._objects.find(t) for t, k in zip(things, kinds, strict=True)]

    def _wrap_optimizer(self, optimizer: Any) -> PreparedOptimizer:
        return PreparedOptimizer(
            optimizer, backend=self.backend, accumulator=self.gradient_state, on_step=self._optimizer_stepped
        )

    def _wrap_scheduler(self, scheduler: Any) -> PreparedScheduler:
        own = self._objects.find(getattr(scheduler, "optimizer", None))
        settings = self.plan.settings
        repeats = self.num_processes if settings.step_scheduler_per_process and not self.split_batches else 1
        prepared = PreparedScheduler(
            scheduler,
            self._optimizers if own is None else [own],
            accumulator=self.gradient_state,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            repeats=repeats,
        )
        if self.num_processes > 1 and repeats == 1:
            from drivetrain._engine.schedule_length import ScheduleCheck

            self._schedules = self._schedules or ScheduleCheck(self.num_processes, main=self.is_main_process)
            self._schedules.add(prepared)
        return prepared

    def _wrap_loader(self, loader: Any, placement: bool, slice_fn: Any) -> Any:
        from drivetrain.data import prepare_data_loader

        return prepare_data_loader(
            loader,
            device=self.device,
            num_processes=self.backend.data_world_size,
            process_index=self.backend.data_rank,
            config=self.dataloader_config,
            stack=self._loader_stack,
            group=self.backend.data_group,
            put_on_device=placement,
            rng_types=self.plan.settings.rng_types,
            slice_fn_for_dispatch=slice_fn,
            micro_batches=self.backend.micro_batches_per_call,
            replicated=self.backend.data_world_size < self.num_processes,
        )

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare one model.

        Args:
            model: The model.
            device_placement: Whether to move it to the device; default: as in the constructor.
            evaluation_mode: It is only evaluated: no gradient synchronisation is set up.
        """
        result: torch.nn.Module = self._prepare_one("model", model, device_placement, evaluation=evaluation_mode)
        return result

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> PreparedOptimizer:
        """Prepare one optimizer, after its models."""
        result: PreparedOptimizer = self._prepare_one("optimizer", optimizer, device_placement)
        return result

    def prepare_scheduler(self, scheduler: Any) -> PreparedScheduler:
        """Prepare one learning-rate scheduler, after its optimizer."""
        result: PreparedScheduler = self._prepare_one("scheduler", scheduler, None)
        return result

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare one data loader.

        Args:
            data_loader: The loader.
            device_placement: Whether to move batches to the device; default: as in the constructor.
            slice_fn_for_dispatch: How rank 0 cuts a batch when it reads for all: ``(batch, slice, process_index, num_processes)``.
        """
        return self._prepare_one("loader", data_loader, device_placement, slice_fn=slice_fn_for_dispatch)

    def _prepare_one(self, kind: str, thing: Any, placement: bool | None, **settings: Any) -> Any:
        if kind_of(thing) != kind:
            raise ConfigurationError(f"prepare_{kind.replace('loader', 'data_loader')} got a {type(thing).__name__}.")
        return self._prepare_all([thing], [self.device_placement if placement is None else placement], **settings)[0]

    @property
    def _models(self) -> list[torch.nn.Module]:
        return self._objects.by_kind["model"]

    @property
    def _schedulers(self) -> list[PreparedScheduler]:
        return self._objects.by_kind["scheduler"]

    @property
    def _dataloaders(self) -> list[Any]:
        return self._objects.by_kind["loader"]

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> torch.nn.Module:
        """The user's model under what `prepare` put around it.

        Args:
            model: A prepared model (any other is returned as it is).
            keep_fp32_wrapper: Keep the forward in mixed precision with fp32 outputs; False makes it plain again.
            keep_torch_compile: Keep it compiled.
        """
        inner = self.backend.unwrap(model)
        if not keep_fp32_wrapper:
            inner = self.backend.precision.unwrap_forward(inner)
        if not keep_torch_compile:
            from drivetrain._engine.compile import uncompile

            inner = uncompile(inner)
        return inner

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all prepared objects and start counting anew; collect garbage and give cached device memory back.

        Returns:
            A None for each argument: assign them to the names that hold the objects.

        Example:
            >>> from drivetrain import Accelerator
            >>> model, optimizer = Accelerator(cpu=True).free_memory("model", "optimizer")
            >>> model is None
            True
        """
        import gc

        self._objects.clear()
        self.backend.forget()
        self._schedules = None
        self.gradient_state.forget()
        self._step = self._epoch = 0
        gc.collect()
        self._parts.device.empty_cache()
        return [None] * len(objects)

    clear = free_memory

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader that leaves out its first batches, in its next epoch only; later epochs are whole.

        Args:
            dataloader: A prepared loader.
            num_batches: How many batches of this process to leave out.
        """
        from drivetrain.data import skip_first_batches

        return skip_first_batches(dataloader, num_batches)

    def profile(self, profile_handler: Any = None) -> contextlib.AbstractContextManager[Any]:
        """Profile the block with ``torch.profiler``; with ``output_trace_dir`` each process writes a trace there.

        Args:
            profile_handler: A ``ProfileKwargs``; default: that of the constructor.
        """
        from drivetrain._engine.profiling import profile
        from drivetrain.config.handlers import ProfileKwargs

        return profile(profile_handler or self.plan.option(ProfileKwargs), rank=self.process_index)

    # -- the end -----------------------------------------------------------------------------------------------------------

    def end_training(self) -> None:
        """Finish checkpoints being written, trackers, and the process group if it was made here."""
        self._parts.registry.notify("drivetrain_before_end", accelerator=self)
        if self._schedules is not None:
            self._schedules.taken(self.step, max((loader.epoch for loader in self._dataloaders), default=1))
        with contextlib.ExitStack() as ending:  # the last one first, and each whatever those before it raise
            ending.callback(dismantle, self._parts)
            ending.callback(self._stopper.close)
            ending.callback(self._finish_trackers)
            ending.callback(self._finish_checkpoints)
            if self.gradient_state.guard is not None:
                ending.callback(self.gradient_state.guard.settle)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Accelerator:
        return self  # it stands for the job, of which there is one
