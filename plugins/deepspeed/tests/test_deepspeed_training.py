"""What is DeepSpeed's own: stages, offload, configured optimizers and schedulers, half precision, and what is refused."""

from __future__ import annotations

import copy
import os
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from drivetrain import Accelerator
from drivetrain.errors import ConfigurationError, NotPreparedError, UnsupportedError
from drivetrain.testing.pairwise import pairwise
from drivetrain.testing.pytest_plugin import Workers
from drivetrain.testing.training import Case, Result, make_data, make_model, reference, train
from drivetrain_deepspeed.dummies import DummyOptim, DummyScheduler
from drivetrain_deepspeed.options import DeepSpeedPlugin

from .deepspeed_trainings import BATCH, differ, make, plain_step, rows, weights


def allow_fp16() -> None:
    """DeepSpeed asks the processor for fp16 instructions, which it needn't have to compute in fp16."""
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True  # type: ignore[method-assign]


# -- trainings that are compared with plain PyTorch --------------------------------------------------------------------------


def run_training(settings: dict[str, Any], case: Case, fp16: bool = False) -> Result:
    """On a rank."""
    if fp16:
        allow_fp16()
    return train(case, lambda **kwargs: make(**{**settings, **kwargs}))


_AXES: dict[str, list[Any]] = {
    "zero_stage": [0, 1, 2, 3],
    "offload": ["none", "cpu"],
    "optimizer": ["adamw", "sgd", "adagrad"],
    "accumulation": [1, 4],
    "weighted": [False, True],
    "max_norm": [None, 0.5],
    "torch_autocast": [False, True],
}


def _cases() -> list[Any]:
    import itertools

    selection = pairwise(_AXES)
    product = [dict(zip(_AXES, values, strict=True)) for values in itertools.product(*_AXES.values())]
    return [pytest.param(s, id="-".join(map(str, s.values()))) for s in selection] + [
        pytest.param(s, id="-".join(map(str, s.values())), marks=pytest.mark.full)
        for s in product
        if s not in selection
    ]


@pytest.mark.parametrize("settings", _cases())
def test_stages_offload_and_optimizers(workers: Workers, settings: dict[str, Any]) -> None:
    """The same losses, norms, rates, gradients and weights as plain PyTorch, with parameters and state on the device or offloaded."""
    given = dict(settings)
    stage, offload, autocast = given.pop("zero_stage"), given.pop("offload"), given.pop("torch_autocast")
    plugin: dict[str, Any] = {"zero_stage": stage, "torch_autocast": autocast}
    if stage:
        plugin["offload_optimizer_device"] = offload
    if stage == 3:
        plugin["offload_param_device"] = offload
    case = Case(**given, accelerator={"mixed_precision": "bf16" if autocast else "no"})
    expected = reference(case, 2, autocast=torch.bfloat16 if autocast else None)
    for result in workers(2).run(run_training, plugin, case):
        if autocast:
            assert result.losses == pytest.approx(expected.losses, abs=5e-2)
        else:
            assert result.largest_difference(expected) < 5e-6


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_item_weights_and_overflows_in_fp16(workers: Workers, stage: int) -> None:
    """Where the device has fp16: losses near those in fp32, and a scale that is the engine's."""
    case = Case(accumulation=4, weighted=True, accelerator={"mixed_precision": "fp16"})
    expected = reference(case, 2, autocast=torch.float16)
    for result in workers(2).run(run_training, {"zero_stage": stage}, case, fp16=True):
        assert result.losses == pytest.approx(expected.losses, abs=1e-2)
        assert differ(result.weights, expected.weights) < 2e-2
    ranks = workers(2).run(overflow, stage)
    assert ranks[0] == ranks[1]
    assert ranks[0] == {"skipped": [False, True, False], "steps": [1, 1, 2], "scales": [65536.0, 32768.0, 32768.0]}


def overflow(stage: int) -> dict[str, Any]:
    """On a rank: three steps, of which the second overflows on rank 1 alone."""
    allow_fp16()
    accelerator = make(zero_stage=stage, mixed_precision="fp16")
    inner = make_model()
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.01))
    found: dict[str, Any] = {"skipped": [], "steps": [], "scales": []}
    batch = rows(accelerator)
    for number in range(3):
        with accelerator.accumulate(model):
            factor = float("inf") if number == 1 and accelerator.process_index == 1 else 1.0
            accelerator.backward(cross_entropy(model(batch["x"]), batch["y"]) * factor)
            optimizer.step()
            optimizer.zero_grad()
        found["skipped"].append(accelerator.optimizer_step_was_skipped)
        found["steps"].append(accelerator.step)
        found["scales"].append(accelerator.backend.precision.state_dict()["scale"])
    accelerator.end_training()
    return found


