"""One accumulation window: what is sent, clipped, skipped and kept local."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import pytest
import torch

from drivetrain.specs import Capability
from drivetrain.testing._backend_base import BackendKit, check_all_close
from drivetrain.testing.communication import count_collectives
from drivetrain.testing.pytest_plugin import Workers
from drivetrain.testing.training import make_data, make_model, whole

__all__ = ["WindowTests"]

T = TypeVar("T")


class Loop:
    """On a rank: a prepared model and optimizer, and micro-batches of fixed rows without a loader.

    Args:
        kit: Makes the Accelerator.
        lr: Learning rate of plain SGD, so that the step shows the gradient.
        **kwargs: For the Accelerator.
    """

    def __init__(self, kit: BackendKit, *, lr: float = 0.1, **kwargs: Any) -> None:
        self.accelerator = kit.make_accelerator(**kwargs)
        inner = make_model()
        self.model, self.optimizer = self.accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=lr))
        self.inner = self.accelerator.unwrap_model(self.model)
        rows = torch.utils.data.default_collate(make_data(64))
        self.rows = {name: value.to(self.accelerator.device) for name, value in rows.items()}
        self.taken = 0

    def batch(self) -> dict[str, torch.Tensor]:
        """The next four rows of this rank."""
        backend = self.accelerator.backend
        start = 4 * (self.taken * backend.data_world_size + backend.data_rank) % 64
        self.taken += 1
        return {name: value[start : start + 4] for name, value in self.rows.items()}

    def loss(self, factor: float = 1.0) -> torch.Tensor:
        """The mean loss of the next rows."""
        batch = self.batch()
        return torch.nn.functional.cross_entropy(self.model(batch["x"]).float(), batch["y"]) * factor

    def micro_batch(self, *, factor: float = 1.0, weight: Any = None) -> None:
        """Forward, backward, step, zero_grad."""
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.loss(factor), **({} if weight is None else {"weight": weight}))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> dict[str, torch.Tensor]:
        """Full weights."""
        return whole(self.accelerator.backend.model_state(self.model))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Full gradients."""
        return whole({n: p.grad for n, p in self.inner.named_parameters() if p.grad is not None})

    def end(self, result: T) -> T:
        """End the training; pass a result on."""
        self.accelerator.end_training()
        return result


def count_windows(kit: BackendKit, steps: int, weighted: bool) -> dict[str, Any]:
    """On a rank: collectives of each micro-batch of a window, after three windows that settle what is only done at first."""
    loop = Loop(kit, gradient_accumulation_steps=steps)
    weight = torch.tensor(3) if weighted else None
    for _ in range(3 * steps):
        loop.micro_batch(weight=weight)
    counts = [count_collectives(lambda: loop.micro_batch(weight=weight)) for _ in range(steps)]
    return loop.end({"counts": counts, "expected": loop.accelerator.backend.expected_collectives()})


def clip(kit: BackendKit, max_norm: float, norm_type: float, precision: str) -> dict[str, Any]:
    """On a rank: two micro-batches, gradients before and after clipping, the norm, and what a step then changes."""
    loop = Loop(kit, lr=1.0, gradient_accumulation_steps=2, mixed_precision=precision)
    accelerator = loop.accelerator
    before = loop.weights()
    norm: Any = None
    for _ in range(2):
        with accelerator.accumulate(loop.model):
            accelerator.backward(loop.loss())
            inside = accelerator.clip_grad_norm_(loop.model.parameters(), max_norm, norm_type)
            if accelerator.sync_gradients:
                norm = inside
            loop.optimizer.step()
    after = loop.weights()
    change = {n: before[n] - after[n] for n in before}
    facts = {"norm": float(norm), "shape": tuple(norm.shape), "is_tensor": isinstance(norm, torch.Tensor)}
    return loop.end({**facts, "change": change})


