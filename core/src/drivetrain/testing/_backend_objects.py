"""Objects: what is prepared, given back, read later, kept apart, refused."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain.errors import UnsupportedError
from drivetrain.specs import Capability
from drivetrain.testing._backend_base import BackendKit, check_all_close
from drivetrain.testing._backend_windows import Loop
from drivetrain.testing.communication import count_collectives
from drivetrain.testing.pytest_plugin import Workers
from drivetrain.testing.training import Stream, make_model

__all__ = ["ObjectTests"]


def prepare_facts(kit: BackendKit) -> dict[str, Any]:
    """On a rank: what ``prepare`` and ``unwrap_model`` give, and what making an Accelerator does to the environment."""
    before = dict(os.environ)
    accelerator = kit.make_accelerator()
    made = dict(os.environ)
    inner = make_model()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    first = accelerator.prepare(inner, optimizer, scheduler)
    frozen = torch.nn.Linear(6, 3).requires_grad_(False)
    facts: dict[str, Any] = {
        "environment": {k: v for k, v in made.items() if before.get(k) != v} or set(before) - set(made),
        "again": [a is b for a, b in zip(first, accelerator.prepare(inner, optimizer, scheduler), strict=True)],
        "of prepared": [a is b for a, b in zip(first, accelerator.prepare(*first), strict=True)],
        "unwrapped": accelerator.unwrap_model(first[0]) is inner,
        "unwrapped twice": accelerator.unwrap_model(accelerator.unwrap_model(first[0])) is inner,
        "is module": isinstance(first[0], torch.nn.Module),
        "steps parameters": {id(p) for p in first[1].parameters()} == {id(p) for p in inner.parameters()},
        "device": {p.device.type for p in inner.parameters()} == {accelerator.device.type},
        "mode": first[0].train().training and inner.training and not (first[0].eval().training or inner.training),
        "described": all(isinstance(t, str) for item in accelerator.backend.describe().items() for t in item),
        "data ranks": (accelerator.backend.data_rank, accelerator.backend.data_world_size),
    }
    facts["explained"] = facts["described"] and accelerator.backend.spec.name in accelerator.explain()
    with contextlib.suppress(UnsupportedError):  # a second model needs a capability
        facts["frozen"] = accelerator.prepare(frozen)(torch.zeros(2, 6, device=accelerator.device)).shape == (2, 3)
    accelerator.backend.teardown()
    accelerator.backend.teardown()
    accelerator.end_training()
    accelerator.end_training()
    later = kit.make_accelerator()
    facts["after teardown"] = later.reduce(torch.ones((), device=later.device)).item()
    later.end_training()
    return facts


def read_later(kit: BackendKit) -> list[list[float]]:
    """On a rank: values that change after they were asked for."""
    accelerator = kit.make_accelerator()
    device = accelerator.device
    tensors = [
        torch.tensor(1.5, device=device),
        torch.tensor(7, device=device),
        torch.tensor(0.25, device=device).bfloat16(),
    ]
    tensors.append(torch.tensor(2.0, device=device, requires_grad=True) * 2)
    future = accelerator.backend.read_later(tensors)
    nothing = accelerator.backend.read_later([])
    for tensor in tensors[:3]:
        tensor.zero_()
    result = [future.result(), future.result(), nothing.result()]
    accelerator.end_training()
    return result


def gather_all(kit: BackendKit, samples: int, settings: dict[str, Any]) -> list[int]:
    """On a rank: what ``gather_for_metrics`` makes of a loader over 0, 1, 2, ..."""
    from drivetrain.data import DataLoaderConfiguration

    settings = dict(settings)
    sized = settings.pop("sized")
    accelerator = kit.make_accelerator(dataloader_config=DataLoaderConfiguration(**settings))
    rows = list(range(samples))
    loader = accelerator.prepare(torch.utils.data.DataLoader(rows if sized else Stream(rows), batch_size=4))  # type: ignore[arg-type]
    seen: list[int] = []
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch).tolist()
    accelerator.end_training()
    return seen


def refused(function: Callable[[], Any]) -> str:
    """The message with which something is refused; empty if it isn't."""
    try:
        function()
    except UnsupportedError as error:
        return str(error) or "without a message"
    return ""