def with_statistics(stage: int, precision: str) -> dict[str, Any]:
    """On a rank: a network with batch norms, the same rows on both ranks."""
    accelerator = make(zero_stage=stage, mixed_precision=precision)
    torch.manual_seed(0)
    inner = torch.nn.Sequential(
        torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.GELU(), torch.nn.Linear(8, 2)
    )
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    losses = []
    for _ in range(4):
        loss = cross_entropy(model(BATCH["x"]), BATCH["y"] % 2)
        losses.append(float(loss.detach()))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    found = {
        "losses": losses,
        "evaluated": float(model(BATCH["x"]).abs().sum()),
        "mean": inner[2].running_mean.clone(),
        "plain": "forward" in vars(accelerator.unwrap_model(model, keep_fp32_wrapper=False)[2]),
    }
    accelerator.end_training()
    return found


@pytest.mark.parametrize("stage", range(4))
def test_norms_with_statistics_in_bf16(workers: Workers, stage: int) -> None:
    """Statistics stay float32, as DeepSpeed leaves them, and parameters are bf16: kernels take no such pair."""
    exact, narrow = (workers(2).run(with_statistics, stage, precision)[0] for precision in ("no", "bf16"))
    assert narrow["losses"] == pytest.approx(exact["losses"], rel=0.02)
    assert narrow["evaluated"] == pytest.approx(exact["evaluated"], rel=0.05)
    assert narrow["mean"].dtype is torch.float32
    torch.testing.assert_close(narrow["mean"], exact["mean"], atol=0.02, rtol=0.05)
    assert not narrow["plain"]


# -- optimizers and schedulers of the configuration --------------------------------------------------------------------------

_DOCUMENT: dict[str, Any] = {
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_type": "linear"}},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def configured(stage: int, placeholder: bool) -> dict[str, Any]:
    """On a rank: four steps with an optimizer and a scheduler from the configuration."""
    document = {**copy.deepcopy(_DOCUMENT), "zero_optimization": {"stage": stage}}
    document["scheduler"]["params"]["warmup_max_lr"] = 0.02
    if not placeholder:
        document["scheduler"]["params"]["warmup_num_steps"] = 4
    accelerator = make(hf_ds_config=document, gradient_accumulation_steps=2)
    inner = make_model()
    loader: Any = torch.utils.data.DataLoader(make_data(64), batch_size=4)  # type: ignore[arg-type]
    optimizer: Any = DummyOptim(inner.parameters(), lr=0.02, weight_decay=0.1)
    scheduler: Any = DummyScheduler(optimizer, warmup_num_steps=4) if placeholder else None
    model, optimizer, scheduler, loader = accelerator.prepare(inner, optimizer, scheduler, loader)
    rates = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(batch["x"]), batch["y"]))
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
    facts = {"rates": rates, "class": type(optimizer.optimizer).__name__, "weights": weights(accelerator, model)}
    accelerator.end_training()
    return facts


@pytest.mark.parametrize("placeholder", [True, False])
def test_optimizer_and_scheduler_of_the_configuration(workers: Workers, placeholder: bool) -> None:
    """Placeholders say what "auto" stands for; the scheduler steps once per optimizer step, whoever steps it."""
    by_stage = [workers(2).run(configured, stage, placeholder) for stage in (0, 2, 3)]
    for results in by_stage:
        for facts in results:
            assert facts["class"] == "AdamW"
            assert facts["rates"] == by_stage[0][0]["rates"]
            assert facts["rates"][0::2] == facts["rates"][1::2], "the rate changed within a window"
            assert facts["rates"][::2] == [0.0, 0.0, 0.005, 0.01]  # DeepSpeed's own warm-up, which begins twice
            assert differ(facts["weights"], by_stage[0][0]["weights"]) < 1e-5


# -- one process, where no launcher set a variable ---------------------------------------------------------------------------


def refused(things: list[Any], plugin: dict[str, Any], error: type[Exception], words: str, **settings: Any) -> None:
    accelerator = make(**plugin, **settings)
    try:
        with pytest.raises(error, match=words):
            accelerator.prepare(*things)
    finally:
        accelerator.end_training()