def plain_gradients(
    world_size: int, micro_batches: int, autocast: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Gradients of the rows of a `Loop`'s first micro-batches as one batch."""
    model = make_model()
    batch = torch.utils.data.default_collate(make_data(64)[: 4 * world_size * micro_batches])
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        logits = model(batch["x"])
    torch.nn.functional.cross_entropy(logits.float(), batch["y"]).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def overflow(kit: BackendKit, bad_rank: int) -> dict[str, Any]:
    """On a rank: a good step, one whose loss is infinite on one rank alone, a good one."""
    from drivetrain.config import GradScalerKwargs

    scaling = [GradScalerKwargs(init_scale=256.0)]
    loop = Loop(kit, mixed_precision="fp16", kwargs_handlers=scaling)
    accelerator, optimizer = loop.accelerator, loop.optimizer
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, step_size=1, gamma=0.5))
    seen: list[dict[str, Any]] = []
    for factor in (1.0, math.inf, 1.0):
        bad = math.isinf(factor) and accelerator.process_index == bad_rank
        with accelerator.accumulate(loop.model):
            accelerator.backward(loop.loss(factor if bad else 1.0))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen.append(
            {
                "weights": loop.weights(),
                "skipped": accelerator.optimizer_step_was_skipped,
                "steps": accelerator.step,
                "rate": optimizer.param_groups[0]["lr"],
                "scale": accelerator.backend.precision.state_dict().get("scale"),
            }
        )
    return loop.end({"seen": seen})


def keep_local(kit: BackendKit) -> dict[str, Any]:
    """On a rank: a backward inside ``no_sync``, then one outside."""
    loop = Loop(kit)
    for _ in range(3):
        loop.micro_batch()
    accelerator = loop.accelerator

    def backward() -> None:
        accelerator.backward(loop.loss())

    with accelerator.no_sync(loop.model):
        inside = count_collectives(backward)
    outside = count_collectives(backward)
    expected = accelerator.backend.expected_collectives()
    return loop.end({"inside": inside, "outside": outside, "gradients": loop.gradients(), "expected": expected})


def clip_values(kit: BackendKit) -> dict[str, torch.Tensor]:
    """On a rank: gradients clipped by value."""
    loop = Loop(kit)
    with loop.accelerator.accumulate(loop.model):
        loop.accelerator.backward(loop.loss())
        loop.accelerator.clip_grad_value_(loop.model.parameters(), 0.01)
    return loop.end(loop.gradients())


