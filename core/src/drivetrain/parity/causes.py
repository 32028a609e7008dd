"""From where two runs part to why: rules that look at the numbers, the most telling first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from drivetrain.parity.comparing import mean_loss
from drivetrain.parity.merging import Run, merge_parts
from drivetrain.parity.record import Event
from drivetrain.parity.results import Cause, Difference

__all__ = ["likely_cause"]

#: How close a ratio must be to a number to be taken for it.
_CLOSE = 1e-2


def likely_cause(found: Difference, single: Run, several: Run) -> Cause:
    """Why two runs part there, as far as the records tell.

    Args:
        found: Where they part.
        single: One process's run.
        several: The other.

    Example:
        >>> likely_cause(Difference("module output", 0, "bn", "", type="BatchNorm1d"), Run(()), Run(())).key
        'batch-norm'
    """
    rule = _RULES.get(found.kind)
    return _UNKNOWN if rule is None else rule(found, single, several)


_UNKNOWN = Cause(
    "unknown",
    "Nothing recorded says why: what comes before it is equal.",
    "Look at what the script does there that depends on the rank, on the number of processes, or on chance.",
)

_UNSEEDED = Cause(
    "unseeded-sampler",
    "The order of samples isn't the same in both runs: a sampler, a split, a shuffle or the data itself is drawn without a seed, or by the rank or "
    "the number of processes.",
    "Seed it (a torch.Generator with a fixed seed, set_seed()), the same on all ranks, and give the loader to accelerator.prepare().",
)


def _samples(found: Difference, single: Run, several: Run) -> Cause:
    forwards = next(several.together("forward", found.step or 0), ())
    lists = [e["samples"] for e in forwards]
    if len(lists) > 1 and all(s == lists[0] for s in lists):
        return Cause(
            "not-sharded",
            "Every rank reads the same samples: the loader isn't divided over the ranks.",
            "Give the loader to accelerator.prepare(), and shard nothing by hand.",
        )
    strays = [f"rank {r}" for r, own in enumerate(lists) if _is_of_another_step(own, found.step or 0, single)]
    if strays and len(strays) < len(lists):
        return Cause(
            "rank-out-of-step",
            f"{' and '.join(strays)} trains on the samples of another step: it skipped a batch, or took one more, and from then on ranks combine gradients of "
            "different steps.",
            "Let all ranks skip the same batches: decide by a number that all have (accelerator.reduce, accelerator.gather).",
        )
    return _UNSEEDED


def _is_of_another_step(samples: Sequence[object], step: int, single: Run) -> bool:
    """Whether all of a rank's samples come at one other step when one process trains."""
    steps = {e["step"] for e in single.first.of("forward") if samples and set(samples) <= set(e["samples"] or ())}
    return bool(steps) and step not in steps


def _rows(found: Difference, single: Run, several: Run) -> Cause:
    forwards = next(several.together("forward", found.step or 0), ())
    if len(forwards) > 1 and all(e["inputs"] == forwards[0]["inputs"] for e in forwards):
        return Cause(
            "not-sharded",
            "Every rank trains on the same rows, and they don't come from a prepared loader.",
            "Give the loader to accelerator.prepare(): it gives each rank rows of its own.",
        )
    return Cause(
        "unprepared-loader",
        "Rows don't come from a prepared loader: each rank draws, shuffles or shards for itself, and one process can't be given the rows of all ranks.",
        "Give the loader to accelerator.prepare(), without a distributed sampler of your own.",
    )


def _inputs(found: Difference, single: Run, several: Run) -> Cause:
    event = single.first.first("forward")
    if event.get("samples") is None and event.get("counted") is None:
        return _rows(found, single, several)
    ours, theirs = _samples_of_rows(found.name, single), _samples_of_rows(found.name, several)
    if any(theirs.get(row, samples).isdisjoint(samples) for row, samples in ours.items()):
        return _UNSEEDED  # the same rows have other numbers
    return Cause(
        "random-augmentation",
        "The samples have the same numbers and other values: the data set or collate_fn draws random numbers (augmentation), or normalizes with its batch; "
        "or the data set itself is drawn without a seed (a random split).",
        "Draw by the sample's index (np.random.default_rng((seed, index))), or switch augmentation off to verify. Seed splits.",
    )


