"""What checkpoints need to know of a training session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import torch

from drivetrain.errors import CheckpointError
from drivetrain.interfaces.backend import Backend
from drivetrain.interfaces.precision import Precision
from drivetrain.specs import ProcessInfo

__all__ = ["Session", "Stateful", "check_stateful"]


@runtime_checkable
class Stateful(Protocol):
    """Has a state that can be taken and put back."""

    def state_dict(self) -> Any:
        """The state: plain data and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Put back what `state_dict` returned."""


class Session(Protocol):
    """A training session, as checkpoints see it. All methods are called on every rank, in the same order."""

    @property
    def process(self) -> ProcessInfo:
        """Who this process is."""

    @property
    def backend(self) -> Backend:
        """Gives and takes the state of models and optimizers."""

    @property
    def precision(self) -> Precision:
        """Holds the loss scale."""

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        """The prepared models."""

    @property
    def optimizers(self) -> Sequence[tuple[Any, Sequence[torch.nn.Module]]]:
        """The prepared optimizers, each with the models whose parameters it updates."""

    @property
    def schedulers(self) -> Sequence[Stateful]:
        """Learning-rate schedulers: equal on every rank."""

    @property
    def loaders(self) -> Sequence[Stateful]:
        """Data loaders. Their state is saved per rank; at another world size, a rank without a saved state of its own gets the first rank's."""

    @property
    def custom_objects(self) -> Sequence[Stateful]:
        """Objects registered for checkpointing. The first rank's state is saved, and loaded on every rank."""

    @property
    def mid_window(self) -> bool:
        """Whether an accumulation window is open: then gradients are part of the state."""

    @property
    def window_reduction(self) -> Literal["sum", "mean"]:
        """How the ranks' gradients of the open window combine.

        "sum" if the window's end divides by a total over all ranks (item weights): what a load at another world size gives the ranks then
        adds up to what was saved. "mean" if each rank's gradients are a mean already: then their mean over ranks stays the same.
        """

    def window_state(self) -> Mapping[str, float]:
        """Sums over this rank's part of the open window, such as its item count; treated like the gradients at another world size."""

    def set_window_state(self, state: Mapping[str, float]) -> None:
        """Put back what `window_state` returned; empty when the checkpoint was taken between windows."""

    def counters(self) -> Mapping[str, Any]:
        """Steps, epochs, the position in the window: plain numbers, equal on every rank."""

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Put back what `counters` returned."""

    def rng_state(self) -> Any:
        """State of this rank's random number generators: plain data and tensors."""

    def set_rng_state(self, state: Any) -> None:
        """Put back what `rng_state` returned. Not called on ranks that the checkpoint holds no state for."""

    def plan_facts(self) -> Mapping[str, Any]:
        """The resolved configuration and the versions of library and plugins, as JSON holds them."""

    def tracker_run_ids(self) -> Mapping[str, str]:
        """Ids of the runs of trackers, by tracker."""

    def set_tracker_run_ids(self, run_ids: Mapping[str, str]) -> None:
        """Runs to go on with: what `tracker_run_ids` returned when the checkpoint was saved."""


def check_stateful(objects: Iterable[Any]) -> None:
    """Refuse objects that can't be registered for checkpointing.

    Raises:
        CheckpointError: Naming all that lack ``state_dict`` or ``load_state_dict``.

    Example:
        >>> check_stateful([torch.nn.Linear(1, 1)])
        >>> check_stateful([torch.nn.Linear(1, 1), 3])
        Traceback (most recent call last):
        ...
        drivetrain.errors.CheckpointError: Only objects with state_dict() and load_state_dict() can be registered for checkpointing; these lack them: item 1 (int)
    """
    bad = [f"item {i} ({type(o).__name__})" for i, o in enumerate(objects) if not isinstance(o, Stateful)]
    if bad:
        raise CheckpointError(
            "Only objects with state_dict() and load_state_dict() can be registered for checkpointing; "
            f"these lack them: {', '.join(bad)}"
        )
