"""Plans for objects that are being prepared: what the Accelerator and backends ask when they choose by themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.errors import DrivetrainError
from drivetrain.interfaces.backend import BackendContext, PrepareRequest
from drivetrain.interfaces.sharding_planner import ShardingPlan, TrainingRequest
from drivetrain.memory.hardware import Hardware, parse_bytes
from drivetrain.memory.machine import present_hardware
from drivetrain.memory.options import PlanningOptions
from drivetrain.memory.planning import PlanReport, make_plans
from drivetrain.memory.profile import ModelProfile
from drivetrain.memory.profiler import profile_model

__all__ = ["devices_of", "plan_of_request", "state_bytes"]


def state_bytes(request: PrepareRequest) -> int:
    """Bytes of a replica's parameters, gradients, buckets and Adam's state: what there is before anything is computed, at least about.

    Example:
        >>> state_bytes(PrepareRequest(models=[torch.nn.Linear(10, 10, bias=False)], evaluation=[False]))
        2000
    """
    parameters = [p for m, e in zip(request.models, request.evaluation, strict=True) if not e for p in m.parameters()]
    return sum(p.nbytes + (2 * p.nbytes + 8 * p.numel() if p.requires_grad else 0) for p in parameters)


def devices_of(context: BackendContext) -> Hardware:
    """The devices of a job, with the memory that its `PlanningOptions` grant."""
    process = context.process
    found = present_hardware(context.torch_device, devices=process.world_size, per_machine=process.local_world_size)
    memory = _options(context).device_memory
    return found if memory is None else replace(found, memory=parse_bytes(memory))


def plan_of_request(request: PrepareRequest, context: BackendContext, *, backends: Sequence[str]) -> PlanReport | None:
    """Plan the training of what is being prepared. Collective: rank 0 plans, all get its report.

    The one trained model is traced with a batch of the loader that is prepared with it; where that can't be done, only its state is planned. Micro-batches,
    accumulation and recomputation stay as they are.

    Args:
        request: The objects.
        context: What the backend was made with.
        backends: Backends whose plans are asked for.

    Returns:
        The report, equal on all ranks; None if there isn't exactly one model to train.
    """
    hardware = devices_of(context)
    held: list[Any] = [None]
    if context.process.rank == 0:
        try:
            held[0] = _report(request, context, hardware, backends)
        except Exception as error:  # all ranks hear of it
            held[0] = error
    if context.process.is_distributed and dist.is_initialized():
        from drivetrain.parallel.object_collectives import broadcast_object_list

        broadcast_object_list(held)
    if isinstance(held[0], Exception):
        raise DrivetrainError(f"The training can't be planned: {held[0]}. Name a backend and its strategy.") from held[
            0
        ]
    report: PlanReport | None = held[0]
    return report


def _report(
    request: PrepareRequest, context: BackendContext, hardware: Hardware, backends: Sequence[str]
) -> PlanReport | None:
    models = [m for m, evaluation in zip(request.models, request.evaluation, strict=True) if not evaluation]
    if len(models) != 1:
        return None
    profile, micro_batch = _profile(models[0], request, context)
    accumulation = context.gradient_accumulation_steps
    handler = context.handlers.get("GradientAccumulationPlugin")
    each = accumulation > 1 and handler is not None and handler.sync_each_batch
    wanted = TrainingRequest(
        batch_size=micro_batch * accumulation * hardware.devices,
        micro_batches=(micro_batch,),
        precision=profile.precision,
        recompute=tuple(profile.timelines),
        headroom=_options(context).headroom,
    )

    def keep(plan: ShardingPlan) -> bool:
        return plan.backend in backends and plan.sync_each_batch == each

    return make_plans(profile, hardware, wanted, keep=keep)


def _profile(model: torch.nn.Module, request: PrepareRequest, context: BackendContext) -> tuple[ModelProfile, int]:
    """By a trace, or of the state alone; with the samples of a micro-batch."""
    own = {id(p) for p in model.parameters()}
    optimizers = [o for o in request.optimizers if isinstance(o, torch.optim.Optimizer)]
    fitting = [o for o in optimizers if any(id(p) in own for g in o.param_groups for p in g["params"])]
    settings: dict[str, Any] = {
        "optimizer": fitting[0] if fitting else None,
        "precision": context.precision,
        "recompute": {"none" if context.activations is None else "as asked": context.activations},
    }
    batch, samples = _first_batch(request.loaders)
    if batch is not None:
        with contextlib.suppress(Exception):  # whatever the model's own code raises without values, or for another loss
            return profile_model(model, batch, samples=samples, **settings), samples
    return profile_model(model, None, **settings), samples


def _first_batch(loaders: Sequence[Any]) -> tuple[Any, int]:
    """A batch out of the data set itself, and its size: the loader's workers and order stay untouched."""
    for loader in loaders:
        size = getattr(loader, "batch_size", None)
        dataset = getattr(loader, "dataset", None)
        if not size or dataset is None or isinstance(dataset, torch.utils.data.IterableDataset):
            continue
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]):  # a data set may do anything
            return loader.collate_fn([dataset[i] for i in range(min(size, len(dataset)))]), size
    return None, 1


def _options(context: BackendContext) -> PlanningOptions:
    found: PlanningOptions = context.handlers.get("PlanningOptions") or PlanningOptions()
    return found
