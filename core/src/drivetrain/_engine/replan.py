"""A backend that nobody asked for is looked at again once the model is known: one that doesn't fit makes way for one that does."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from drivetrain._engine.assemble import check_exclusive, make_backend, make_hub, verify_ranks
from drivetrain._engine.availability import detect_devices
from drivetrain._engine.plan import Arguments, Choice, PreparePlan, Rejection
from drivetrain._engine.resolve import resolve
from drivetrain.interfaces import Backend, PrepareRequest, ShardingPlan
from drivetrain.logging import get_logger
from drivetrain.memory.planning import PlanReport, format_bytes
from drivetrain.memory.preparing import devices_of, plan_of_request, state_bytes

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator

__all__ = ["reconsider"]

#: Below this share of a device's memory, a replica's state leaves enough for activations: nothing is traced.
_SMALL = 0.5


def reconsider(accelerator: Accelerator, request: PrepareRequest) -> None:
    """Before the first model is prepared: keep the backend that was found, or take another if the model doesn't fit. Collective.

    Args:
        accelerator: Whose.
        request: What is about to be prepared.
    """
    parts = accelerator._parts
    context = parts.backend.context
    memory = devices_of(context).memory if state_bytes(request) > _least(context) else None
    large = memory is not None and state_bytes(request) > _SMALL * memory
    if not _on_any_rank(large, parts.backend):
        return
    current = parts.plan.backend.name
    report = plan_of_request(request, context, backends=[current, *parts.plan.alternatives])
    parts.planning = report
    log = get_logger("drivetrain")
    if report is None:
        return
    if any(report.fits(p) for p in report.plans if p.backend == current and not p.options):
        log.info("Planned: the backend %s stays, since a model of %s fits.", current, _size(report))
        return
    best = report.best
    if best is None:
        log.warning("Planned: %s. The backend %s stays, and memory may run out.", report.reason, current)
        return
    log.warning("Planned: %s instead of %s, %s.", best.label, current, report.reason)
    _take(accelerator, best, report)


def _least(context: Any) -> int:
    """State up to so many bytes is small whatever the device: its memory isn't even asked for."""
    options = context.handlers.get("PlanningOptions")
    return 0 if options is not None and options.device_memory is not None else 2 * 10**9


def _on_any_rank(flag: bool, backend: Backend) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    told = torch.tensor([float(flag)], device=backend.device)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return bool(told.item())


def _size(report: PlanReport) -> str:
    return format_bytes(report.profile.parameter_bytes)


def _take(accelerator: Accelerator, best: ShardingPlan, report: PlanReport) -> None:
    """Put another backend, or other settings of this one, in the place of the one that was made."""
    parts = accelerator._parts
    plan = _plan(accelerator, best, report)
    backend = make_backend(parts.registry, plan, parts.device)
    check_exclusive(backend)
    backend.setup()
    verify_ranks(parts.registry, plan)
    parts.replaced.append(parts.backend)
    parts.plan, parts.backend = plan, backend
    parts.make_hub = partial(make_hub, parts.registry, plan, backend, parts.key)
    accelerator.backend = backend
    accelerator.gradient_state.backend = backend
    accelerator.gradient_state.ask_backend()


def _plan(accelerator: Accelerator, best: ShardingPlan, report: PlanReport) -> PreparePlan:
    parts = accelerator._parts
    spec = parts.registry.get("backend", best.backend)
    asked: Any = best.backend
    if best.options and spec.options is not None:
        asked = parts.registry.load("backend", spec.name, spec.options)(**best.options)
    arguments = Arguments.collect(**{**parts.given, "backend": asked, "process": parts.plan.process})
    plan = resolve(
        arguments,
        registry=parts.registry,
        environ=os.environ,
        availability=detect_devices(parts.registry.specs("device").values()),
    )
    provider = parts.registry.provider("backend", spec.name)
    choice = Choice("backend", spec.name, f"planned: {report.reason}", plugin=provider.name, version=provider.version)
    former = Rejection("backend", parts.plan.backend.name, "planned: the model doesn't fit with it")
    rejected = [r for r in plan.rejections if (r.kind, r.name) != ("backend", former.name)]
    return msgspec.structs.replace(
        plan,
        choices=tuple(choice if c.kind == "backend" else c for c in plan.choices),
        rejections=(*rejected, *(() if former.name == spec.name else (former,))),
    )