def _samples_of_rows(name: str, run: Run) -> dict[tuple[float, ...], set[object]]:
    """For each row that a run has seen of an input, by its sketch: the numbers of the samples that had it."""
    found: dict[tuple[float, ...], set[object]] = {}
    for record in run.records:
        for event in record.of("forward"):
            sketch = event["inputs"].get(name)
            if sketch is None or event["samples"] is None:
                continue
            for sample, square, sums in zip(event["samples"], sketch["squares"], sketch["sums"], strict=False):
                row = tuple(float(f"{number:.9g}") for number in (square, *sums))
                found.setdefault(row, set()).add(sample)
    return found


def _frozen(found: Difference, single: Run, several: Run) -> Cause:
    return Cause(
        "frozen-on-a-rank",
        f"requires_grad of {found.name} isn't the same everywhere: it is frozen on some.",
        "Freeze and unfreeze parameters on all ranks alike, before accelerator.prepare().",
    )


def _evaluating(found: Difference, single: Run, several: Run) -> Cause:
    return Cause(
        "mode-of-a-rank",
        f"{found.name or 'The model'} is in evaluation mode on some ranks and in training mode on others.",
        "Call model.train() and model.eval() on all ranks: evaluation on the main process alone changes its mode alone.",
    )


def _calls(found: Difference, single: Run, several: Run) -> Cause:
    forwards = next(several.together("forward", found.step or 0, all_ranks=True), ())
    by_rank = [[m["name"] for m in e["modules"]] for e in forwards]
    if any(names != by_rank[0] for names in by_rank):
        return Cause(
            "branch-of-a-rank",
            "What runs depends on the rank, or on the rows that a rank has: a branch in forward or in the training loop isn't taken by all.",
            "Run the same modules on all ranks, with a mask instead of a branch. Ranks that don't use a parameter reduce nothing for it.",
        )
    return Cause(
        "branch-on-world-size",
        "What runs depends on the number of processes.",
        "Make branches in forward and in the training loop independent of accelerator.num_processes.",
    )


def _module(found: Difference, single: Run, several: Run) -> Cause:
    if "BatchNorm" in found.type and "Sync" not in found.type:
        return Cause(
            "batch-norm",
            "BatchNorm normalizes with the rows of its own process: each rank has other statistics than the whole batch.",
            "Use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before accelerator.prepare(), or GroupNorm or LayerNorm.",
        )
    events = [e for r in (*single.records, *several.records) for e in r.of("forward", found.step)]
    if any(m["draws"] for e in events for m in e["modules"] if m["name"] == found.name):
        return Cause(
            "random-forward",
            "It draws random numbers in forward, which no rank can draw as one process does for the whole batch (dropout of modules is switched off here).",
            "Make it deterministic to verify: set functional dropout and noise to 0.",
        )
    return Cause(
        "batch-coupled",
        "What comes out for a row depends on the other rows of its process: statistics, attention or padding over the batch.",
        "Compute such statistics over all ranks (accelerator.gather, reduce), or without the batch.",
    )


