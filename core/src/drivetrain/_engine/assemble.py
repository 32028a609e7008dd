"""From a plan to objects: the one place where an Accelerator's parts are made and joined."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist

from drivetrain._engine.accumulation import Accumulator
from drivetrain._engine.availability import detect_devices
from drivetrain._engine.plan import Arguments, PreparePlan
from drivetrain._engine.resolve import resolve
from drivetrain._engine.stopping import Stopper
from drivetrain._plugins import Registry, get_registry
from drivetrain.checkpoint.location import is_remote
from drivetrain.checkpoint.project import ProjectConfiguration
from drivetrain.config.settings import STOPPED_FILE
from drivetrain.data import DataLoaderConfiguration, LoaderStack
from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain.interfaces import Backend, BackendContext, Device
from drivetrain.parallel.process import ProcessControl, Trigger
from drivetrain.specs import Capability, ProcessInfo

if TYPE_CHECKING:
    from drivetrain._engine.compile import Compiler
    from drivetrain.interfaces import Precision
    from drivetrain.memory import PlanReport
    from drivetrain.tracking import TrackerHub

__all__ = ["Parts", "assemble", "check_exclusive", "dismantle", "make_backend", "make_hub", "verify_ranks"]


class Parts(msgspec.Struct, kw_only=True):
    """What an Accelerator is made of."""

    registry: Registry
    plan: PreparePlan
    device: Device
    backend: Backend
    control: ProcessControl
    trigger: Trigger
    stopper: Stopper
    make_hub: Callable[[], TrackerHub]
    loader_stack: LoaderStack
    accumulator: Accumulator
    dataloader_config: DataLoaderConfiguration
    project_configuration: ProjectConfiguration
    key: str
    #: The constructor's arguments, for a second look once the model is known.
    given: Mapping[str, Any]
    #: Backends that made way for another one.
    replaced: list[Backend] = msgspec.field(default_factory=list)
    #: What was planned when the first model was prepared, if anything was.
    planning: PlanReport | None = None


def assemble(given: Mapping[str, Any]) -> Parts:
    """Resolve and build.

    Args:
        given: The constructor's arguments, those that were given.
    """
    registry = get_registry()
    registry.warn_broken()
    arguments = _with_loaders(given)
    plan = resolve(
        Arguments.collect(**arguments, process=_process_of_group()),
        registry=registry,
        environ=os.environ,
        availability=detect_devices(registry.specs("device").values()),
    )
    _tell_notes(plan)
    device = _make_device(registry, plan)
    key = _next_key()
    backend = make_backend(registry, plan, device)
    check_exclusive(backend)
    backend.setup()
    verify_ranks(registry, plan)
    stack = LoaderStack()
    windows = plan.options.get("GradientAccumulationPlugin")  # its class is imported only by those who use it
    return Parts(
        registry=registry,
        plan=plan,
        device=device,
        backend=backend,
        control=ProcessControl(plan.process, device=backend.device),
        trigger=Trigger(),
        stopper=Stopper(plan.process, synchronize=device.synchronize, key=key, note=os.environ.get(STOPPED_FILE, "")),
        make_hub=partial(make_hub, registry, plan, backend, key),
        loader_stack=stack,
        accumulator=Accumulator(
            backend,
            stack,
            num_steps=_calls_per_window(backend),
            **({} if windows is None else {name: getattr(windows, name) for name in _WINDOW_SETTINGS}),
        ),
        # A copy: `accelerator.even_batches = ...` must not change another Accelerator that was given the same object.
        dataloader_config=plan.option(DataLoaderConfiguration).replaced(),
        project_configuration=plan.option(ProjectConfiguration),
        key=key,
        given=arguments,
    )


_WINDOW_SETTINGS = ("sync_with_dataloader", "sync_each_batch", "adjust_scheduler")


def _calls_per_window(backend: Backend) -> int:
    """How often a model is called in an accumulation window."""
    steps, per_call = backend.context.gradient_accumulation_steps, backend.micro_batches_per_call
    if steps % per_call:
        raise ConfigurationError(
            f"The backend {backend.spec.name!r} takes {per_call} micro-batches per call: gradient_accumulation_steps={steps} "
            "must be a multiple of that."
        )
    return steps // per_call


def _with_loaders(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with ``split_batches`` where it belongs.

    Raises:
        ConfigurationError: If ``dataloader_config`` says something else.
    """
    arguments = dict(given)
    split_batches = arguments.pop("split_batches", None)
    loaders = arguments.get("dataloader_config", DataLoaderConfiguration())
    if split_batches is None or not isinstance(loaders, DataLoaderConfiguration):
        return arguments
    said = loaders.explicit().get("split_batches", split_batches)
    if said != split_batches:
        raise ConfigurationError(
            f"split_batches={split_batches!r} and dataloader_config's split_batches={said!r} contradict each other. Give one of them."
        )
    return {**arguments, "dataloader_config": loaders.replaced(split_batches=split_batches)}


