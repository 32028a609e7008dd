"""One engine and its accumulation window: gradients are complete, normalized, clipped and used when that is asked for, and not before."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import combine_grad_norm_groups

from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain_deepspeed.partitions import Partition, make_partition

__all__ = ["Engine"]


class Engine:
    """A model, the optimizer that updates it, and DeepSpeed's engine for both.

    Gradients are reduced as DeepSpeed does it at each stage: in backward (stages 2 and 3), or once they are needed (stages 0 and 1). That a
    window ends is only said to it then: so a micro-batch may have several losses, and a script may cut windows as it likes.

    Args:
        engine: DeepSpeed's engine.
        groups: The parameters of each of its groups, as the model has them.
        stage: The ZeRO stage.
        clips_to: The norm to clip to where the script doesn't say one; 0 for none.
    """

    def __init__(self, engine: Any, groups: Sequence[Sequence[Any]], *, stage: int, clips_to: float) -> None:
        self.engine = engine
        #: The torch optimizer in it: the script's own, or one from the configuration.
        self.optimizer: Any = engine.basic_optimizer
        self.groups = [list(group) for group in groups]
        self.stage = stage
        self.clips_to = clips_to
        self.skipped = False
        self.partition: Partition = make_partition(engine, stage)
        self.zero: Any = engine.optimizer
        self._known = {id(p) for group in self.groups for p in group}
        self._pending = False  # a backward ran since the last step
        self._complete = False  # and its gradients are reduced
        self._clipped: torch.Tensor | None = None  # what the step will multiply them with

    # -- gradients -------------------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> list[Any]:
        """What is updated, in the order of the groups."""
        return [p for group in self.groups for p in group]

    def holds(self, parameter: Any) -> bool:
        """Whether the optimizer updates it."""
        return id(parameter) in self._known

    def begin_backward(self) -> None:
        """A backward through this model follows."""
        if self.stage:
            self.zero.clear_backward_seen_flag()  # else a second one without a forward before it replaces the first one's gradients
        self.engine.set_gradient_accumulation_boundary(False)
        self._pending, self._complete = True, False

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, another engine runs a backward that goes through this model, too: what its own ``backward`` does around it is done here."""
        engine = self.engine
        engine._running_engine_backward_count += 1
        engine._running_engine_backward = True
        try:
            yield
            engine._backward_epilogue()
        finally:
            engine._running_engine_backward_count -= 1
            engine._running_engine_backward = engine._running_engine_backward_count > 0

    def complete(self) -> None:
        """Reduce the window's gradients, if they aren't."""
        if self._complete or not self._pending:
            return
        self._complete = True
        self.engine.set_gradient_accumulation_boundary(True)
        if self.stage in (0, 1):
            self.engine.allreduce_gradients()
        else:
            self.zero.finalize_gradient_accumulation_boundary()

    def scale_by(self, factor: float) -> None:
        """Multiply the gradients that the step will use: at stages 1 to 3 with the loss scale by which it divides them."""
        self.zero.external_loss_scale = self._divisor() / factor
        self.zero.custom_loss_scaler = True

    def _divisor(self) -> float:
        return float(self.zero.loss_scale)

    def normalize(self, factor: torch.Tensor) -> None:
        """Multiply the window's gradients with a 0-d tensor; at stages 1 to 3 that is a read on the host."""
        if not self._pending:
            return
        if self.stage:
            self.scale_by(float(factor))
            return
        self.complete()
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor.to(grads[0].device))

    def clip(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """The true norm now, over all processes; the step that follows clips to ``max_norm``.

        Raises:
            ConfigurationError: If the configuration clips to another norm.
        """
        if self.clips_to and math.isfinite(max_norm) and (max_norm != self.clips_to or norm_type != 2.0):
            raise ConfigurationError(
                f"clip_grad_norm_ was called with max_norm={max_norm:g} (norm {norm_type:g}), and DeepSpeed's configuration has "
                f'gradient_clipping={self.clips_to:g}. Leave one of them out, or write "auto" into the configuration.'
            )
        if not self._pending:
            return torch.zeros((), device=self.engine.device)
        self.complete()
        if self.stage and norm_type == 2.0:
            norm = self._engines_norm()
            if math.isfinite(max_norm):
                self.zero.clip_grad = max_norm
                self._clipped = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            return norm
        norm = self._own_norm(norm_type)
        if self.stage == 0:
            self._clip_whole(norm, max_norm)
        elif math.isfinite(max_norm):
            self.scale_by(min(1.0, max_norm / (float(norm) + 1e-6)))
        return norm

    def _engines_norm(self) -> torch.Tensor:
        zero = self.zero
        groups = zero._get_norm_groups() if self.stage == 3 else [zero.scaled_global_norm()]
        scaled: torch.Tensor = combine_grad_norm_groups(groups)
        return torch.where(scaled < 0, float("inf"), scaled / zero.loss_scale).to(self.engine.device)

    def _own_norm(self, norm_type: float) -> torch.Tensor:
        grads = [g.float() for _, g in self.partition.gradients() if g.numel()]
        norm = torch.nn.utils.get_total_norm(grads, norm_type)
        norm = norm.to(self.engine.device, torch.float32)
        if self.stage:
            if math.isinf(norm_type):
                dist.all_reduce(norm, op=dist.ReduceOp.MAX)
            else:
                norm = norm**norm_type
                dist.all_reduce(norm)
                norm = norm ** (1.0 / norm_type)
            norm = norm / self._divisor()
        return norm

    def _clip_whole(self, norm: torch.Tensor, max_norm: float) -> None:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if grads and math.isfinite(max_norm):
            torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0).to(grads[0].device))

    def gradients(self) -> list[tuple[Any, torch.Tensor]]:
        """What this process has of the gradients that the step will use: parameters and values."""
        if not self._pending:
            return []
        self.complete()
        found = self.partition.gradients()
        if not self.stage:
            return found
        divisor = self._divisor()
        factor = None if self._clipped is None else self._clipped / divisor
        if factor is None and divisor == 1.0:
            return found
        return [(p, g / divisor if factor is None else g * factor.to(g.device)) for p, g in found]

    def expected_collectives(self, world_size: int) -> tuple[Counter[str], Counter[str]]:
        """What an engine in fp32 sends in each micro-batch, and at a window's end.

        At stage 3 gathers are counted as if DeepSpeed's prefetching joins as much as its bucket takes; modules that are used in another order, or more than
        once, add some.

        Args:
            world_size: Number of processes.
        """
        zero, sizes = self.zero, [getattr(p, "ds_numel", p.numel()) for p in self.parameters if p.requires_grad]
        micro: Counter[str] = Counter()
        if self.stage == 0:
            return micro, Counter(all_reduce=1)
        buckets = _buckets(reversed(sizes), int(zero.reduce_bucket_size))
        if self.stage == 3:
            coordinator = zero.parameter_offload
            gathered = sum(n for n, p in zip(sizes, self.parameters, strict=False) if not p.ds_persist)
            gathers = -(-gathered // max(1, coordinator._prefetch_bucket_sz)) if world_size > 1 else 0
            micro += Counter(reduce_scatter=buckets, all_gather=gathers)
            return micro, micro + Counter(
                all_reduce=len(zero.fp16_groups), all_gather=int(bool(zero.persistent_parameters))
            )
        window = Counter(
            all_reduce=buckets + len(zero.bit16_groups), all_gather=len(zero.bit16_groups) if world_size > 1 else 0
        )
        if self.stage == 2:
            micro["all_reduce"] += buckets
        return micro, window

    # -- the step --------------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Use the window's gradients; without any, nothing happens."""
        if not self._pending:
            return
        self.complete()
        try:
            self.engine.step()
        finally:
            self._end_window()
        self.skipped = not self.engine.was_step_applied()

    def zero_grad(self) -> None:
        """Drop the window's gradients; after a step there are none."""
        if self._pending:
            self._end_window()
            self.partition.clear()

    def _end_window(self) -> None:
        """What was said for one step holds no longer."""
        self._pending, self._clipped = False, None
        if self.stage:
            self.zero.custom_loss_scaler = False
            self.zero.clip_grad = self.clips_to

    def refuse_parts(self, parameters: Sequence[Any]) -> None:
        """Parts of an engine's parameters can't be clipped.

        Raises:
            UnsupportedError: If some of its parameters aren't among these.
        """
        given = {id(p) for p in parameters}
        if self.stage and any(id(p) not in given for p in self.parameters if p.requires_grad):
            raise UnsupportedError(
                "DeepSpeed clips all parameters of an optimizer together: give clip_grad_norm_ all of them, model.parameters()."
            )


def _buckets(sizes: Iterable[int], capacity: int) -> int:
    """How many buckets take these sizes, in this order."""
    count, room = 0, 0
    for size in sizes:
        if size > room:
            count, room = count + 1, max(capacity, size)
        room -= size
    return count