def put_off(save: Callable[[], str]) -> str:
    """The warning with which a save is put off to the window's end; empty if it isn't."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        path = save()
    return "" if Path(path).exists() else "; ".join(str(warning.message) for warning in told)


def try_capabilities(kit: BackendKit, directory: str) -> dict[str, str]:
    """On a rank: how each use of a capability that isn't declared is answered."""
    has = kit.has
    answers = {}
    if not has(Capability.COMPILE):
        answers["compile"] = refused(lambda: kit.make_accelerator(dynamo_backend="eager"))
    loop = Loop(kit, gradient_accumulation_steps=2)
    accelerator, model = loop.accelerator, loop.model
    with accelerator.accumulate(model):
        accelerator.backward(loop.loss())
        if not has(Capability.MID_WINDOW_STATE):
            answers["mid-window-state"] = put_off(lambda: accelerator.save_state(f"{directory}/mid-window"))
    with accelerator.accumulate(model):
        accelerator.backward(loop.loss())
        if not has(Capability.CLIP_VALUE):
            answers["clip-value"] = refused(lambda: accelerator.clip_grad_value_(model.parameters(), 1.0))
    if not has(Capability.ITEM_WEIGHTS):
        with accelerator.accumulate(model):
            loss = loop.loss()
            answers["item-weights"] = refused(lambda: accelerator.backward(loss, weight=3))
    if not has(Capability.UNEVEN_INPUTS):
        answers["uneven-inputs"] = refused(lambda: accelerator.join_uneven_inputs([model]).__enter__())
    if not has(Capability.NO_SYNC):
        answers["no-sync"] = refused(lambda: accelerator.no_sync(model).__enter__())
    if not has(Capability.MULTIPLE_MODELS):
        answers["multiple-models"] = refused(lambda: accelerator.prepare(make_model()))
    accelerator.end_training()
    return answers


def side_by_side(kit: BackendKit, settings: list[dict[str, Any]], together: bool) -> list[dict[str, torch.Tensor]]:
    """On a rank: several trainings, in turn or one after the other; their weights."""
    loops = [Loop(kit, **kwargs) for kwargs in settings] if together else []
    if together:
        for _ in range(6):
            for loop in loops:
                loop.micro_batch()
        return [loop.end(loop.weights()) for loop in loops]
    weights = []
    for kwargs in settings:
        loop = Loop(kit, **kwargs)
        for _ in range(6):
            loop.micro_batch()
        weights.append(loop.end(loop.weights()))
    return weights


def evaluate(kit: BackendKit) -> dict[str, int]:
    """On a rank: what the forward of a model that is only evaluated sends."""
    accelerator = kit.make_accelerator()
    inner = torch.nn.Sequential(make_model(), torch.nn.BatchNorm1d(3))  # wrappers that train send buffers
    model = accelerator.prepare_model(inner, evaluation_mode=True)
    sent = count_collectives(lambda: model(torch.zeros(2, 6, device=accelerator.device)))
    accelerator.end_training()
    return sent


