"""Loss scaling through the Accelerator: several optimizers, fused ones, fixed scales, windows, checkpoints, two precisions in one process."""

import math
import pickle

import pytest
import torch

from drivetrain import Accelerator, AutocastKwargs, GradScalerKwargs, PrecisionKwargs

SETTINGS = [{}, {"foreach": True}, {"fused": True}]


def make(optimizers=1, steps=1, optimizer=torch.optim.SGD, settings=None, **scaling):
    torch.manual_seed(0)
    scaling = {"init_scale": 256.0, **scaling}
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        gradient_accumulation_steps=steps,
        kwargs_handlers=[GradScalerKwargs(**scaling)],
    )
    models = [torch.nn.Linear(3, 1) for _ in range(optimizers)]
    made = [optimizer(m.parameters(), lr=0.1, **(settings or {})) for m in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in made]
    prepared = accelerator.prepare(*models, *made, *schedulers)
    prepared = list(prepared)
    return accelerator, prepared[:optimizers], prepared[optimizers : 2 * optimizers], prepared[2 * optimizers :]


def step(accelerator, models, optimizers, schedulers, factors, clip=None):
    """One micro-batch: each model's loss times its factor, all of them stepping."""
    with accelerator.accumulate(*models):
        for model, factor in zip(models, factors, strict=True):
            accelerator.backward(model(torch.ones(2, 3)).pow(2).mean() * factor)
        norm = None
        if clip is not None:
            norm = accelerator.clip_grad_norm_([p for m in models for p in m.parameters()], clip)
        for optimizer in optimizers:
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return norm


def scale(accelerator):
    return accelerator.backend.precision.state_dict()["scale"]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_overflow_skips_fused_and_other_optimizers_alike(optimizer, settings):
    accelerator, models, optimizers, schedulers = make(optimizer=optimizer, settings=settings)
    before = models[0].weight.detach().clone()
    step(accelerator, models, optimizers, schedulers, [math.inf])
    assert torch.equal(models[0].weight, before)
    assert accelerator.optimizer_step_was_skipped and optimizers[0].step_was_skipped
    assert (accelerator.step, schedulers[0].scheduler.last_epoch, scale(accelerator)) == (0, 0, 128.0)
    step(accelerator, models, optimizers, schedulers, [1.0])
    assert not torch.equal(models[0].weight, before) and not accelerator.optimizer_step_was_skipped
    assert (accelerator.step, schedulers[0].scheduler.last_epoch, scale(accelerator)) == (1, 1, 128.0)
    if optimizer is torch.optim.AdamW:
        assert float(optimizers[0].state[models[0].weight]["step"]) == 1.0


@pytest.mark.parametrize("settings", SETTINGS)
def test_optimizers_of_a_window_skip_by_themselves_and_share_a_scale(settings):
    accelerator, models, optimizers, schedulers = make(optimizers=2, settings=settings)
    before = [m.weight.detach().clone() for m in models]
    step(accelerator, models, optimizers, schedulers, [1.0, math.inf])
    assert [o.step_was_skipped for o in optimizers] == [False, True] and accelerator.optimizer_step_was_skipped
    assert [torch.equal(m.weight, b) for m, b in zip(models, before, strict=True)] == [False, True]
    assert [s.scheduler.last_epoch for s in schedulers] == [1, 0]
    assert scale(accelerator) == 128.0  # halved once


def test_gradients_are_unscaled_once_per_window_before_clipping():
    """Three micro-batches, clipped and unscaled by hand as well."""
    accelerator, models, optimizers, schedulers = make(steps=3)
    plain = torch.nn.Linear(3, 1)
    plain.load_state_dict(models[0].state_dict())
    with torch.autocast("cpu", torch.float16):
        y = plain(torch.ones(2, 3))
    y.float().pow(2).mean().backward()
    exact = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    for _ in range(3):
        with accelerator.accumulate(*models):
            accelerator.backward(models[0](torch.ones(2, 3)).pow(2).mean())
            accelerator.unscale_gradients()
            norm = accelerator.clip_grad_norm_(models[0].parameters(), 0.5)
            accelerator.unscale_gradients(optimizers[0])
            if accelerator.sync_gradients:
                torch.testing.assert_close(norm, exact, rtol=1e-2, atol=0)
                clipped = torch.nn.utils.get_total_norm([p.grad for p in models[0].parameters()])
                assert float(clipped) == pytest.approx(min(0.5, float(exact)), rel=1e-2)
            optimizers[0].step()
            optimizers[0].zero_grad()
    assert accelerator.step == 1


