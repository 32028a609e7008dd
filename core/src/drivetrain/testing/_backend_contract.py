"""The numerical contract: a window's gradient is that of its rows (or items) as one batch, in float64 plain PyTorch."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from drivetrain.specs import Capability
from drivetrain.testing._backend_base import BackendKit, check_all_close
from drivetrain.testing.communication import count_collectives
from drivetrain.testing.host_reads import count_host_reads
from drivetrain.testing.pytest_plugin import Workers
from drivetrain.testing.training import Stream, make_data, make_model, whole

__all__ = ["ContractTests"]

_RATE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """How a loader's rows become micro-batches and windows.

    Args:
        samples: Rows of the data set.
        batch_size: Rows per batch and rank.
        steps: Micro-batches per window.
        epochs: How often over the data.
        plugin: Further settings of ``GradientAccumulationPlugin``.
        items: What losses are means over: "rows"; or items, whose numbers differ ("items"), are zero on rank 0 ("none on rank 0") or everywhere
            ("none"); "sums" gives sums over items.
        parts: Into how many micro-batches the script cuts each batch; a window is a batch.
        fetched: How many batches the script fetches at once; a window is what it fetched.
        validates: A validation runs within each window.
        sized: The loader knows its length.
    """

    samples: int = 45
    batch_size: int = 4
    steps: int = 4
    epochs: int = 1
    plugin: Mapping[str, Any] = field(default_factory=dict)
    items: str = "rows"
    parts: int = 0
    fetched: int = 0
    validates: bool = False
    sized: bool = True


SCENARIOS: dict[str, Scenario] = {
    "equal micro-batches": Scenario(samples=48),
    "a shorter last window, uneven rows": Scenario(),
    "a stream's shorter last window": Scenario(sized=False, epochs=2),
    "windows end with each epoch": Scenario(epochs=2, steps=3),
    "windows cross epochs": Scenario(epochs=3, steps=5, plugin={"sync_with_dataloader": False}),
    "reduced at each micro-batch": Scenario(plugin={"sync_each_batch": True}),
    "a validation within the window": Scenario(validates=True),
    "items": Scenario(items="items"),
    "items, a stream": Scenario(items="items", sized=False),
    "items, crossing epochs": Scenario(items="items", epochs=2, steps=5, plugin={"sync_with_dataloader": False}),
    "items, reduced at each micro-batch": Scenario(items="items", plugin={"sync_each_batch": True}),
    "items in each micro-batch's window": Scenario(items="items", steps=1),
    "no items on one rank": Scenario(items="none on rank 0"),
    "no items at all": Scenario(items="none"),
    "sums over items": Scenario(items="sums"),
    "batches cut into parts": Scenario(parts=2, steps=1, samples=48),
    "batches cut into unequal parts, weighted": Scenario(parts=3, steps=1, items="items"),
    "parts, although windows are of batches": Scenario(parts=2, steps=3, samples=48),
    "several batches fetched, weighted": Scenario(fetched=3, steps=1, items="items"),
    "several batches fetched": Scenario(fetched=3, steps=1, samples=48),
}


def train_windows(kit: BackendKit, scenario: Scenario) -> list[dict[str, Any]]:
    """On a rank: for each window the rows and items of this rank, and the weights before and after a step of plain SGD."""
    from drivetrain import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=scenario.steps, **scenario.plugin)
    accelerator = kit.make_accelerator(gradient_accumulation_plugin=plugin)
    inner = make_model()
    data: Any = [{**row, "i": torch.tensor(i)} for i, row in enumerate(make_data(scenario.samples))]
    loader: Any = torch.utils.data.DataLoader(data if scenario.sized else Stream(data), batch_size=scenario.batch_size)
    others: Any = torch.utils.data.DataLoader(data[:6], batch_size=2)
    model, optimizer, loader, others = accelerator.prepare(
        inner, torch.optim.SGD(inner.parameters(), lr=_RATE), loader, others
    )
    seen: list[dict[str, Any]] = []
    rows: list[tuple[int, float]] = []

    def weights() -> dict[str, torch.Tensor]:
        return whole(accelerator.backend.model_state(model))

    for batch, declared in _micro_batches(scenario, loader, accelerator.backend.data_rank):
        with accelerator.accumulate(model, **declared):
            each = cross_entropy(model(batch["x"]).float(), batch["y"], reduction="none")
            if scenario.items == "rows":
                accelerator.backward(each.mean())
            else:
                total, count = (each * batch["n"]).sum(), batch["n"].sum()
                summed = scenario.items == "sums"
                loss = total if summed else total / count.clamp(min=1)
                accelerator.backward(loss, weight=count, reduction="sum" if summed else "mean")
            rows += zip(batch["i"].tolist(), batch["n"].tolist(), strict=True)
            last = accelerator.sync_gradients
            if scenario.validates and not last:
                with torch.no_grad():
                    for other in others:
                        accelerator.gather_for_metrics(model(other["x"]).sum(1))
            before = weights() if last else {}
            optimizer.step()
            optimizer.zero_grad()
            if last:
                seen.append({"rows": rows, "before": before, "after": weights()})
                rows = []
    accelerator.end_training()
    return seen


def _micro_batches(
    scenario: Scenario, loader: Any, rank: int
) -> Iterator[tuple[dict[str, torch.Tensor], dict[str, int]]]:
    """The rows of each micro-batch that count, and what is declared about its window."""
    for _ in range(scenario.epochs):
        batches: Iterator[tuple[dict[str, torch.Tensor], dict[str, int]]] = (
            (_counted(b, loader, scenario, rank), {}) for b in loader
        )
        if scenario.parts:
            for batch, _none in batches:
                cut = {name: value.tensor_split(scenario.parts) for name, value in batch.items()}
                for i in range(scenario.parts):
                    yield {name: parts[i] for name, parts in cut.items()}, {"micro_batches": scenario.parts}
        elif scenario.fetched:
            while some := list(itertools.islice(batches, scenario.fetched)):
                yield from ((batch, {"micro_batches": len(some)}) for batch, _none in some)
        else:
            yield from batches


def _counted(batch: dict[str, torch.Tensor], loader: Any, scenario: Scenario, rank: int) -> dict[str, torch.Tensor]:
    """A rank that is left without a row gets a repeated one, which has no items."""
    counts = torch.ones_like(batch["n"]) if scenario.items == "rows" else batch["n"].clone()
    if loader.batch.rows == 0 or scenario.items == "none" or (scenario.items == "none on rank 0" and rank == 0):
        counts.zero_()
    return {**batch, "n": counts}


def exact_gradient(
    before: Mapping[str, torch.Tensor], samples: int, rows: list[tuple[int, float]]
) -> dict[str, torch.Tensor]:
    """The gradient of the mean over these rows' items, in float64."""
    model = make_model().double()
    model.load_state_dict(dict(before))
    data = make_data(samples)
    x = torch.stack([data[i]["x"] for i, _ in rows]).double()
    y = torch.stack([data[i]["y"] for i, _ in rows])
    n = torch.tensor([count for _, count in rows], dtype=torch.float64)
    ((cross_entropy(model(x), y, reduction="none") * n).sum() / n.sum().clamp(min=1)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def count_reads(kit: BackendKit, precision: str, steps: int) -> list[int]:
    """On a rank: host reads of each micro-batch of a window with clipping, a scheduler and item weights."""
    accelerator = kit.make_accelerator(mixed_precision=precision, gradient_accumulation_steps=steps)
    inner = make_model()
    optimizer: Any = torch.optim.SGD(inner.parameters(), lr=0.1, momentum=0.9)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(inner, optimizer, scheduler)
    batch = torch.utils.data.default_collate(make_data(4))
    batch = {name: value.to(accelerator.device) for name, value in batch.items()}
    weighted = kit.has(Capability.ITEM_WEIGHTS)

    def micro_batch() -> None:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(batch["x"]).float(), batch["y"])
            accelerator.backward(loss, **({"weight": 3} if weighted else {}))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    for _ in range(3 * steps):
        micro_batch()
    counts = [count_host_reads(micro_batch) for _ in range(steps)]
    accelerator.end_training()
    return counts