class ObjectTests(BackendKit):
    """Preparing, reading later, metrics, capabilities, several Accelerators."""

    def test_prepared_objects(self, workers: Workers, world_size: int) -> None:
        """``prepare`` and ``teardown`` twice are the same as once; ``unwrap_model`` gives the user's module.

        Making an Accelerator writes no environment variable.
        """
        results = self.run(workers, world_size, prepare_facts)
        for rank, facts in enumerate(results):
            who = f"rank {rank}"
            assert not facts["environment"], f"{who}: making an Accelerator changed os.environ: {facts['environment']}"
            assert all(facts["again"]), f"{who}: preparing objects again gave others: {facts['again']}"
            assert all(facts["of prepared"]), f"{who}: preparing prepared objects gave others: {facts['of prepared']}"
            assert facts["unwrapped"], f"{who}: unwrap_model didn't give the user's module"
            assert facts["unwrapped twice"], f"{who}: unwrap_model of a plain module must give that module"
            assert facts["is module"], f"{who}: a prepared model must be a torch.nn.Module"
            assert facts["steps parameters"], f"{who}: the optimizer doesn't hold the parameters of the prepared model"
            assert facts["device"], f"{who}: parameters aren't on the device"
            assert facts["mode"], f"{who}: train() and eval() of the prepared model don't reach the user's"
            assert facts["described"], f"{who}: describe() must map texts to texts"
            assert facts["explained"], f"{who}: explain() doesn't name the backend"
            assert facts.get("frozen", True), f"{who}: a model without trainable parameters doesn't run"
            assert facts["after teardown"] == world_size, f"{who}: after teardown no new Accelerator works"
        data_world = results[0]["data ranks"][1]
        assert {facts["data ranks"] for facts in results} == {(i, data_world) for i in range(data_world)}, (
            f"data_rank and data_world_size don't count the ranks: {[facts['data ranks'] for facts in results]}"
        )

    def test_read_later_is_a_snapshot(self, workers: Workers, world_size: int) -> None:
        """Values of 0-d tensors of any dtype as they were at the call, whatever happens to the tensors."""
        for first, again, nothing in self.run(workers, world_size, read_later):
            assert first == [1.5, 7.0, 0.25, 4.0], f"read_later gave {first} for values that were changed afterwards"
            assert again == first and nothing == []

    @pytest.mark.parametrize(
        "settings",
        [
            {"even_batches": True, "sized": True},
            {"even_batches": True, "sized": False},
            {"even_batches": "repeat", "sized": True},
            {"even_batches": True, "split_batches": True, "sized": True},
        ],
        ids=["sized", "stream", "repeat", "split"],
    )
    def test_metrics_cover_each_sample_once(self, workers: Workers, world_size: int, settings: dict[str, Any]) -> None:
        """``gather_for_metrics`` over loaders of any length: all samples in order, on every rank."""
        for samples in (1, 4, 9, 13, 16):
            for rank, seen in enumerate(self.run(workers, world_size, gather_all, samples, settings)):
                assert seen == list(range(samples)), f"rank {rank} gathered {seen} of {samples} samples"

    def test_what_is_not_declared_is_refused(self, workers: Workers, world_size: int, tmp_path: Any) -> None:
        """With `UnsupportedError` and a sentence, on every rank."""
        for rank, answers in enumerate(self.run(workers, world_size, try_capabilities, str(tmp_path))):
            silent = [name for name, answer in answers.items() if not answer]
            assert not silent, f"rank {rank}: {silent} aren't declared, and weren't refused with UnsupportedError"

    def test_one_process_backends_refuse_more(self, workers: Workers) -> None:
        """Without `Capability.DISTRIBUTED`."""
        if self.has(Capability.DISTRIBUTED):
            return
        answers = self.run(workers, 2, _refuse_construction)
        assert all(answers), "Capability.DISTRIBUTED isn't declared, and two processes weren't refused"

    def test_accelerators_side_by_side(self, workers: Workers, world_size: int) -> None:
        """Different precision and accumulation, step by step in turn: each trains as it does alone.

        A backend whose vendor's state is process-wide (``spec.exclusive``) isn't asked to: core refuses the second one, if it has other settings.
        """
        if self.spec.exclusive:
            return
        settings = [
            {"mixed_precision": self.precisions[0], "gradient_accumulation_steps": 1},
            {"mixed_precision": self.precisions[-1], "gradient_accumulation_steps": 3},
        ]
        alone = self.run(workers, world_size, side_by_side, settings, together=False)
        both = self.run(workers, world_size, side_by_side, settings, together=True)
        for rank, (ours, theirs) in enumerate(zip(both, alone, strict=True)):
            for i, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
                who = f"rank {rank}: Accelerator {i + 1} of 2, compared with what it does alone"
                check_all_close(mine, expected, 1e-6, who)

    def test_a_model_that_is_only_evaluated(self, workers: Workers, world_size: int) -> None:
        """Replicated: its forward sends nothing, so that one rank may run it alone."""
        if self.has(Capability.SHARDED_PARAMETERS) or self.has(Capability.OWNS_SCHEDULE):
            return
        for sent in self.run(workers, world_size, evaluate):
            assert not sent, f"a model that is only evaluated sent {sent} in its forward"


def _refuse_construction(kit: BackendKit) -> str:
    return refused(kit.make_accelerator)