def _process_of_group() -> ProcessInfo | None:
    """Who this process is, by a process group that the script made itself; None where the environment says it."""
    if not dist.is_initialized() or any(name in os.environ for name in ("RANK", "WORLD_SIZE")):
        return None
    rank, world = dist.get_rank(), dist.get_world_size()
    return ProcessInfo(
        rank=rank,
        world_size=world,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        reason="torch's process group, which was there already",
    )


def _make_device(registry: Registry, plan: PreparePlan) -> Device:
    found: Device = registry.load("device", plan.device.name, plan.device.target)(plan.device)
    return found


def make_backend(registry: Registry, plan: PreparePlan, device: Device) -> Backend:
    """The backend of a plan, with its precision."""
    torch_device = device.torch_device(plan.process.local_rank)
    precision: Precision = registry.load("precision", plan.precision.name)(
        plan.precision, device_type=torch_device.type, options=plan.options
    )
    context = BackendContext(
        process=plan.process,
        device=device,
        torch_device=torch_device,
        precision=precision,
        options=plan.options_of(plan.backend),
        named_options=plan.named_options_of(plan.backend),
        handlers=plan.options,
        gradient_accumulation_steps=plan.settings.gradient_accumulation_steps,
        debug=plan.settings.debug,
        compiler=_make_compiler(plan),
        activations=plan.options.get("ActivationCheckpointing"),
    )
    backend: Backend = registry.load("backend", plan.backend.name)(plan.backend, context)
    return backend


def make_hub(registry: Registry, plan: PreparePlan, backend: Backend, key: str) -> TrackerHub:
    """The hub; if no tracker was asked for and the script starts some all the same, they are the builtin one's files."""
    from drivetrain.tracking import TrackerHub, TrackingOptions

    trackers: list[Any] = [*plan.trackers, *plan.tracker_objects]
    directory = plan.settings.logging_dir
    if directory is None and not is_remote(plan.settings.project_dir):
        directory = plan.settings.project_dir
    if not trackers:
        trackers, directory = [registry.get("tracker", "jsonl")], directory or "runs"
    return TrackerHub.from_plan(
        trackers,
        process=plan.process,
        logging_dir=directory,
        read_later=backend.read_later,
        settings=plan.options,
        options=plan.option(TrackingOptions),
        key=key,
    )


def _tell_notes(plan: PreparePlan) -> None:
    """What is there and has no effect: told once, on the main process."""
    if plan.notes and plan.process.rank == 0:
        warnings.warn("\n".join(["Noted while setting up:", *(f"  - {note}" for note in plan.notes)]), stacklevel=4)


def _make_compiler(plan: PreparePlan) -> Compiler | None:
    if plan.settings.dynamo_backend == "no":
        return None
    if Capability.COMPILE not in plan.backend.capabilities:
        raise UnsupportedError(
            f"dynamo_backend={plan.settings.dynamo_backend!r} compiles models, which the backend {plan.backend.name!r} can't. Leave it out."
        )
    from drivetrain._engine.compile import Compiler
    from drivetrain.config.handlers import TorchDynamoPlugin

    options = plan.option(TorchDynamoPlugin)
    return Compiler(
        {**options.to_kwargs(), "backend": plan.settings.dynamo_backend}, regional=options.use_regional_compilation
    )


def verify_ranks(registry: Registry, plan: PreparePlan) -> None:
    """Before the first collective of a model: all ranks use the same plugins with the same settings."""
    if plan.process.is_distributed and dist.is_initialized():
        from drivetrain._plugins.handshake import verify_ranks

        verify_ranks(plan.fingerprint(), everything=registry.inventory())


#: Living backends of vendors whose state is process-wide. It mirrors that state, and so is the one thing of ours that is, too.
_exclusive: weakref.WeakSet[Backend] = weakref.WeakSet()


def check_exclusive(backend: Backend) -> None:
    """Refuse a second backend of one vendor whose state is process-wide, if it is to have other settings."""
    name = backend.spec.name
    if not backend.spec.exclusive:
        return
    if any(b.spec.name == name and b.context.options != backend.context.options for b in _exclusive):
        raise UnsupportedError(
            f"The backend {name!r} keeps its state for the whole process, and an Accelerator with other settings uses it: "
            "call end_training() on that one first, or use the same settings."
        )
    _exclusive.add(backend)


def dismantle(parts: Parts) -> None:
    """Undo what `assemble` did to the process."""
    for backend in (parts.backend, *parts.replaced):
        backend.teardown()
        _exclusive.discard(backend)


_counter = iter(range(10**9))


def _next_key() -> str:
    """Number of this Accelerator in its process; equal on all ranks that make them in the same order."""
    return str(next(_counter))