def _loss(found: Difference, single: Run, several: Run) -> Cause:
    if not (math.isfinite(found.single or 0.0) and math.isfinite(found.several or 0.0)):
        return Cause(
            "not-finite",
            "The loss is finite in one run and not in the other, though what it is made of agrees: a mean over nothing, or an overflow, on some rank.",
            "Accelerator(on_nonfinite='raise') names the rank and its samples. Say how many items a loss is the mean of: backward(loss, weight=n).",
        )
    mine, theirs = found.single, [e["loss"] for e in _losses_like(found, several)]
    if mine is None or not theirs:
        return _UNKNOWN
    weighted = any(e["weight"] is not None for r in several.records for e in r.of("loss", found.step))
    total = math.fsum(theirs)
    if not weighted and _near(total, mine) and len(theirs) > 1:
        return Cause(
            "sum-of-losses",
            "The loss is a sum over rows, not a mean: gradients are averaged over ranks, so they shrink with the number of processes.",
            "Use reduction='mean', or say how many items it is the sum of: accelerator.backward(loss, weight=n, reduction='sum').",
        )
    if _near(mine * len(theirs), found.several or 0.0) or _near(mine, (found.several or 0.0) * len(theirs)):
        return Cause(
            "loss-times-world-size",
            f"The losses of {len(theirs)} processes are {len(theirs)} times (or one part in {len(theirs)} of) that of one: the script multiplies or divides by "
            "the number of processes.",
            "Leave that away: accelerator.backward() scales losses to the mean over the global batch.",
        )
    if not weighted and min(theirs) <= mine <= max(theirs):
        return Cause(
            "mean-of-means",
            "The loss is a mean over something of which ranks have different numbers (tokens that aren't padding, rows of a class): the mean of "
            "the ranks' means isn't the mean over all.",
            "Say how many items each loss is the mean of: accelerator.backward(loss, weight=number_of_items).",
        )
    return Cause(
        "loss-over-the-batch",
        "The outputs agree and the losses don't, and no weighting of the ranks' losses gives that of the whole batch: the loss compares rows with each "
        "other (contrastive, ranking, a batch's statistics), or has a term that depends on the rank.",
        "Gather what the loss compares from all ranks, with gradients, or accept that the number of processes is part of the method.",
    )


def _losses_like(found: Difference, several: Run) -> Sequence[Event]:
    """The ranks' losses of the micro-batch that parted."""
    for events in several.together("loss", found.step or 0):
        if mean_loss(events) == found.several:
            return events
    return ()


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= _CLOSE * max(abs(a), abs(b), 1e-12)


def _unlike_gradients(found: Difference, single: Run, several: Run) -> Cause:
    if _bypassed(several, found.step):
        return Cause(
            "forward-past-the-wrapper",
            "The model's forward runs past what accelerator.prepare() returned (the unwrapped or original model is called): gradients aren't averaged over "
            "the ranks.",
            "Call the prepared model: model(x), not accelerator.unwrap_model(model)(x) or the object that was given to prepare().",
        )
    if found.count < found.of:
        return Cause(
            "gradient-of-a-rank",
            "Gradients are averaged over the ranks, and then the script changes some on one rank alone: a branch on the rank or on a rank's own loss.",
            "Change gradients on all ranks alike, by numbers that are equal on all (accelerator.reduce).",
        )
    return Cause(
        "gradients-not-reduced",
        "Each rank steps with gradients of its own: they were changed or clipped by a rank's own numbers, or not averaged (no_sync, a loss that went "
        "past accelerator.backward()).",
        "Use accelerator.backward(), accelerator.clip_grad_norm_() and accelerator.accumulate().",
    )


def _bypassed(several: Run, step: int | None) -> bool:
    return any(e["bypassed"] for r in several.records for e in r.of("forward", step))


def _missing_gradient(found: Difference, single: Run, several: Run) -> Cause:
    return Cause(
        "unused-on-a-rank",
        f"{found.name} gets a gradient in one place and not in another: it is unused, frozen or detached there.",
        "Use the same parameters on all ranks; add their outputs times 0 to the loss where a rank has nothing for them.",
    )


