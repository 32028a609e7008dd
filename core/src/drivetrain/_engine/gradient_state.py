"""Where an Accelerator's accumulation stands: for checkpoints, and under the names of Accelerate's ``GradientState``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from drivetrain._engine.accumulation import Window
    from drivetrain.data.stack import LoaderStack
    from drivetrain.interfaces import Backend

__all__ = ["GradientState"]


class GradientState:
    """The part of an `Accumulator` that is asked between steps."""

    backend: Backend
    stack: LoaderStack
    num_steps: int
    sync_with_dataloader: bool
    sync_each_batch: bool
    adjust_scheduler: bool
    sync_gradients: bool
    reference: float
    _windows: dict[tuple[torch.nn.Module, ...], Window]
    _outside: Window
    #: The window that ``step`` belongs to: the last one entered, or the one that the user cuts by hand.
    current: Window

    def window(self, models: tuple[torch.nn.Module, ...]) -> Window:
        """The window of these models."""
        raise NotImplementedError

    def declared_window(self, models: tuple[torch.nn.Module, ...], count: int) -> Window:
        """The window of these models, which has so many micro-batches."""
        raise NotImplementedError

    # -- state, for checkpoints --------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether any window has gradients that no step has used."""
        return any(not w.last for w in self._windows.values())

    @property
    def counts_items(self) -> bool:
        """Whether an open window's losses are weighted with item counts."""
        return any(w._items is not None for w in self._windows.values() if not w.last)

    def counters(self, models: Sequence[torch.nn.Module]) -> dict[str, Any]:
        """Where open windows stand: numbers that are equal on every rank."""
        position = {id(m): i for i, m in enumerate(models)}
        open_windows = [
            {
                "models": [position.get(id(m), -1) for m in w.models],
                "index": w.index,
                "size": w.size,
                "assumed": w._assumed,
                "seen": w._seen,
                "weighted": w._weighted,
                "declared": getattr(w, "declared", False),
            }
            for w in self._windows.values()
            if not w.last
        ]
        return {"reference": self.reference, "windows": open_windows}

    def load_counters(self, models: Sequence[torch.nn.Module], state: Mapping[str, Any]) -> None:
        """Put back what `counters` returned."""
        self.reference = float(state.get("reference", 0.0))
        self._windows.clear()
        self.current = self._outside
        self.sync_gradients = True
        for saved in state.get("windows", ()):
            of = tuple(models[i] for i in saved["models"] if i >= 0)
            window = self.declared_window(of, int(saved["size"])) if saved.get("declared") else self.window(of)
            window.reset()
            if saved.get("declared"):
                window.declared = True  # type: ignore[attr-defined]
            window.last = False
            window.index, window.size = int(saved["index"]), int(saved["size"])
            window._assumed, window._seen = float(saved["assumed"]), float(saved["seen"])
            window._weighted = saved["weighted"]

    def window_sums(self, models: Sequence[torch.nn.Module]) -> dict[str, float]:
        """Items counted so far in open windows, on this rank."""
        return {
            str(i): float(w._items)
            for i, w in enumerate(w for w in self._windows.values() if not w.last)
            if w._items is not None
        }

    def load_window_sums(self, models: Sequence[torch.nn.Module], state: Mapping[str, float]) -> None:
        """Put back what `window_sums` returned, after `load_counters`."""
        for i, window in enumerate(w for w in self._windows.values() if not w.last):
            if str(i) in state:
                window._items = torch.tensor(state[str(i)], dtype=torch.float32, device=self.backend.device)

    # -- names of Accelerate's GradientState -------------------------------------------------------------------------------

    def _set_sync_gradients(self, value: bool) -> None:
        self.sync_gradients = value

    @property
    def active_dataloader(self) -> Any:
        """The loader being iterated, or None."""
        return self.stack.active

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is being iterated."""
        return self.stack.active is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the present batch is its loader's last."""
        loader = self.stack.active
        return loader is not None and loader.batch is not None and loader.batch.is_last

    @property
    def remainder(self) -> int:
        """Rows of the last, smaller global batch; -1 when unknown."""
        loader = self.stack.active
        return -1 if loader is None else int(getattr(loader, "remainder", -1))

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """The settings of ``GradientAccumulationPlugin``."""
        return {
            "num_steps": self.num_steps,
            "adjust_scheduler": self.adjust_scheduler,
            "sync_with_dataloader": self.sync_with_dataloader,
            "sync_each_batch": self.sync_each_batch,
        }