def test_growth_and_backoff():
    accelerator, *things = make(growth_interval=2, growth_factor=4.0, backoff_factor=0.25)
    seen = []
    for factor in (1.0, 1.0, math.nan, 1.0, 1.0):
        step(accelerator, *things, [factor])
        seen.append(scale(accelerator))
    assert seen == [256.0, 1024.0, 256.0, 256.0, 1024.0]


def test_a_static_scale_skips_and_stays():
    accelerator, *things = make(growth_factor=1.0, backoff_factor=1.0, growth_interval=1)
    for factor in (1.0, math.inf, 1.0):
        step(accelerator, *things, [factor])
        assert scale(accelerator) == pytest.approx(256.0, rel=1e-6)
    assert accelerator.step == 2


def test_the_scale_is_in_checkpoints(tmp_path):
    accelerator, *things = make()
    step(accelerator, *things, [math.inf])
    accelerator.save_state(tmp_path / "state")
    other, *_ = make()
    other.load_state(tmp_path / "state")
    assert scale(other) == 128.0


def test_two_accelerators_with_different_precisions_side_by_side():
    """In turn, so that neither's autocast or scale reaches the other."""
    seen = {}
    pairs = {}
    for name in ("no", "bf16", "fp16", "pure-bf16"):
        accelerator = Accelerator(
            cpu=True, mixed_precision=name, kwargs_handlers=[PrecisionKwargs(output_dtype="compute")]
        )
        model = torch.nn.Linear(4, 4)
        pairs[name] = (accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    for _ in range(2):
        for name, (accelerator, model, optimizer) in pairs.items():
            y = model(torch.ones(2, 4))
            seen[name] = y.dtype
            accelerator.backward(y.float().mean())
            optimizer.step()
            optimizer.zero_grad()
    assert seen == {
        "no": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "pure-bf16": torch.bfloat16,
    }
    assert [pairs[name][0].step for name in ("no", "bf16", "pure-bf16")] == [2, 2, 2]
    assert [pairs[name][0].scaler is not None for name in pairs] == [False, False, True, False]


def test_autocast_nests():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    x = torch.ones(2, 2)
    with accelerator.autocast():
        with accelerator.autocast(AutocastKwargs(enabled=False)):
            assert (x @ x).dtype is torch.float32
            with accelerator.autocast():
                assert (x @ x).dtype is torch.bfloat16
        assert (x @ x).dtype is torch.bfloat16
    assert (x @ x).dtype is torch.float32


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_kept_modules_compute_in_float32_and_all_is_plain_again_after_unwrapping(precision):
    handlers = [PrecisionKwargs(keep_in_fp32=["LayerNorm", "3"], output_dtype="compute")]
    accelerator = Accelerator(cpu=True, mixed_precision=precision, kwargs_handlers=handlers)
    model = torch.nn.Sequential(*(layer() for layer in [
        lambda: torch.nn.Linear(4, 4), lambda: torch.nn.LayerNorm(4), lambda: torch.nn.Linear(4, 4), lambda: torch.nn.Linear(4, 2)
    ]))  # fmt: skip
    expected = model(torch.ones(1, 4))
    model = accelerator.prepare(model)
    seen = {}
    for name, layer in model.named_children():
        layer.register_forward_hook(lambda m, inputs, out, name=name: seen.update({name: out.dtype}))
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert model(torch.ones(1, 4)).dtype is torch.float32  # the head is kept
    assert seen == {"0": low, "1": torch.float32, "2": low, "3": torch.float32}
    for layer in model:
        layer._forward_hooks.clear()
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert torch.equal(pickle.loads(pickle.dumps(plain))(torch.ones(1, 4)), expected)


def test_a_pattern_that_matches_nothing_is_told():
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16", kwargs_handlers=[PrecisionKwargs(keep_in_fp32=["Linear", "haed"])]
    )
    with pytest.warns(UserWarning, match="'haed' matches no module of Sequential"):
        accelerator.prepare(torch.nn.Sequential(torch.nn.Linear(1, 1)))