def _gradient(found: Difference, single: Run, several: Run) -> Cause:
    if _bypassed(several, found.step):
        return _unlike_gradients(found, single, several)
    ratio = _ratio(found, single, several)
    if ratio is not None and found.count == found.of:
        return Cause(
            "gradient-scale",
            f"All gradients of {len(several.records)} processes are {ratio:.4g} times those of one: something multiplies or divides by a number that "
            "depends on the number of processes or of micro-batches.",
            "Leave such factors away: accelerator.backward() scales losses to the mean over the global batch.",
        )
    return Cause(
        "gradient-changed",
        "Losses agree and gradients don't: something between backward() and the step changes them by what a rank alone has (a hook, noise, clipping).",
        "Use what is equal on all ranks there, and accelerator.clip_grad_norm_() to clip.",
    )


def _ratio(found: Difference, single: Run, several: Run) -> float | None:
    """By what all gradients differ, if it is one number."""
    for kind in ("gradients", "used"):
        ours = next(single.together(kind, found.step or 0), None)
        theirs = next(several.together(kind, found.step or 0, all_ranks=True), None)
        if ours is None or theirs is None:
            continue
        pairs = [
            (merge_parts([sketch]), merge_parts([e["tensors"].get(name) for e in theirs]))
            for name, sketch in ours[0]["tensors"].items()
        ]
        top = max((a.norm for a, _ in pairs if a is not None), default=0.0)
        ratios = [b.norm / a.norm for a, b in pairs if a is not None and b is not None and a.norm > 1e-3 * top]
        if ratios and all(_near(r, ratios[0]) for r in ratios) and not _near(ratios[0], 1.0):
            return ratios[0]
    return None


def _clipped(found: Difference, single: Run, several: Run) -> Cause:
    return Cause(
        "clipped-by-a-rank",
        "Gradients agree before clipping and differ after it: they are clipped or changed by numbers that a rank has for itself.",
        "Use accelerator.clip_grad_norm_() with the parameters of the prepared model, and change gradients by what is equal on all ranks.",
    )


def _setting(found: Difference, single: Run, several: Run) -> Cause:
    size = len(several.records)
    a, b = found.single or 0.0, found.several or 0.0
    if not found.name.startswith(("lr", "initial_lr")):
        return Cause(
            "optimizer-setting",
            f"The optimizer's {found.name} depends on the number of processes, or on the rank.",
            "Make it the same, or accept that it is meant.",
        )
    first = _rate(single, 0), _rate(several, 0)
    if None not in first and first[0] and any(_near(first[1] / first[0], f) for f in (size, size**0.5)):  # type: ignore[operator]
        return Cause(
            "rate-scaled",
            f"The learning rate is scaled by the number of processes: {b:.6g} is {b / a if a else math.inf:.4g} times {a:.6g}, for the same global batch.",
            "If that is meant (a rate per global batch of a growing size), it is no fault: one process has the same global batch here. Otherwise leave the "
            "factor away.",
        )
    ahead = _rate(single, (found.step or 0) * size)
    behind = [_rate(single, s) for s in range((found.step or 0) + 1, (found.step or 0) * size + 1)]
    if (ahead is not None and _near(ahead, b)) or any(r is not None and abs(r - b) <= 1e-6 * abs(b) for r in behind):
        return Cause(
            "scheduler-steps",
            f"The schedule runs ahead: after {found.step} steps its learning rate is what one process has later. It is stepped more than once per optimizer "
            "step (once per process, or per micro-batch).",
            "Give the scheduler to accelerator.prepare(), call scheduler.step() once per optimizer step, and don't use step_scheduler_per_process.",
        )
    return Cause(
        "schedule-length",
        "The learning rate depends on the number of processes: the schedule's length or the rate is computed from it, or the scheduler steps at other times.",
        "Compute the length from len() of the prepared loader, prepare the scheduler, and step it once per optimizer step.",
    )


def _rate(run: Run, step: int) -> float | None:
    event = next(run.first.of("step", step), None)
    return None if event is None or not event["groups"] else event["groups"][0].get("lr")


