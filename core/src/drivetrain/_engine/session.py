"""The Accelerator as checkpoints see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from drivetrain.data.random import rng_state, set_rng_state
from drivetrain.interfaces import Backend, Precision
from drivetrain.specs import ProcessInfo

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator

__all__ = ["AcceleratorSession"]


class AcceleratorSession:
    """Everything of an Accelerator that a checkpoint holds; see `drivetrain.checkpoint.session.Session`.

    Args:
        accelerator: Whose.

    Example:
        >>> from drivetrain import Accelerator
        >>> AcceleratorSession(Accelerator(cpu=True)).counters()["step"]
        0
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    @property
    def process(self) -> ProcessInfo:
        """Who this process is."""
        return self._accelerator.plan.process

    @property
    def backend(self) -> Backend:
        """Gives and takes the state of models and optimizers."""
        return self._accelerator.backend

    @property
    def precision(self) -> Precision:
        """Holds the loss scale."""
        return self._accelerator.backend.precision

    @property
    def models(self) -> Sequence[torch.nn.Module]:
        """The prepared models."""
        return self._accelerator._models

    @property
    def optimizers(self) -> Sequence[tuple[Any, Sequence[torch.nn.Module]]]:
        """The optimizers that do the work, each with the models whose parameters it updates."""
        owners: dict[int, int] = {}
        for i, model in enumerate(self.models):
            for identity in self.backend.parameter_names([model]):
                owners.setdefault(identity, i)
        pairs = []
        for prepared in self._accelerator._optimizers:
            indices = sorted({owners[id(p)] for p in prepared.parameters() if id(p) in owners})
            pairs.append((prepared.optimizer, [self.models[i] for i in indices]))
        return pairs

    @property
    def schedulers(self) -> Sequence[Any]:
        """Learning-rate schedulers."""
        return self._accelerator._schedulers

    @property
    def loaders(self) -> Sequence[Any]:
        """Data loaders."""
        return self._accelerator._dataloaders

    @property
    def custom_objects(self) -> Sequence[Any]:
        """Objects registered for checkpointing."""
        return self._accelerator._custom_objects

    @property
    def mid_window(self) -> bool:
        """Whether an accumulation window is open."""
        return self._accelerator.gradient_state.is_open

    @property
    def window_reduction(self) -> Literal["sum", "mean"]:
        """How ranks' gradients of an open window combine: item-weighted ones add up, others are means already."""
        return "sum" if self._accelerator.gradient_state.counts_items else "mean"

    def window_state(self) -> Mapping[str, float]:
        """Sums over this rank's part of open windows."""
        return self._accelerator.gradient_state.window_sums(self.models)

    def set_window_state(self, state: Mapping[str, float]) -> None:
        """Put back what `window_state` returned."""
        self._accelerator.gradient_state.load_window_sums(self.models, state)

    def counters(self) -> Mapping[str, Any]:
        """Steps, epochs, and where windows stand."""
        accelerator = self._accelerator
        return {
            "step": accelerator.step,
            "epoch": accelerator._epoch_to_go_on_with,
            "accumulation": accelerator.gradient_state.counters(self.models),
        }

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Put back what `counters` returned."""
        self._accelerator.step = int(counters["step"])
        self._accelerator.epoch = int(counters["epoch"])
        self._accelerator.gradient_state.load_counters(self.models, counters.get("accumulation", {}))

    def rng_state(self) -> Any:
        """State of this rank's random number generators."""
        return rng_state(devices=[self.backend.context.device])

    def set_rng_state(self, state: Any) -> None:
        """Put back what `rng_state` returned."""
        set_rng_state(state, devices=[self.backend.context.device])

    def plan_facts(self) -> Mapping[str, Any]:
        """The resolved configuration and the versions of plugins."""
        return {"plan": self._accelerator.plan.to_dict(), "plugins": self._accelerator._parts.registry.inventory()}

    def tracker_run_ids(self) -> Mapping[str, str]:
        """Ids of the runs of trackers."""
        run_ids: Mapping[str, str] = self._accelerator._hub.run_ids()
        return run_ids

    def set_tracker_run_ids(self, run_ids: Mapping[str, str]) -> None:
        """Runs that ``init_trackers`` goes on with."""
        self._accelerator._run_ids = dict(run_ids)
