"""The Accelerator as a script sees it, on one process and on two."""

import copy
import os
import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Accelerator, DataLoaderConfiguration, GradientAccumulationPlugin, GradScalerKwargs, PartialState
from drivetrain.errors import ConfigurationError, PluginNotFoundError
from drivetrain.state import AcceleratorState, DistributedType


def parts(lr=0.1):
    torch.manual_seed(0)  # three models in a hundred have no gradient at all
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return (
        model,
        optimizer,
        torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        DataLoader(torch.ones(6, 3), batch_size=2),
    )


def test_prepare_keeps_order_passes_others_through_and_is_idempotent():
    accelerator = Accelerator(cpu=True)
    model, optimizer, scheduler, loader = parts()
    note = object()
    results = accelerator.prepare(loader, note, scheduler, model, optimizer)
    assert results[1] is note
    assert accelerator.prepare(loader, note, scheduler, model, optimizer) == results
    assert accelerator.prepare(*results) == results
    assert accelerator.prepare(model, model) == (results[3], results[3])
    assert accelerator.prepare_model(model) is results[3]
    assert accelerator.prepare_optimizer(optimizer) is results[4]
    assert [len(v) for v in accelerator._objects.by_kind.values()] == [1, 1, 1, 1]
    assert isinstance(results[4], torch.optim.Optimizer)
    assert isinstance(results[0], DataLoader)


def test_prepare_refuses_what_does_not_fit():
    accelerator = Accelerator(cpu=True)
    model, optimizer, _, _ = parts()
    with pytest.raises(ConfigurationError, match="one entry for each of the 2 objects"):
        accelerator.prepare(model, optimizer, device_placement=[True])
    with pytest.raises(ConfigurationError, match="prepare_model got a SGD"):
        accelerator.prepare_model(optimizer)


def test_a_wrong_keyword_or_name_is_an_error_that_helps():
    with pytest.raises(TypeError, match="mixed_precision"):
        Accelerator(mixed_precison="bf16")
    with pytest.raises(PluginNotFoundError, match="single"):
        Accelerator(cpu=True, backend="singel")


def test_accelerators_with_different_settings_live_side_by_side():
    a = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=4)
    b = Accelerator(cpu=True)
    assert (a.mixed_precision, a.gradient_accumulation_steps) == ("bf16", 4)
    assert (b.mixed_precision, b.gradient_accumulation_steps) == ("no", 1)
    model = torch.nn.Linear(3, 3)
    wrapped = a.prepare(copy.deepcopy(model))
    plain = b.prepare(model)
    assert not torch.equal(wrapped(torch.ones(1, 3) / 3), plain(torch.ones(1, 3) / 3))


def test_constructing_and_preparing_changes_no_variable():
    before = dict(os.environ)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    accelerator.prepare(*parts())
    assert dict(os.environ) == before


def test_arguments_beat_the_environment(monkeypatch):
    monkeypatch.setenv("DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS", "7")
    monkeypatch.setenv("DRIVETRAIN_MIXED_PRECISION", "bf16")
    assert Accelerator(cpu=True, gradient_accumulation_steps=2).gradient_accumulation_steps == 2
    assert Accelerator(cpu=True, gradient_accumulation_steps=1).gradient_accumulation_steps == 1
    accelerator = Accelerator(cpu=True)
    assert accelerator.gradient_accumulation_steps == 7
    assert accelerator.mixed_precision == "bf16"
    assert "DRIVETRAIN_MIXED_PRECISION" in accelerator.explain()


def test_the_accumulation_plugin_and_split_batches_reach_their_places():
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False, adjust_scheduler=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, split_batches=True)
    assert accelerator.gradient_state.plugin_kwargs["num_steps"] == 3
    assert not accelerator.gradient_state.sync_with_dataloader
    assert accelerator.split_batches
    assert not DataLoaderConfiguration().split_batches


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # which is what was asked for here
def test_without_adjusting_the_scheduler_steps_with_each_micro_batch():
    plugin = GradientAccumulationPlugin(num_steps=3, adjust_scheduler=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model, optimizer, scheduler, loader = accelerator.prepare(*parts())
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            scheduler.step()
    assert accelerator.step == 1
    assert scheduler.get_last_lr() == [0.1 * 0.5**3]


def test_a_scheduler_made_of_the_prepared_optimizer_works():
    accelerator = Accelerator(cpu=True)
    model, optimizer, _, _ = parts()
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1.0 / (i + 1)))
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert scheduler.get_last_lr() == [pytest.approx(0.1 / 4)]


def test_state_shows_this_accelerator_and_plugins_options():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    state = accelerator.state
    assert (state.mixed_precision, state.num_processes, state.process_index) == ("bf16", 1, 0)
    assert state.distributed_type == DistributedType.NO == accelerator.distributed_type
    assert state.device == accelerator.device == PartialState(cpu=True).device
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        state.nonsense
    with pytest.raises(Exception, match=r"accelerator\.state"):
        AcceleratorState()


def test_unwrap_takes_off_what_was_put_on():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", dynamo_backend="eager")
    original = torch.nn.Linear(3, 3)
    model = accelerator.prepare(original)
    assert accelerator.unwrap_model(model) is original
    assert original(torch.ones(1, 3)).dtype == torch.float32
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    assert plain is original
    assert "forward" not in plain.__dict__
    assert plain._compiled_call_impl is None
    torch.testing.assert_close(pickle.loads(pickle.dumps(plain)).weight, plain.weight)


