"""A small training, once through an Accelerator and once by hand on the whole batch, so that numbers can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import cross_entropy

__all__ = ["Case", "Result", "Stream", "make_data", "make_model", "reference", "train", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained, and how.

    Args:
        samples: Number of samples; not a multiple of the global batch, so that last batches and windows are uneven.
        batch_size: Rows per micro-batch and rank.
        accumulation: Micro-batches per window.
        epochs: How often over the data.
        max_norm: Clip gradients to this norm, or None.
        optimizer: "sgd" (with momentum), "adamw" or "adagrad".
        scheduler: Halve the learning rate every second optimizer step.
        weighted: Each row has 0 to 4 items, and the loss is the mean over items: ``backward(loss, weight=items)``.
        sized: The loader knows its length; otherwise the data set is a stream.
        loader: Keyword arguments for the DataLoader.
        accelerator: Keyword arguments for the Accelerator.

    Example:
        >>> Case(accumulation=4).window_rows(world_size=2)
        32
    """

    samples: int = 45
    batch_size: int = 4
    accumulation: int = 1
    epochs: int = 2
    max_norm: float | None = 0.5
    optimizer: str = "adamw"
    scheduler: bool = True
    weighted: bool = False
    sized: bool = True
    loader: Mapping[str, Any] = field(default_factory=dict)
    accelerator: Mapping[str, Any] = field(default_factory=dict)

    def window_rows(self, world_size: int) -> int:
        """Rows of a full window over all ranks."""
        return self.batch_size * self.accumulation * world_size


@dataclass(slots=True)
class Result:
    """What a training did, window by window.

    Args:
        losses: Mean loss over each global window.
        norms: Gradient norm before clipping of each window.
        rates: Learning rate that each window's step used.
        gradients: Of the first window after clipping, by parameter name.
        weights: At the end, by parameter name.
        steps: Optimizer steps.

    Example:
        >>> Result().steps
        0
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    steps: int = 0

    def largest_difference(self, other: Result) -> float:
        """The largest absolute difference in any loss, norm, rate, gradient or weight; infinite where counts differ."""
        pairs: list[tuple[Any, Any]] = []
        for name in ("losses", "norms", "rates"):
            a, b = getattr(self, name), getattr(other, name)
            if len(a) != len(b):
                return float("inf")
            pairs += zip(a, b, strict=True)
        worst = max((abs(a - b) for a, b in pairs), default=0.0)
        for name in ("gradients", "weights"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours.keys() != theirs.keys():
                return float("inf")
            for key, value in ours.items():
                worst = max(worst, float((value.double() - theirs[key].double()).abs().max()))
        return worst


def make_model() -> torch.nn.Module:
    """A small classifier: 6 features, 3 classes, the same weights each time.

    Example:
        >>> import torch
        >>> make_model()(torch.zeros(2, 6)).shape
        torch.Size([2, 3])
    """
    generator = torch.Generator().manual_seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16),
        torch.nn.Tanh(),
        torch.nn.LayerNorm(16),
        torch.nn.Linear(16, 16),
        torch.nn.Tanh(),
        torch.nn.Linear(16, 3),
    )
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.4 + (p.ndim == 1))
    return model


def make_data(samples: int) -> list[dict[str, torch.Tensor]]:
    """Rows with features ``x`` (6,), a label ``y``, and a number of items ``n`` (0 to 4).

    Example:
        >>> sorted(make_data(3)[0])
        ['n', 'x', 'y']
    """
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(samples, 6, generator=generator) * 2
    y = torch.randint(0, 3, (samples,), generator=generator)
    n = torch.randint(0, 5, (samples,), generator=generator)
    return [{"x": x[i], "y": y[i], "n": n[i]} for i in range(samples)]


class Stream(torch.utils.data.IterableDataset[Any]):
    """Rows one after the other, of a number that nobody knows before.

    Example:
        >>> list(Stream([1, 2]))
        [1, 2]
    """

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def _make_optimizer(case: Case, model: torch.nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        # Small enough to converge also without clipping: a training that diverges turns one rounding into another result.
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    if case.optimizer == "adagrad":  # has a state as soon as it is made
        return torch.optim.Adagrad(model.parameters(), lr=0.05)
    # Adam's first step is the sign of each gradient: with the usual eps, a gradient of nearly zero turns one rounding into twice the learning rate.
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-2)


def _make_scheduler(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5) if case.scheduler else None


def _loss_sum(case: Case, logits: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss and the number of items (rows, unless items are counted)."""
    each = cross_entropy(logits.float(), batch["y"], reduction="none")
    if case.weighted:
        return (each * batch["n"]).sum(), batch["n"].sum()
    return each.sum(), torch.tensor(len(each))


