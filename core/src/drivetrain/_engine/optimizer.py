"""A prepared optimizer: acts only where a window ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from drivetrain._engine.accumulation import Accumulator
    from drivetrain.interfaces import Backend

__all__ = ["PreparedOptimizer"]


class PreparedOptimizer(torch.optim.Optimizer):
    """Steps and clears gradients only at a window's end; everything else is the optimizer's own.

    Args:
        optimizer: The torch optimizer (or the backend's own) that does the work.
        backend: Runs the step.
        accumulator: Knows where windows end.
        on_step: Called after a step that was not skipped, once per window.

    Example:
        >>> # made by accelerator.prepare(optimizer); the optimizer itself stays reachable:
        >>> PreparedOptimizer.optimizer.__doc__
        'The optimizer that does the work.'
    """

    def __init__(
        self, optimizer: Any, *, backend: Backend, accumulator: Accumulator, on_step: Callable[[], None]
    ) -> None:
        # Not Optimizer.__init__: state and groups are the wrapped one's.
        self._optimizer = optimizer
        self._backend = backend
        self._accumulator = accumulator
        self._on_step = on_step
        self._stopped = False  # the last step was left out by `on_nonfinite="skip"`
        accumulator.optimizers += 1

    @property
    def optimizer(self) -> Any:
        """The optimizer that does the work."""
        return self._optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """State by parameter."""
        return self._optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self._optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """Default settings of groups."""
        defaults: dict[str, Any] = self._optimizer.defaults
        return defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._optimizer.defaults = defaults

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return f"PreparedOptimizer({self._optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer."""
        self._optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state dict, in torch's layout."""
        state: dict[str, Any] = self._optimizer.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._optimizer.load_state_dict(state_dict)

    def parameters(self) -> list[torch.Tensor]:
        """The models' parameters that it updates, over all groups."""
        return self._backend.optimizer_parameters(self._optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients where a window ends or starts; in between they are kept."""
        accumulator = self._accumulator
        window = accumulator.inside
        if accumulator.sync_gradients if window is None else window.may_clear(self._optimizer):
            if accumulator.plain_zero_grad:
                self._optimizer.zero_grad(set_to_none=set_to_none)
            else:
                self._backend.zero_grad(self._optimizer, set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, at a window's end; inside a window nothing happens."""
        accumulator = self._accumulator
        if accumulator.inside is not None:
            accumulator.inside.told_to_step(self._optimizer)
        if not accumulator.sync_gradients:
            return None
        accumulator.finalize(self._optimizer, self.parameters)
        window = accumulator.current
        if accumulator.guard is not None:
            self._stopped = accumulator.guard.stops(window, self)
            if self._stopped:
                window.stepped = True
                return None
        if accumulator.plain_step and closure is None:
            result = self._optimizer.step()
        else:
            result = self._backend.optimizer_step(self._optimizer, closure)
        if not window.stepped:
            window.stepped = True
            if not (accumulator.may_skip and self._backend.step_was_skipped(self._optimizer)):
                self._on_step()
        return result

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients overflowed on some process, or something wasn't finite."""
        return self._stopped or self._backend.step_was_skipped(self._optimizer)

    def train(self) -> None:
        """Pass on to optimizers that distinguish modes (schedule-free ones)."""
        if hasattr(self._optimizer, "train"):
            self._optimizer.train()

    def eval(self) -> None:
        """Pass on to optimizers that distinguish modes (schedule-free ones)."""
        if hasattr(self._optimizer, "eval"):
            self._optimizer.eval()