def _initial(found: Difference, single: Run, several: Run) -> Cause:
    return Cause(
        "unseeded-weights",
        "The model starts from other weights: they are drawn without a seed, or by the number of processes.",
        "Call set_seed() before the model is made.",
    )


def _unlike_initial(found: Difference, single: Run, several: Run) -> Cause:
    return Cause(
        "weights-of-a-rank",
        "Ranks start from different weights: they are drawn or loaded after accelerator.prepare(), by each rank for itself.",
        "Initialize and load weights before accelerator.prepare(), which gives all ranks those of rank 0.",
    )


def _weights(found: Difference, single: Run, several: Run) -> Cause:
    return Cause(
        "weights-changed",
        "Gradients and learning rates agree and weights don't: the script changes weights itself (averaging, clamping, tying), or the optimizer's state or "
        "algorithm isn't the same on all ranks.",
        "Change weights on all ranks alike, right after the step, and prepare the optimizer.",
    )


def _buffer(found: Difference, single: Run, several: Run) -> Cause:
    batch_norm = found.name.endswith(("running_mean", "running_var"))
    return Cause(
        "batch-norm" if batch_norm else "buffer-of-a-rank",
        f"The buffer {found.name} is made of a rank's own rows{' (running statistics of BatchNorm)' if batch_norm else ''}.",
        "Use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)."
        if batch_norm
        else "Reduce what goes into it over all ranks (accelerator.reduce).",
    )


def _window(found: Difference, single: Run, several: Run) -> Cause:
    return Cause(
        "other-windows",
        "Accumulation windows don't have the same micro-batches: gradient_accumulation_steps, or what ends a window, depends on the number of processes.",
        "Set gradient_accumulation_steps in the Accelerator, and let accelerator.accumulate() end windows.",
    )


def _steps(found: Difference, single: Run, several: Run) -> Cause:
    return Cause(
        "number-of-steps",
        "The number of optimizer steps depends on the number of processes.",
        "Compute it from len() of the prepared loader.",
    )


def _skipped(found: Difference, single: Run, several: Run) -> Cause:
    return Cause(
        "overflow",
        "A step is skipped in one run and not in the other: gradients overflow in one of them.",
        "Verify with a smaller initial loss scale, or in bf16.",
    )


def _metric(found: Difference, single: Run, several: Run) -> Cause:
    return Cause(
        "metric-of-one-rank",
        f"{found.name!r} is computed from rank 0's rows alone.",
        "Gather predictions with accelerator.gather_for_metrics() before computing it, or log(..., reduce='mean', weight=rows).",
    )


def _gathered(found: Difference, single: Run, several: Run) -> Cause:
    return Cause(
        "other-rows-gathered",
        "Metrics see other rows on several processes than on one: the loader isn't prepared, or what is gathered isn't a row per sample.",
        "Prepare the loader of the evaluation, and gather one row per sample with accelerator.gather_for_metrics().",
    )


_RULES: dict[str, Callable[[Difference, Run, Run], Cause]] = {
    "samples": _samples,
    "rows": _rows,
    "inputs": _inputs,
    "frozen parameters": _frozen,
    "modules in evaluation": _evaluating,
    "calls": _calls,
    "module output": _module,
    "loss": _loss,
    "window": _window,
    "missing gradient": _missing_gradient,
    "gradients differ between ranks": _unlike_gradients,
    "clipped gradients differ between ranks": _clipped,
    "used gradients differ between ranks": _clipped,
    "used gradient": _clipped,
    "gradient": _gradient,
    "clipped gradient": _clipped,
    "setting": _setting,
    "skipped step": _skipped,
    "initial weights": _initial,
    "initial weights differ between ranks": _unlike_initial,
    "weights": _weights,
    "weights differ between ranks": _weights,
    "buffer": _buffer,
    "steps": _steps,
    "metric of one rank": _metric,
    "gathered rows": _gathered,
    "gathered values": _gathered,
}
