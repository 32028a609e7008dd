"""The plan for a training: what all installed planners propose, what of it fits, and the fastest of that. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.errors import ConfigurationError
from drivetrain.interfaces import ShardingPlan, ShardingPlanner, TrainingRequest
from drivetrain.memory.hardware import Hardware
from drivetrain.memory.profile import ModelProfile

__all__ = ["PlanReport", "format_bytes", "format_seconds", "make_plans", "micro_batch_sizes"]

#: Predicted times that differ by less than this are taken as equal.
_EQUAL = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Candidates, and which one was taken.

    Args:
        profile: The model.
        hardware: The devices.
        request: What is trained.
        plans: All candidates, of all sizes of micro-batches.
        best: The fastest that fits; None if nothing does.

    Example:
        >>> from drivetrain.memory import known_hardware, profile_of_counts
        >>> profile = profile_of_counts(parameters=1e8, layers=4, hidden=512, sequence=128)
        >>> make_plans(profile, known_hardware("t4"), TrainingRequest(batch_size=8)).best.backend
        'single'
    """

    profile: ModelProfile
    hardware: Hardware
    request: TrainingRequest
    plans: tuple[ShardingPlan, ...]
    best: ShardingPlan | None

    @property
    def budget(self) -> int:
        """Bytes that a plan may need per device: its memory less the headroom."""
        return int(self.hardware.memory * (1 - self.request.headroom))

    def fits(self, plan: ShardingPlan) -> bool:
        """Whether a plan fits in the device's memory, and what it offloads in the CPU's."""
        host = self.hardware.host_memory
        return plan.peak_bytes <= self.budget and (
            host is None or plan.host_bytes <= host * (1 - self.request.headroom)
        )

    def shown(self) -> list[ShardingPlan]:
        """One plan of each kind: the fastest size that fits, or else the smallest one; fitting ones first, by time."""
        kinds: dict[str, ShardingPlan] = {}
        for plan in sorted(self.plans, key=self._order):
            kinds.setdefault(plan.label, plan)
        rest = sorted(kinds.values(), key=self._order)
        return rest if self.best is None else [self.best, *(p for p in rest if p.label != self.best.label)]

    def _order(self, plan: ShardingPlan) -> tuple[Any, ...]:
        if self.fits(plan):
            return 0, plan.step_seconds, plan.peak_bytes
        return 1, plan.peak_bytes

    @property
    def reason(self) -> str:
        """Why the best plan is the best, or why there is none; one sentence."""
        limit = f"{format_bytes(self.budget)} per device ({format_bytes(self.hardware.memory)} less {self.request.headroom:.0%})"
        if not self.plans:
            return "no installed planner proposes anything for this batch and number of devices"
        if self.best is None:
            least = min(self.plans, key=lambda p: p.peak_bytes)
            return f"nothing fits in {limit}: the smallest, {least.label}, needs {format_bytes(least.peak_bytes)}"
        others = [p for p in self.shown()[1:] if self.fits(p)]
        sentence = f"the fastest that fits in {limit}"
        if not others:
            return f"the only kind that fits in {limit}"
        second = others[0]
        return f"{sentence}; {second.label} would take {_times(second, self.best)} the time"

    def to_dict(self) -> dict[str, Any]:
        """As JSON-like data."""
        return {
            "model": self.profile.to_dict(),
            "hardware": {
                "name": self.hardware.name,
                "devices": self.hardware.devices,
                "devices_per_machine": self.hardware.devices_per_machine,
                "memory": self.hardware.memory,
                "source": self.hardware.source,
            },
            "batch_size": self.request.batch_size,
            "budget": self.budget,
            "best": None if self.best is None else self._plan(self.best),
            "reason": self.reason,
            "candidates": [self._plan(p) for p in self.shown()],
        }

    def _plan(self, plan: ShardingPlan) -> dict[str, Any]:
        return {
            "backend": plan.backend,
            "strategy": plan.strategy,
            "options": dict(plan.options),
            "micro_batch": plan.micro_batch,
            "accumulation": plan.accumulation,
            "sync_each_batch": plan.sync_each_batch,
            "recompute": plan.recompute,
            "offloaded": list(plan.offloaded),
            "fits": self.fits(plan),
            "peak_bytes": plan.peak_bytes,
            "peak_at": plan.peak_at,
            "memory_bytes": dict(plan.memory_bytes),
            "host_bytes": plan.host_bytes,
            "communication_bytes": plan.communication_bytes,
            "step_seconds": plan.step_seconds,
            "notes": list(plan.notes),
        }