def reference(
    case: Case,
    world_size: int,
    *,
    autocast: torch.dtype | None = None,
    windows: Sequence[tuple[int, int]] | None = None,
    convert: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
) -> Result:
    """The training by hand, in plain PyTorch: each window's rows of all ranks as one batch.

    Args:
        case: What is trained.
        world_size: Number of ranks whose rows make up a window.
        autocast: Dtype of ``torch.autocast`` around the model; None for full precision.
        windows: Where each window of an epoch begins and ends, in rows; default: all full but the last.
        convert: Changes layers of the model by hand, as a precision is to do it.

    Example:
        >>> reference(Case(samples=9, epochs=1), world_size=1).steps
        3
    """
    model = make_model() if convert is None else convert(make_model())
    optimizer = _make_optimizer(case, model)
    scheduler = _make_scheduler(case, optimizer)
    result = Result()
    rows = make_data(case.samples)
    size = case.window_rows(world_size)
    for _ in range(case.epochs):
        for start, stop in windows or [(i, i + size) for i in range(0, len(rows), size)]:
            batch = torch.utils.data.default_collate(rows[start:stop])
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                logits = model(batch["x"])
            total, items = _loss_sum(case, logits, batch)
            loss = total / items.clamp(min=1)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm or float("inf"))
            result.norms.append(norm.item())
            result.rates.append(optimizer.param_groups[0]["lr"])
            if not result.losses:
                result.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            result.losses.append(loss.item())
            result.steps += 1
    result.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return result


def train(case: Case, make_accelerator: Callable[..., Any] | None = None) -> Result:
    """The same training through an Accelerator, in whatever world this process is in. Equal on every rank.

    Args:
        case: What is trained.
        make_accelerator: Makes the Accelerator from its keyword arguments; default: the class.

    Example:
        >>> case = Case(samples=9, epochs=1, accelerator={"cpu": True})
        >>> train(case).largest_difference(reference(case, 1)) < 1e-6
        True
    """
    from drivetrain import Accelerator

    make = make_accelerator or Accelerator
    accelerator = make(gradient_accumulation_steps=case.accumulation, **case.accelerator)
    model = make_model()
    optimizer = _make_optimizer(case, model)
    scheduler = _make_scheduler(case, optimizer)
    rows: Any = make_data(case.samples)
    loader: Any = torch.utils.data.DataLoader(
        rows if case.sized else Stream(rows), batch_size=case.batch_size, **case.loader
    )
    result = Result()
    try:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if scheduler is not None:
            scheduler = accelerator.prepare(scheduler)
        for _ in range(case.epochs):
            _train_epoch(case, accelerator, model, optimizer, scheduler, loader, result)
        result.weights = whole(accelerator.backend.model_state(model))
        result.steps = accelerator.step
    finally:
        accelerator.end_training()
    return result


def _train_epoch(
    case: Case, accelerator: Any, model: Any, optimizer: Any, scheduler: Any, loader: Any, result: Result
) -> None:
    sums = torch.zeros(2, dtype=torch.float64)
    for batch in loader:
        with accelerator.accumulate(model):
            total, items = _loss_sum(case, model(batch["x"]), batch)
            loss = total / items.clamp(min=1)
            accelerator.backward(loss, weight=items) if case.weighted else accelerator.backward(loss)
            counted = float(items) if case.weighted else float(loader.batch.rows)
            sums += torch.tensor([float(loss.detach()) * counted, counted], dtype=torch.float64)
            if accelerator.sync_gradients:
                _note_window(case, accelerator, model, optimizer, sums, result)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()


def _note_window(case: Case, accelerator: Any, model: Any, optimizer: Any, sums: torch.Tensor, result: Result) -> None:
    norm = accelerator.clip_grad_norm_(model.parameters(), case.max_norm or float("inf"))
    result.norms.append(float(norm))
    result.rates.append(optimizer.param_groups[0]["lr"])
    if not result.losses:
        result.gradients = whole(accelerator.backend.window_gradients(model))
    loss_sum, items = accelerator.reduce(sums.to(accelerator.device)).tolist()
    result.losses.append(loss_sum / max(items, 1.0))
    sums.zero_()


def whole(tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of full tensors on the CPU, by name: shards are gathered. Collective where there are any.

    Example:
        >>> whole({"w": torch.zeros(2), "text": "is left out"})
        {'w': tensor([0., 0.])}
    """
    return {
        n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().cpu().clone()
        for n, t in tensors.items()
        if isinstance(t, torch.Tensor) or hasattr(t, "full_tensor")
    }