class WindowTests(BackendKit):
    """Collectives, clipping, overflow."""

    @pytest.mark.parametrize("weighted", [False, True], ids=["rows", "items"])
    @pytest.mark.parametrize("steps", [1, 4])
    def test_collectives_sent_are_those_expected(
        self, workers: Workers, world_size: int, steps: int, weighted: bool
    ) -> None:
        """Per micro-batch and at the window's end, counted by the profiler; item weights add core's one scalar all-reduce per window."""
        if weighted and not self.has(Capability.ITEM_WEIGHTS):
            return
        for rank, result in enumerate(self.run(workers, world_size, count_windows, steps, weighted)):
            *inner, last = result["counts"]
            expected = result["expected"]
            for i, counts in enumerate(inner):
                assert counts == expected["micro_batch"], (
                    f"rank {rank} sent {counts} in micro-batch {i} of {steps}, and {expected['micro_batch']} are declared"
                )
            window = dict(expected["window"])
            if weighted and world_size > 1:
                window["all_reduce"] = window.get("all_reduce", 0) + 1
            assert last == window, f"rank {rank} sent {last} at the window's end, and {window} are declared"

    @pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
    def test_clipping_returns_the_true_global_norm(self, workers: Workers, world_size: int, norm_type: float) -> None:
        """The norm over all parameters, shards and rows, before clipping, as a 0-d tensor on every rank; gradients are scaled down to it."""
        self._check_clipping(workers, world_size, 0.1, norm_type, "fp32")

    def test_gradients_below_the_norm_are_not_clipped(self, workers: Workers, world_size: int) -> None:
        """Clipping never enlarges."""
        self._check_clipping(workers, world_size, 1e6, 2.0, "fp32")

    def test_clipping_sees_gradients_without_the_loss_scale(self, workers: Workers, world_size: int) -> None:
        """Whatever scales the loss is undone first."""
        for precision in self.precisions:
            if precision != "fp32":
                self._check_clipping(workers, world_size, 0.1, 2.0, precision)

    def _check_clipping(
        self, workers: Workers, world_size: int, max_norm: float, norm_type: float, precision: str
    ) -> None:
        dtype = self.autocast.get(precision)
        gradients = plain_gradients(world_size, 2, None if dtype is None else getattr(torch, dtype))
        norm = float(torch.nn.utils.get_total_norm(gradients.values(), norm_type))
        factor = min(1.0, max_norm / norm)
        tolerance = self.tolerance[precision]
        for rank, result in enumerate(self.run(workers, world_size, clip, max_norm, norm_type, precision)):
            assert result["is_tensor"] and result["shape"] == (), f"rank {rank}: the norm must be a 0-d tensor"
            assert result["norm"] == pytest.approx(norm, rel=tolerance), (
                f"rank {rank} returned the norm {result['norm']}, and it is {norm} over all ranks"
            )
            clipped = {name: gradient * factor for name, gradient in gradients.items()}
            within = tolerance * 10 * min(1.0, max_norm)
            check_all_close(result["change"], clipped, within, f"rank {rank}: after clipping")

    def test_an_overflow_on_one_rank_skips_the_step_on_all(self, workers: Workers, world_size: int) -> None:
        """In fp16: weights stay and stay equal, the scale halves, the scheduler and the counter wait; the next step is as any other."""
        if "fp16" not in self.precisions:
            return
        results = self.run(workers, world_size, overflow, world_size - 1)
        for rank, result in enumerate(results):
            good, bad, next_one = result["seen"]
            who = f"rank {rank}"
            assert all(torch.equal(good["weights"][n], w) for n, w in bad["weights"].items()), (
                f"{who}: an overflow on rank {world_size - 1} changed the weights"
            )
            assert [s["skipped"] for s in result["seen"]] == [False, True, False], (
                f"{who}: optimizer_step_was_skipped was {[s['skipped'] for s in result['seen']]}"
            )
            assert any(not torch.equal(bad["weights"][n], w) for n, w in next_one["weights"].items()), (
                f"{who}: the step after an overflow changed nothing"
            )
            assert [s["steps"] for s in result["seen"]] == [1, 1, 2], f"{who}: a skipped step was counted"
            assert [s["rate"] for s in result["seen"]] == [0.05, 0.05, 0.025], f"{who}: the scheduler didn't wait"
            if good["scale"] is not None:
                assert [s["scale"] for s in result["seen"]] == [256.0, 128.0, 128.0], f"{who}: the scale must halve"
            for ours, theirs in zip(result["seen"], results[0]["seen"], strict=True):
                assert all(torch.equal(w, theirs["weights"][n]) for n, w in ours["weights"].items()), (
                    f"{who}: the weights differ from rank 0's"
                )

    def test_no_sync_keeps_gradients_local(self, workers: Workers, world_size: int) -> None:
        """Declared `Capability.NO_SYNC`: no reduction inside, all of it in the next backward outside, with what was kept."""
        if not self.has(Capability.NO_SYNC):
            return
        results = self.run(workers, world_size, keep_local)
        for rank, result in enumerate(results):
            expected = result["expected"]
            assert result["inside"] == expected["micro_batch"], f"rank {rank} sent {result['inside']} inside no_sync"
            assert result["outside"] == expected["window"], f"rank {rank} sent {result['outside']} after no_sync"
            for name, gradient in result["gradients"].items():
                assert torch.equal(gradient, results[0]["gradients"][name]), (
                    f"rank {rank}: {name} differs from rank 0's"
                )

    def test_clipping_by_value(self, workers: Workers, world_size: int) -> None:
        """Declared `Capability.CLIP_VALUE`: each element of the global gradient is clipped, after the reduction."""
        if not self.has(Capability.CLIP_VALUE):
            return
        gradients = plain_gradients(world_size, 1)
        clipped = {name: gradient.clamp(-0.01, 0.01) for name, gradient in gradients.items()}
        for rank, result in enumerate(self.run(workers, world_size, clip_values)):
            check_all_close(result, clipped, self.tolerance["fp32"], f"rank {rank}: after clipping by value")