def make_plans(
    profile: ModelProfile,
    hardware: Hardware,
    request: TrainingRequest,
    *,
    planners: Iterable[ShardingPlanner] | None = None,
    backend: str = "auto",
    keep: Callable[[ShardingPlan], bool] | None = None,
) -> PlanReport:
    """Ask planners, and choose.

    Args:
        profile: The model.
        hardware: The devices.
        request: What is trained, and what may be changed.
        planners: Who proposes; None: all that are installed.
        backend: Only plans for this backend; "auto" for all.
        keep: Says of each plan whether it may be taken; None: all may.

    Raises:
        ConfigurationError: If no planner proposes plans for ``backend``.

    Example:
        >>> from drivetrain.memory import known_hardware, profile_of_counts
        >>> profile = profile_of_counts(parameters=7e9, layers=32, hidden=4096, precision="bf16")
        >>> make_plans(profile, known_hardware("t4"), TrainingRequest(batch_size=1), backend="single").reason.split(":")[0]
        'nothing fits in 14.4 GB per device (16.0 GB less 10%)'
    """
    asked = [p for p in (_installed() if planners is None else planners) if backend in ("auto", p.spec.backend)]
    if not asked:
        raise ConfigurationError(
            f"No planner proposes plans for the backend {backend!r}. `drivetrain plugins` lists what is installed."
        )
    plans = tuple(
        plan for planner in asked for plan in planner.propose(profile, hardware, request) if keep is None or keep(plan)
    )
    report = PlanReport(profile=profile, hardware=hardware, request=request, plans=plans, best=None)
    return PlanReport(
        profile=profile,
        hardware=hardware,
        request=request,
        plans=plans,
        best=_best([p for p in plans if report.fits(p)]),
    )


def _best(fitting: Sequence[ShardingPlan]) -> ShardingPlan | None:
    """The fastest; of those that are as good as equal, the one that does least besides computing."""
    timed = [(p.step_seconds, p) for p in fitting if p.step_seconds is not None]
    if not timed:
        return min(fitting, key=lambda p: p.peak_bytes, default=None)
    fastest = min(seconds for seconds, _ in timed)
    close = [p for seconds, p in timed if seconds <= fastest * (1 + _EQUAL)]
    return min(
        close,
        key=lambda p: (len(p.offloaded), p.recompute != "none", p.communication_bytes, p.step_seconds, p.peak_bytes),
    )


def _installed() -> list[ShardingPlanner]:
    from drivetrain._plugins import get_registry

    registry = get_registry()
    return [
        registry.load("sharding-planner", name)(spec)
        for name, spec in sorted(registry.specs("sharding-planner").items())
    ]


def micro_batch_sizes(batch_size: int, devices: int, *, most: int = 256) -> tuple[int, ...]:
    """Sizes that a device's micro-batch may have: powers of two that divide its share of the batch, and the share itself.

    Raises:
        ConfigurationError: If the batch can't be divided over the devices.

    Example:
        >>> micro_batch_sizes(96, 8)
        (1, 2, 4, 12)
    """
    share, rest = divmod(batch_size, devices)
    if rest or not share:
        raise ConfigurationError(
            f"A batch of {batch_size} can't be divided over {devices} devices: make it a multiple of {devices}."
        )
    powers = {2**i for i in range(share.bit_length()) if share % 2**i == 0 and 2**i <= most}
    return tuple(sorted(powers | ({share} if share <= most else set())))


def _times(one: ShardingPlan, other: ShardingPlan) -> str:
    if not one.step_seconds or not other.step_seconds:
        return "an unknown multiple of"
    return f"{one.step_seconds / other.step_seconds:.2f} times"


def format_bytes(count: float) -> str:
    """Bytes for people.

    Example:
        >>> format_bytes(81_234_567_890), format_bytes(512)
        ('81.2 GB', '512 B')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def format_seconds(seconds: float | None) -> str:
    """A time for people.

    Example:
        >>> format_seconds(0.0123), format_seconds(65.0), format_seconds(None)
        ('12.3 ms', '65.0 s', '?')
    """
    if seconds is None:
        return "?"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
