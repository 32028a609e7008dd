"""What the prototypes are asked to do, on each rank. Everything goes through the Accelerator; only poisoning reaches deeper."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from drivetrain import Accelerator
from drivetrain._engine.session import AcceleratorSession
from drivetrain.testing.training import Case, Result, make_data, make_model, train


def keywords(backend: str, stage: int | None, **more: Any) -> dict[str, Any]:
    """The Accelerator's keywords for a backend."""
    if stage is None:
        return {"backend": backend, "cpu": True, **more}
    from prototype_options import ZeROOptions

    return {"backend": ZeROOptions(stage=stage), "cpu": True, **more}


def _allow_fp16() -> None:
    """The engine asks the processor for fp16 instructions, which it needn't have to compute in fp16."""
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True


def parity(case: Case, backend: str, stage: int | None, **more: Any) -> Result:
    """Train as the reference does."""
    if stage is not None:
        _allow_fp16()
    return train(dataclasses.replace(case, accelerator=keywords(backend, stage, **more)))


class Job:
    """An Accelerator with the objects of a case; ends it on the way out."""

    def __init__(self, case: Case, backend: str, stage: int | None, **more: Any) -> None:
        self.case = case
        self.accelerator = Accelerator(
            **keywords(backend, stage, gradient_accumulation_steps=case.accumulation, **more)
        )
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        loader: Any = torch.utils.data.DataLoader(make_data(case.samples), batch_size=case.batch_size)  # type: ignore[arg-type]
        try:
            self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
                model, optimizer, scheduler, loader
            )
        except BaseException:
            self.accelerator.end_training()
            raise

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: object) -> None:
        self.accelerator.end_training()

    def micro_batch(self, batch: Any, *, factor: float = 1.0) -> torch.Tensor:
        loss = cross_entropy(self.model(batch["x"]).float(), batch["y"]) * factor
        self.accelerator.backward(loss)
        return loss.detach()

    def step(self) -> None:
        if self.accelerator.sync_gradients and self.case.max_norm is not None:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.case.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def epoch(self) -> None:
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                self.micro_batch(batch)
                self.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: t.detach().clone() for n, t in self.accelerator.get_state_dict(self.model).items()}


def metrics(case: Case, backend: str, stage: int | None) -> list[int]:
    """The rows that `gather_for_metrics` gives over an evaluation epoch, and then one of training."""
    rows = torch.stack([row["x"] for row in make_data(case.samples)])
    seen: list[int] = []
    with Job(case, backend, stage) as job:
        job.model.eval()
        with torch.no_grad():
            for batch in job.loader:
                job.model(batch["x"])
                seen += [int((rows - x).abs().sum(1).argmin()) for x in job.accelerator.gather_for_metrics(batch["x"])]
        job.model.train()
        job.epoch()
    return seen


def overflow(case: Case, backend: str, stage: int | None) -> dict[str, Any]:
    """Three windows in fp16; in the second one, rank 1 alone has an infinite loss."""
    if stage is not None:
        _allow_fp16()
    found: dict[str, Any] = {"skipped": [], "scale": [], "moved": [], "steps": []}
    with Job(case, backend, stage, mixed_precision="fp16") as job:
        for number, batch in zip(range(3), job.loader, strict=False):
            before = job.weights()
            poisoned = number == 1 and job.accelerator.process_index == 1
            with job.accelerator.accumulate(job.model):
                job.micro_batch(batch, factor=float("inf") if poisoned else 1.0)
                job.step()
            after = job.weights()
            found["skipped"].append(job.accelerator.optimizer_step_was_skipped)
            found["moved"].append(max(float((after[n] - before[n]).abs().max()) for n in after) > 0)
            found["steps"].append(job.accelerator.step)
            job.accelerator.backend.end_window()  # as the next window's start would
            found["scale"].append(job.accelerator.backend.precision.state_dict()["scale"])
    return found


def save(case: Case, backend: str, stage: int | None, directory: str) -> None:
    """Train the first epoch, look at a batch as a validation does, and save."""
    with Job(case, backend, stage) as job:
        job.epoch()
        with torch.no_grad():
            job.model(torch.zeros(2, 6))
        found = [len(models) for _, models in AcceleratorSession(job.accelerator).optimizers]
        assert found == [1], "after an evaluation the optimizer's model isn't found"
        job.accelerator.save_state(directory)


def resume(case: Case, backend: str, stage: int | None, directory: str) -> dict[str, torch.Tensor]:
    """Load into fresh objects, and train the second epoch."""
    with Job(case, backend, stage) as job:
        job.accelerator.load_state(directory)
        job.epoch()
        return job.weights()


def by_hand(case: Case, backend: str, stage: int | None) -> dict[str, torch.Tensor]:
    """Windows cut by the script, without ``accumulate``: even ones, since that is all that a script can do."""
    with Job(case, backend, stage) as job:
        for number, batch in enumerate(job.loader):
            job.micro_batch(batch)
            if (number + 1) % case.accumulation == 0:
                job.step()
        return job.weights()


def two_losses(case: Case, backend: str, stage: int | None) -> dict[str, torch.Tensor]:
    """Each micro-batch's loss in two halves, each with a ``backward`` of its own."""
    with Job(case, backend, stage) as job:
        for batch in job.loader:
            with job.accelerator.accumulate(job.model):
                job.micro_batch(batch, factor=0.5)
                job.micro_batch(batch, factor=0.5)
                job.step()
        return job.weights()


def used_optimizer(case: Case, backend: str, stage: int | None) -> float:
    """A step by hand before preparing, so that the optimizer comes with a state, and one after. Difference to two by hand."""
    accelerator = Accelerator(**keywords(backend, stage))
    try:
        batch = torch.utils.data.default_collate(make_data(8))

        def step(model: Any, optimizer: Any, backward: Any) -> None:
            backward(cross_entropy(model(batch["x"]), batch["y"]))
            optimizer.step()
            optimizer.zero_grad()

        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        step(model, optimizer, torch.Tensor.backward)
        twin = copy.deepcopy(model)
        plain = torch.optim.AdamW(twin.parameters(), lr=0.02)
        plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step(*accelerator.prepare(model, optimizer), accelerator.backward)
        step(twin, plain, torch.Tensor.backward)
        weights = accelerator.get_state_dict(accelerator._models[0])
        return max(float((weights[n] - p).abs().max()) for n, p in twin.named_parameters())
    finally:
        accelerator.end_training()