def test_what_cannot_be_an_engine_is_refused() -> None:
    """Models without their optimizers, optimizers of several models, and what DeepSpeed gets wrong."""
    a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(a.parameters(), lr=0.1)
    refused([b, sgd], {}, NotPreparedError, "in this prepare")
    both = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
    refused([a, b, both], {}, UnsupportedError, "2 models")
    refused([a, sgd, torch.optim.SGD(a.parameters(), lr=0.1)], {}, UnsupportedError, "several optimizers")
    for section, words in (
        ({"tensor_parallel": {"autotp_size": 2}}, "autotp_size"),
        ({"zero_optimization": {"stage": 1, "overlap_comm": True}}, "overlap_comm"),
    ):
        document = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 1, **section}
        refused([a, sgd], {"hf_ds_config": document}, UnsupportedError, words)
    with pytest.raises(UnsupportedError, match="fp16"):
        make(mixed_precision="fp16")


def on_some_disk(here: str, free: int | None = None) -> str:
    """On a rank, which has a folder of its own as a machine would: what is said of the folder "swap" in it."""
    before, usage = Path.cwd(), shutil.disk_usage
    os.chdir(Path(here) / os.environ["RANK"])
    accelerator = make(zero_stage=3, offload_optimizer_device="nvme", offload_optimizer_nvme_path="swap")
    model = torch.nn.Linear(4, 4)
    try:
        if free is not None:
            shutil.disk_usage = lambda _: types.SimpleNamespace(free=free)  # type: ignore[assignment, misc]
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    except ConfigurationError as error:
        return str(error)
    finally:
        shutil.disk_usage = usage
        os.chdir(before)
        accelerator.end_training()
    return "nothing"


def test_a_disk_that_takes_nothing_is_refused_by_all(workers: Workers, tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    (tmp_path / "0" / "swap").mkdir()
    missing, again = workers(2).run(on_some_disk, str(tmp_path))
    assert missing == again
    assert missing.startswith("offload_optimizer_nvme_path='swap': there is no such folder. Make it")
    assert "(on rank 1; " in missing
    (tmp_path / "1" / "swap").touch()
    assert "is a file" in workers(2).run(on_some_disk, str(tmp_path))[0]
    (tmp_path / "1" / "swap").unlink()
    (tmp_path / "1" / "swap").mkdir()
    full = workers(2).run(
        on_some_disk, str(tmp_path), 3 * 4 * 20 - 1
    )  # 20 weights of AdamW, and its two moments of each
    assert len(set(full)) == 1
    assert "Make room, or choose another disk" in full[0]


def test_a_graph_is_run_once_at_stage_3() -> None:
    """Its parameters are gone after a backward."""
    accelerator = make(zero_stage=3)
    inner = make_model()
    model, _ = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    with pytest.raises(UnsupportedError, match="Add the losses up"):
        accelerator.backward(model(BATCH["x"]).mean(), retain_graph=True)
    accelerator.end_training()


def test_a_model_without_an_optimizer() -> None:
    """Is evaluated; its loss has no engine that could run backward."""
    for stage in (1, 3):
        accelerator = make(zero_stage=stage, mixed_precision="bf16")
        model = accelerator.prepare(make_model())
        out = model(BATCH["x"])
        assert out.dtype is torch.float32
        torch.testing.assert_close(out, make_model()(BATCH["x"]), atol=5e-2, rtol=5e-2)
        assert accelerator.get_state_dict(model)["0.weight"].shape == (16, 6)
        with pytest.raises(NotPreparedError, match="together with their optimizer"):
            accelerator.backward(out.mean())
        accelerator.end_training()


def test_clipping_that_contradicts_the_configuration() -> None:
    """One norm: the configuration's, or the script's. Parts of the parameters can't be clipped."""
    accelerator = make(zero_stage=2, gradient_clipping=0.5)
    inner = make_model()
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=1.0))
    before = weights(accelerator, model)
    accelerator.backward(cross_entropy(model(BATCH["x"]), BATCH["y"]) * 10)
    with pytest.raises(ConfigurationError, match=r"max_norm=1 .* gradient_clipping=0.5"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(UnsupportedError, match="all of them"):
        accelerator.clip_grad_norm_(next(iter(model.parameters())), 0.5)
    assert float(accelerator.clip_grad_norm_(model.parameters(), float("inf"))) > 0.5
    optimizer.step()
    moved = torch.cat([(before[n] - w).flatten() for n, w in weights(accelerator, model).items()])
    assert float(moved.norm()) == pytest.approx(
        0.5, rel=1e-4
    )  # the configuration's holds where the script doesn't clip
    accelerator.end_training()


def test_an_optimizer_that_comes_with_a_state() -> None:
    """It goes on: momentum is cut like the parameters."""
    for stage in range(4):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-2)
        plain_step(model, optimizer, cross_entropy(model(BATCH["x"]), BATCH["y"]))
        twin = copy.deepcopy(model)
        other = torch.optim.AdamW(twin.parameters(), lr=0.02, eps=1e-2)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        plain_step(twin, other, cross_entropy(twin(BATCH["x"]), BATCH["y"]))
        accelerator = make(zero_stage=stage)
        prepared, stepped = accelerator.prepare(model, optimizer)
        accelerator.backward(cross_entropy(prepared(BATCH["x"]), BATCH["y"]))
        stepped.step()
        assert differ(weights(accelerator, prepared), dict(twin.state_dict())) < 1e-6, stage
        accelerator.end_training()


