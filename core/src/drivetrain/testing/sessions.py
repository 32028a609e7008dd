"""A training session without an Accelerator: what tests of checkpoints and checkpoint formats save and load."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from drivetrain.checkpoint.session import Stateful
from drivetrain.interfaces.backend import Backend, BackendContext
from drivetrain.interfaces.device import TorchDevice
from drivetrain.interfaces.precision import Precision
from drivetrain.specs import BackendSpec, Capability, DeviceSpec, PrecisionSpec, ProcessInfo

__all__ = ["PlainSession", "plain_backend"]


def plain_backend(process: ProcessInfo | None = None) -> Backend:
    """The base backend in full precision on the CPU.

    Example:
        >>> plain_backend().device
        device(type='cpu')
    """
    device = TorchDevice(DeviceSpec(name="cpu", torch_type="cpu", communication_backend="gloo", priority=0))
    context = BackendContext(
        process=process or ProcessInfo(),
        device=device,
        torch_device=torch.device("cpu"),
        precision=Precision(PrecisionSpec(name="fp32"), device_type="cpu"),
    )
    return Backend(BackendSpec(name="plain", capabilities=frozenset({Capability.MID_WINDOW_STATE})), context)


class PlainSession:
    """Objects as they are, with counters and the generators of Python, NumPy and torch.

    Args:
        models: The models.
        optimizers: Optimizers of all those models together, or pairs of an optimizer and its models.
        schedulers: Schedulers.
        loaders: Objects with a state per rank.
        custom_objects: Other objects with a state.
        process: Who this process is.
        backend: How models and optimizers give their state; by default as they are.

    Example:
        >>> session = PlainSession([torch.nn.Linear(1, 1)])
        >>> session.step += 1
        >>> session.counters()
        {'step': 1, 'epoch': 0}
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module] = (),
        optimizers: Sequence[Any] = (),
        schedulers: Sequence[Stateful] = (),
        *,
        loaders: Sequence[Stateful] = (),
        custom_objects: Sequence[Stateful] = (),
        process: ProcessInfo | None = None,
        backend: Backend | None = None,
    ) -> None:
        self.process = process or ProcessInfo()
        self.backend = backend or plain_backend(self.process)
        self.models = list(models)
        self.optimizers = [o if isinstance(o, tuple) else (o, self.models) for o in optimizers]
        self.schedulers = list(schedulers)
        self.loaders = list(loaders)
        self.custom_objects = list(custom_objects)
        self.step = 0
        self.epoch = 0
        self.mid_window = False
        self.window: dict[str, float] = {}
        self.window_reduction: Literal["sum", "mean"] = "sum"

    @property
    def precision(self) -> Precision:
        """The backend's."""
        return self.backend.precision

    def window_state(self) -> Mapping[str, float]:
        """Sums of the open window."""
        return self.window

    def set_window_state(self, state: Mapping[str, float]) -> None:
        """Put them back."""
        self.window = dict(state)

    def counters(self) -> Mapping[str, Any]:
        """Step and epoch."""
        return {"step": self.step, "epoch": self.epoch}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Put them back."""
        self.step, self.epoch = counters["step"], counters["epoch"]

    def rng_state(self) -> Any:
        """State of the generators."""
        return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}

    def set_rng_state(self, state: Any) -> None:
        """Put it back."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])

    def plan_facts(self) -> Mapping[str, Any]:
        """Nothing was resolved."""
        return {"session": "plain"}

    def tracker_run_ids(self) -> Mapping[str, str]:
        """There are no trackers."""
        return {}

    def set_tracker_run_ids(self, run_ids: Mapping[str, str]) -> None:
        """There are no trackers."""
