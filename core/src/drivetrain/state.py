"""Rank information, process control and settings without (or beside) an Accelerator, under Accelerate's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.errors import NotPreparedError
from drivetrain.parallel.distributed_type import DistributedType
from drivetrain.parallel.process import ProcessControl
from drivetrain.parallel.process_state import PartialState

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator

__all__ = ["AcceleratorState", "DistributedType", "PartialState"]


def __getattr__(name: str) -> Any:
    from drivetrain._foreign import missing

    missing(__name__, name, AttributeError(f"module {__name__!r} has no attribute {name!r}"))


class AcceleratorState(ProcessControl):
    """One Accelerator's settings under Accelerate's names: ``accelerator.state``.

    A view of that Accelerator and not a singleton, so several with different settings live side by side. An attribute that is the
    keyword of an options object (``accepts`` of its spec) gives that object where the Accelerator has one, else None. Where a backend takes
    several by name (`Capability.NAMED_OPTIONS`), ``state.select_<keyword>(name)`` selects one for what is prepared next, ``state.get_<keyword>(name)``
    gives one, and ``state.<keyword>s`` all.

    Args:
        accelerator: Whose settings.

    Example:
        >>> from drivetrain import Accelerator
        >>> state = Accelerator(cpu=True, mixed_precision="bf16").state
        >>> state.mixed_precision, state.num_processes, state.distributed_type
        ('bf16', 1, <DistributedType.NO>)
    """

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        if accelerator is None:
            raise NotPreparedError(
                "AcceleratorState() has no process-wide state to show: use accelerator.state, or PartialState() for ranks and devices."
            )
        super().__init__(accelerator.plan.process, device=accelerator.device)
        self._accelerator = accelerator

    @property
    def distributed_type(self) -> DistributedType:
        """What Accelerate calls the kind of run."""
        kind: DistributedType = self._accelerator.distributed_type
        return kind

    @property
    def mixed_precision(self) -> str:
        """Name of the precision."""
        return self._accelerator.mixed_precision

    @property
    def backend(self) -> str | None:
        """Name of the communication backend; None with one process."""
        spec = self._accelerator.plan.device
        return spec.communication_backend if self.use_distributed else None

    @property
    def debug(self) -> bool:
        """Whether collectives are checked as strictly as can be."""
        return self._accelerator.plan.settings.debug

    @property
    def initialized(self) -> bool:
        """Always: an Accelerator is ready when it is made."""
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        parts = self._accelerator._parts
        backend, accepts = parts.plan.backend, parts.registry.accepts()
        named = parts.plan.named_options_of(backend)
        for keyword in (k for k, owner in accepts.items() if owner == ("backend", backend.name)):
            several = {
                f"{keyword}s": named or None,
                f"select_{keyword}": parts.backend.select_options,
                f"get_{keyword}": parts.backend.options_named,
                keyword: parts.backend.selected_options,
            }
            if name in several:
                return several[name]
        found = accepts.get(name)
        if found is None:
            raise AttributeError(f"accelerator.state has no attribute {name!r}.")
        return parts.plan.options_of(parts.registry.get(*found))

    def __repr__(self) -> str:
        return (
            f"AcceleratorState(distributed_type={self.distributed_type}, num_processes={self.num_processes}, "
            f"process_index={self.process_index}, device={self.device}, mixed_precision={self.mixed_precision})"
        )