def many_items(kit: BackendKit, precision: str, items: int) -> dict[str, Any]:
    """On a rank: weights after a step whose mean loss is said to be over so many items."""
    accelerator = kit.make_accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
    inner = make_model()
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=_RATE))
    batch = torch.utils.data.default_collate(make_data(16))
    for part in (slice(8), slice(8, 16)):
        with accelerator.accumulate(model):
            loss = cross_entropy(
                model(batch["x"][part].to(accelerator.device)).float(), batch["y"][part].to(accelerator.device)
            )
            accelerator.backward(loss, weight=items)
            optimizer.step()
    facts = {
        "weights": whole(accelerator.backend.model_state(model)),
        "skipped": accelerator.optimizer_step_was_skipped,
    }
    accelerator.end_training()
    return facts


def find_nonfinite(kit: BackendKit, mode: str, where: str, bad_rank: int) -> dict[str, Any]:
    """On a rank: three steps, of which the second has a loss or a gradient that isn't finite on one rank alone."""
    import warnings

    from drivetrain.errors import NonfiniteError

    accelerator = kit.make_accelerator(on_nonfinite=mode, gradient_accumulation_steps=2)
    inner = make_model()
    data: Any = make_data(24 * accelerator.backend.data_world_size)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.01), loader)
    told, weights = "", []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for i, batch in enumerate(loader):
                with accelerator.accumulate(model):
                    logits = model(batch["x"]).float()
                    loss = cross_entropy(logits, batch["y"])
                    if i == 3 and accelerator.process_index == bad_rank:
                        loss = loss * math.nan if where == "loss" else loss + 0 * (logits.sum() * 0).abs().sqrt()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                weights.append(whole(accelerator.backend.model_state(model)))
        except NonfiniteError as error:
            told = str(error)
        told = told or " ".join(str(w.message) for w in caught if "Step" in str(w.message))
    finite = all(bool(w.isfinite().all()) for w in weights[-1].values())
    facts = {"told": told, "steps": accelerator.step, "finite": finite, "micro_batches": len(weights)}
    # What was left to be read says it once more, to those who were told by an error.
    with contextlib.suppress(NonfiniteError) if told and mode != "skip" else contextlib.nullcontext():
        accelerator.end_training()
    return facts