def from_nothing(empty: bool) -> dict[str, torch.Tensor]:
    """On a rank: a model that is made whole, or without values, then trained for a step."""
    from drivetrain import init_empty_weights

    accelerator = make(zero_stage=3)
    torch.manual_seed(4)
    if empty:
        with init_empty_weights():
            inner: Any = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    else:
        inner = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    batch = rows(accelerator)
    accelerator.backward(cross_entropy(model(batch["x"]), batch["y"]))
    optimizer.step()
    result = weights(accelerator, model)
    accelerator.end_training()
    return result


def test_a_model_without_values_at_stage_3(workers: Workers) -> None:
    """Is filled module by module, and equals one that was made whole with the same seed."""
    whole_one, filled = workers(2).run(from_nothing, False), workers(2).run(from_nothing, True)
    for a, b in zip(whole_one, filled, strict=True):
        assert differ(a, b) < 1e-7


def own_format(stage: int, folder: str, load: bool) -> list[dict[str, torch.Tensor]]:
    """On a rank: the engine's own checkpoint after a step, or from it on; weights then, and after another step."""
    accelerator = make(zero_stage=stage)
    inner = make_model()
    model, optimizer = accelerator.prepare(inner, torch.optim.AdamW(inner.parameters(), lr=0.02, eps=1e-2))
    batch = rows(accelerator)
    found = []
    for step in range(2):
        if load and step == 0:
            model.load_checkpoint(folder)
        else:
            accelerator.backward(cross_entropy(model(batch["x"]), batch["y"]))
            optimizer.step()
            optimizer.zero_grad()
        if step == 0 and not load:
            model.save_checkpoint(folder)
        found.append(weights(accelerator, model))
    accelerator.end_training()
    return found


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_engines_own_checkpoints(workers: Workers, tmp_path: Any, stage: int) -> None:
    """The prepared model is DeepSpeed's engine: it writes and reads its own format, which DeepSpeed's tools read, too."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    saved = workers(2).run(own_format, stage, str(tmp_path), False)
    loaded = workers(2).run(own_format, stage, str(tmp_path), True)
    for ours, theirs in zip(loaded, saved, strict=True):
        assert differ(ours[0], theirs[0]) == 0
        assert differ(ours[1], theirs[1]) == 0
    assert differ(dict(get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))), saved[0][0]) == 0


def test_engines_leave_nothing_behind(ranks):
    """Neither themselves, nor process groups with their threads, nor a function in the place of torch's."""
    name = torch.nn.functional.linear.__name__

    def run():
        import gc

        from deepspeed import DeepSpeedEngine
        from torch.distributed.distributed_c10d import _world

        def engines():
            gc.collect()
            return sum(isinstance(o, DeepSpeedEngine) for o in gc.get_objects())

        found, before = [], engines()
        for stage in (1, 2, 3, 3):
            train(Case(), lambda **kw: Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage), **kw))
            found.append((engines() - before, len(_world.pg_map)))
            assert torch.nn.functional.linear.__name__ == name
        return found

    for found in ranks.run(run):
        assert [alive for alive, _ in found] == [0] * 4
        assert len({groups for _, groups in found}) == 1
