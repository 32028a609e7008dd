"""Several losses of one forward, several engines in one script, engines of different configurations: as plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain import Accelerator, FullyShardedDataParallelPlugin
from drivetrain.errors import ConfigurationError
from drivetrain.testing.pytest_plugin import Workers
from drivetrain.testing.training import make_model
from drivetrain_deepspeed.options import DeepSpeedPlugin

from .deepspeed_trainings import BATCH, differ, make, plain_step, rows, weights


def gan(stage: int) -> list[dict[str, torch.Tensor]]:
    """On a rank: a generator and a discriminator, trained in turn through each other."""
    accelerator = make(zero_stage=stage)
    try:
        generator, critic = torch.nn.Linear(6, 4), torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 1))
        _fill(generator, critic)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02, eps=1e-2) for m in (generator, critic)]
        g, c, og, oc = accelerator.prepare(generator, critic, *optimizers)
        x = rows(accelerator)["x"]
        for _ in range(3):
            _gan_step(g, c, og, oc, x, accelerator.backward)
        return [weights(accelerator, m) for m in (g, c)]
    finally:
        accelerator.end_training()


def _fill(*models: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for model in models:
        for p in model.parameters():
            p.data = torch.randn(p.shape, generator=generator) * 0.3


def _gan_step(g: Any, c: Any, og: Any, oc: Any, x: torch.Tensor, backward: Any) -> None:
    fake = g(x)
    backward((c(x[:, :4]) - 1).pow(2).mean() + c(fake.detach()).pow(2).mean())
    oc.step()
    oc.zero_grad()
    backward((c(fake) - 1).pow(2).mean())  # leaves gradients in the critic, too
    og.step()
    og.zero_grad()
    oc.zero_grad()


def test_two_engines_that_train_through_each_other(workers: Workers) -> None:
    """As plain PyTorch: what a loss leaves in the other model is dropped by its zero_grad()."""
    g, c = torch.nn.Linear(6, 4), torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 1))
    _fill(g, c)
    og, oc = (torch.optim.AdamW(m.parameters(), lr=0.02, eps=1e-2) for m in (g, c))
    for _ in range(3):
        _gan_step(g, c, og, oc, BATCH["x"], torch.Tensor.backward)
    for stage in range(4):
        for ours in workers(2).run(gan, stage):
            for mine, theirs in zip(ours, (g, c), strict=True):
                assert differ(mine, dict(theirs.state_dict())) < 2e-6, stage


def distilled() -> dict[str, Any]:
    """On a rank: a student at stage 2 learns from a frozen teacher at stage 3."""
    plugins = {"student": DeepSpeedPlugin(zero_stage=2), "teacher": DeepSpeedPlugin(zero_stage=3)}
    accelerator = Accelerator(cpu=True, deepspeed_plugins=plugins)
    try:
        student, teacher = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)
        _fill(student, teacher)
        optimizer = torch.optim.AdamW(student.parameters(), lr=0.02, eps=1e-2)
        state = accelerator.state
        student, optimizer = accelerator.prepare(student, optimizer)
        state.select_deepspeed_plugin("teacher")
        selected = state.deepspeed_plugin is state.get_deepspeed_plugin("teacher") is state.deepspeed_plugins["teacher"]
        teacher = accelerator.prepare(teacher)
        stages = [student.zero_optimization_stage(), teacher.zero_optimization_stage()]
        x = rows(accelerator)["x"]
        for _ in range(3):
            accelerator.backward((student(x) - teacher(x).detach()).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        explained = {row.name: row.value for row in accelerator.plan.rows()}
        return {
            "weights": weights(accelerator, student),
            "stages": stages,
            "selected": selected,
            "explained": explained.get("DeepSpeedPlugin['teacher'].zero_stage"),
        }
    finally:
        accelerator.end_training()


def test_engines_of_different_configurations(workers: Workers) -> None:
    """As Accelerate's dict of plugins: the first counts, until another is selected."""
    student, teacher = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)
    _fill(student, teacher)
    optimizer = torch.optim.AdamW(student.parameters(), lr=0.02, eps=1e-2)
    for _ in range(3):
        plain_step(student, optimizer, (student(BATCH["x"]) - teacher(BATCH["x"]).detach()).pow(2).mean())
    for found in workers(2).run(distilled):
        assert (found["stages"], found["selected"], found["explained"]) == ([2, 3], True, "3")
        assert differ(found["weights"], dict(student.state_dict())) < 2e-6


def test_plugins_that_cannot_be_together_are_refused() -> None:
    two = {"a": DeepSpeedPlugin(gradient_accumulation_steps=2), "b": DeepSpeedPlugin(gradient_accumulation_steps=4)}
    with pytest.raises(ConfigurationError, match="=2 .*=4 contradict each other"):
        Accelerator(cpu=True, deepspeed_plugin=two)
    for wrong, words in (({}, "one object or more"), ({"a": 3}, "takes a DeepSpeedPlugin, not a int")):
        with pytest.raises(ConfigurationError, match=words):
            Accelerator(cpu=True, deepspeed_plugin=wrong)
    with pytest.raises(ConfigurationError, match="takes a FullyShardedDataParallelPlugin, not a dict"):
        Accelerator(cpu=True, fsdp_plugin={"a": FullyShardedDataParallelPlugin()})
    accelerator = make(zero_stage=2)
    with pytest.raises(ConfigurationError, match="called 'b'. The Accelerator was given one object"):
        accelerator.state.select_deepspeed_plugin("b")
    with pytest.raises(ConfigurationError, match="called 'b'"):
        accelerator.state.get_deepspeed_plugin("b")
    accelerator.end_training()


def losses_of_one_forward(stage: int, offload: str) -> dict[str, torch.Tensor]:
    """On a rank: one forward and three backwards in each of two micro-batches."""
    accelerator = make(zero_stage=stage, gradient_accumulation_steps=2, offload_optimizer_device=offload)
    inner = make_model()
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    batch = rows(accelerator)
    for part in (slice(4), slice(4, 8)):
        with accelerator.accumulate(model):
            logits = model(batch["x"][part])
            for k in range(3):
                accelerator.backward(logits[:, k].pow(2).mean(), retain_graph=True)
            optimizer.step()
            optimizer.zero_grad()
    result = weights(accelerator, model)
    accelerator.end_training()
    return result


@pytest.mark.parametrize("offload", ["none", "cpu"])
def test_several_losses_of_one_forward(workers: Workers, offload: str) -> None:
    """Gradients add up. At stage 3 parameters are gone after a backward."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_step(model, optimizer, model(BATCH["x"]).pow(2).mean(0).sum())
    for stage in range(1 if offload == "cpu" else 0, 3):
        for ours in workers(2).run(losses_of_one_forward, stage, offload):
            assert differ(ours, dict(model.state_dict())) < 1e-6, stage