def count_each(kit: BackendKit) -> dict[str, Any]:
    """On a rank: collectives of each micro-batch with ``sync_each_batch``."""
    from drivetrain import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    accelerator = kit.make_accelerator(gradient_accumulation_plugin=plugin)
    inner = make_model()
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    batch = torch.utils.data.default_collate(make_data(4))

    def micro_batch() -> None:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(batch["x"].to(accelerator.device)).float(), batch["y"].to(accelerator.device))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(6):
        micro_batch()
    counts = [count_collectives(micro_batch) for _ in range(3)]
    facts = {"counts": counts, "window": accelerator.backend.expected_collectives()["window"]}
    accelerator.end_training()
    return facts


class ContractTests(BackendKit):
    """Windows against the one big batch in float64, host reads, values that aren't finite."""

    @pytest.mark.parametrize("name", list(SCENARIOS))
    def test_a_windows_gradient_is_the_big_batchs(self, workers: Workers, world_size: int, name: str) -> None:
        """Whatever micro-batches, ranks, items and ends of data make up the window: the gradient of the mean over all of it, in float64."""
        scenario = SCENARIOS[name]
        if scenario.items != "rows" and not self.has(Capability.ITEM_WEIGHTS):
            return
        if (scenario.parts or scenario.fetched) and self.has(Capability.OWNS_SCHEDULE):
            return
        by_rank = self.run(workers, world_size, train_windows, scenario)
        counts = [len(windows) for windows in by_rank]
        assert len(set(counts)) == 1, f"ranks had {counts} windows"
        assert counts[0] > 0, "there was no window"
        for number, window in enumerate(zip(*by_rank, strict=True)):
            rows = [row for part in window for row in part["rows"]]
            if scenario.plugin.get("sync_with_dataloader", True):
                counted = [i for i, count in rows if count]
                assert len(set(counted)) == len(counted), f"{name}: ranks have rows of window {number} in common"
            for rank, part in enumerate(window):
                expected = exact_gradient(part["before"], scenario.samples, rows)
                found = {n: (part["before"][n] - part["after"][n]) / _RATE for n in expected}
                check_all_close(found, expected, self.tolerance["fp32"], f"{name}: rank {rank}, window {number}")

    def test_the_host_waits_for_nothing_but_the_loss_scale(self, workers: Workers, world_size: int) -> None:
        """Reads of a device's values: none in a micro-batch, none at a window's end, one where the loss is scaled (`reads`)."""
        for precision in self.precisions:
            for rank, counts in enumerate(self.run(workers, world_size, count_reads, precision, 2)):
                assert counts == [0, self.reads[precision]], (
                    f"rank {rank}, {precision}: {counts} host reads by micro-batch"
                )

    def test_a_million_items_stay_in_range(self, workers: Workers, world_size: int) -> None:
        """Gradients are those of the mean, whatever the items are counted in; in fp16, too."""
        if not self.has(Capability.ITEM_WEIGHTS):
            return
        for precision in self.precisions:
            few = self.run(workers, world_size, many_items, precision, 1)
            many = self.run(workers, world_size, many_items, precision, 1_000_000)
            for rank, (one, million) in enumerate(zip(few, many, strict=True)):
                assert not million["skipped"], f"rank {rank}, {precision}: the step was skipped"
                check_all_close(
                    million["weights"], one["weights"], self.tolerance[precision], f"rank {rank}, {precision}"
                )

    def test_sync_each_batch_reduces_at_each_micro_batch(self, workers: Workers, world_size: int) -> None:
        """Each micro-batch sends what the window's end sends; an engine that owns the step sends that and more in the last one."""
        for rank, facts in enumerate(self.run(workers, world_size, count_each)):
            if self.has(Capability.OWNS_STEP):
                first, second, last = (Counter(sent) for sent in facts["counts"])
                assert first == second and first <= last, f"rank {rank} sent {facts['counts']}"
                continue
            assert facts["counts"] == [facts["window"]] * 3, f"rank {rank} sent {facts['counts']}"

    @pytest.mark.parametrize("where", ["loss", "gradient"])
    @pytest.mark.parametrize("mode", ["raise", "skip"])
    def test_values_that_are_not_finite(self, workers: Workers, world_size: int, mode: str, where: str) -> None:
        """``on_nonfinite``: every rank raises, or none steps; the message names rank, step and samples."""
        if mode == "skip" and self.has(Capability.OWNS_STEP):
            return
        bad = world_size - 1
        results = self.run(workers, world_size, find_nonfinite, mode, where, bad)
        for rank, facts in enumerate(results):
            who = f"rank {rank}, {mode}"
            assert facts["finite"], f"{who}: the weights aren't finite"
            if mode == "skip":
                assert (facts["steps"], facts["micro_batches"]) == (2, 6), f"{who}: {facts}"
            else:
                assert facts["steps"] == 1, f"{who}: {facts}"
            if mode == "raise" or rank == 0:
                first = 4 * (3 * world_size + bad)  # the fourth batch of the rank
                samples = ", ".join(map(str, range(first, first + 4)))
                assert facts["told"].startswith("Step 1: "), f"{who}: it says {facts['told']!r}"
                assert samples in facts["told"] and "batch 3 of epoch 0" in facts["told"], (
                    f"{who}: it says {facts['told']!r}"
                )
                said = (
                    f"rank {bad} in micro-batch 1 was nan" if where == "loss" else "the gradients of 0.weight, 0.bias"
                )
                assert said in facts["told"], f"{who}: it says {facts['told']!r}"