def test_a_deep_copy_of_a_model_in_mixed_precision_computes_with_its_own_weights():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(torch.nn.Linear(3, 3))
    average = copy.deepcopy(model)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    assert average(torch.ones(1, 3)).abs().sum() > 0
    assert torch.equal(model(torch.ones(1, 3)), torch.zeros(1, 3))


def test_fp16_skips_on_overflow_halves_the_scale_and_the_scheduler_waits():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model, optimizer, scheduler, _ = accelerator.prepare(*parts())
    weights = copy.deepcopy(model.state_dict())
    accelerator.backward(model(torch.full((1, 3), float("inf"))).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    assert accelerator.optimizer_step_was_skipped
    assert accelerator.step == 0
    assert scheduler.get_last_lr() == [0.1]
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
    accelerator.backward(model(torch.ones(1, 3)).sum())
    assert accelerator.scaler.get_scale() == 32768.0
    optimizer.step()
    scheduler.step()
    assert not accelerator.optimizer_step_was_skipped
    assert accelerator.step == 1
    assert scheduler.get_last_lr() == [0.05]


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_with_two_optimizers_of_one_window_shares_one_scale(fused):
    scaling = GradScalerKwargs(init_scale=1024.0)  # with more, the bias's gradient would overflow too
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[scaling])
    model = torch.nn.Linear(3, 3)
    first = torch.optim.AdamW([model.weight], lr=0.1, fused=fused)
    second = torch.optim.AdamW([model.bias], lr=0.1, fused=fused)
    model, first, second = accelerator.prepare(model, first, second)
    for value, skipped in ((float("inf"), True), (1.0, False)):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 3), value)).sum())
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
        # An infinite input makes the weight's gradient infinite; the bias's is finite.
        assert (first.step_was_skipped, second.step_was_skipped) == (skipped, False)
    accelerator.backend.end_window()
    assert accelerator.scaler.get_scale() == 512.0


def test_clipping_inside_a_window_waits_for_its_end():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, _, loader = accelerator.prepare(*parts())
    norms = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch * 100).pow(2).mean())
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            if accelerator.sync_gradients:
                assert float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])) <= 0.5001
            optimizer.step()
            optimizer.zero_grad()
    assert norms[0] == 0.0
    assert norms[1] > 0.5


def _two_ranks():
    accelerator = Accelerator()
    rank = accelerator.process_index
    model, optimizer, scheduler, loader = accelerator.prepare(*parts())
    gathered = accelerator.gather({"x": torch.tensor([rank]), "name": "same"})
    seen = []
    for batch in loader:
        seen.append(accelerator.gather_for_metrics(batch).shape[0])
    with accelerator.split_between_processes(list("abc")) as mine:
        part = mine
    accelerator.wait_for_everyone()
    return {
        "plan": accelerator.plan.backend.name,
        "type": str(accelerator.distributed_type),
        "gathered": gathered["x"].tolist(),
        "seen": seen,
        "part": part,
        "reduced": accelerator.reduce(torch.tensor(float(rank + 1)), reduction="mean").item(),
        "padded": accelerator.pad_across_processes(torch.ones(rank + 1)).tolist(),
        "objects": accelerator.gather_object([rank]),
        "broadcast": accelerator.broadcast(torch.tensor(rank), from_process=1).item(),
        "unwrapped": type(accelerator.unwrap_model(model)).__name__,
        "names": sorted(accelerator.get_state_dict(model))[0],
    }


def test_two_processes_use_ddp_and_agree(ranks):
    first, second = ranks.run(_two_ranks)
    assert first["plan"] == "ddp"
    assert first["type"] == "MULTI_CPU"
    assert first["gathered"] == second["gathered"] == [0, 1]
    assert sum(first["seen"]) == 6
    assert (first["part"], second["part"]) == (["a", "b"], ["c"])
    assert first["reduced"] == 1.5
    assert first["padded"] == [1.0, 0.0]
    assert first["objects"] == [0, 1]
    assert first["broadcast"] == 1
    assert first["unwrapped"] == "Sequential"
    assert first["names"] == "0.bias"


def test_ranks_with_different_settings_are_told(ranks):
    def mismatched():
        rank = int(os.environ["RANK"])
        try:
            Accelerator(gradient_accumulation_steps=1 + rank)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    for answer in ranks.run(mismatched):
        assert "RankMismatchError" in answer
        assert "gradient_accumulation_steps" in answer


def test_runs_of_trackers_go_on_after_a_resume(tmp_path):
    from drivetrain.tracking import read_run

    def train(resume):
        accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
        model, optimizer, _, _ = accelerator.prepare(*parts())
        if resume:
            accelerator.load_state(tmp_path / "saved")
        accelerator.init_trackers("demo")
        for _ in range(3):
            accelerator.backward(model(torch.ones(1, 3)).sum())
            optimizer.step()
            accelerator.log({"step": accelerator.step}, step=accelerator.step)
        if not resume:
            accelerator.save_state(tmp_path / "saved")
        accelerator.end_training()

    train(resume=False)
    train(resume=True)
    (run,) = (tmp_path / "demo").iterdir()
    assert [row.values["step"] for row in read_run(run).rows] == [1, 2, 3, 4, 5, 6]
