"""What a training script writes: checkpoints every so many steps, a last one before a stop, and going on from the newest."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.checkpoint import Keep, Manifest
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.specs import Capability
from drivetrain.testing.launching import marked_processes
from drivetrain.tracking import TrackingOptions, read_run


def build(folder, **settings):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, project_dir=folder, **settings)
    data = torch.utils.data.TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    return (accelerator, *accelerator.prepare(model, optimizer, scheduler, loader))


def script(folder, epochs=2, *, ask=None, at=None, **settings):
    """The loop of the documentation. Losses of micro-batches, and the weights at the end."""
    every, keep = settings.pop("every", 5), settings.pop("keep", 2)
    accelerator, model, optimizer, scheduler, loader = build(folder, **settings)
    losses = []
    for _ in accelerator.epochs(epochs):
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if ask is not None and accelerator.step >= at:
                if accelerator.step == at and accelerator.sync_gradients:
                    ask(accelerator)
                time.sleep(0.05)  # ranks hear of each other twice a second
            accelerator.checkpoint(every=every, keep=keep)
            if accelerator.should_stop:
                break
    accelerator._finish_checkpoints()
    accelerator._stopper.close()
    return losses, [p.detach().clone() for p in accelerator.unwrap_model(model).parameters()], accelerator.step


def names(folder):
    return sorted(p.name for p in (Path(folder) / "checkpoints").iterdir())


def steps(folder):
    return sorted(Manifest.read(p).counters["step"] for p in (Path(folder) / "checkpoints").iterdir())


def ask_by_signal(accelerator):
    if accelerator.is_last_process:
        os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_stopped_script_goes_on_where_it_was(workers, tmp_path, size, accumulation):
    run = workers(size).run if size > 1 else lambda f, *a, **k: [f(*a, **k)]
    settings = {"gradient_accumulation_steps": accumulation, "epochs": 12 if size > 1 else 6, "resume": "auto"}
    whole = run(script, tmp_path / "whole", **settings)
    first = run(script, tmp_path / "parts", ask=ask_by_signal, at=6, **settings)
    stopped = first[0][2]
    assert steps(tmp_path / "parts")[-1] == stopped < whole[0][2]
    second = run(script, tmp_path / "parts", **settings)
    for rank in range(size):
        assert first[rank][0] + second[rank][0] == whole[rank][0]
        assert all(torch.equal(a, b) for a, b in zip(second[rank][1], whole[rank][1], strict=True))
    # A third time there is nothing left to do.
    assert run(script, tmp_path / "parts", **settings)[0][0] == []


def test_checkpoints_come_at_step_boundaries_and_the_rule_decides_which_stay(tmp_path):
    script(tmp_path / "a", every=5, keep=2)
    assert names(tmp_path / "a") == ["checkpoint_3", "checkpoint_4"]
    assert steps(tmp_path / "a") == [20, 24]
    script(tmp_path / "b", every=2, keep=3, gradient_accumulation_steps=3)
    assert steps(tmp_path / "b") == [4, 6, 8]
    script(tmp_path / "c", every=3, keep=Keep(last=1, every=9))
    assert steps(tmp_path / "c") == [9, 18, 24]


def test_the_best_by_a_metric_stays_with_the_newest(tmp_path):
    accelerator, model, optimizer, *_ = build(tmp_path)
    for value in (3.0, 1.0, 2.0, float("nan")):
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
        path = accelerator.checkpoint(
            metrics={"loss": torch.tensor(value)} if value == value else {"loss": value},
            keep=Keep(best=1, metric="loss"),
        )
        assert accelerator.checkpoint() is None  # nothing new to save
        accelerator.wait_for_checkpoint()
    assert steps(tmp_path) == [2, 4]
    assert Path(path).name == "checkpoint_3"
    accelerator.end_training()


def test_without_a_project_or_with_nonsense_the_call_says_what_to_give(tmp_path):
    with pytest.raises(ConfigurationError, match=r"give Accelerator\(project_dir"):
        Accelerator(cpu=True).checkpoint()
    accelerator = Accelerator(cpu=True, project_dir=tmp_path)
    with pytest.raises(ConfigurationError, match="at least 1; it is 0"):
        accelerator.checkpoint(every=0)
    with pytest.raises(ConfigurationError, match="last must be at least 1"):
        accelerator.checkpoint(keep=0)


def test_resume_that_nothing_loads_is_an_error_at_the_first_backward(tmp_path):
    accelerator, model, *_ = build(tmp_path, resume="auto")
    with pytest.raises(ConfigurationError, match=r"resume='auto' is loaded .* in accelerator.epochs"):
        accelerator.backward(model(torch.ones(1, 4)).sum())
    assert accelerator.resume() is None
    accelerator.backward(model(torch.ones(1, 4)).sum())


def test_resume_takes_a_path_and_the_environment(tmp_path, monkeypatch, capsys):
    script(tmp_path, every=5, keep=None)
    path = tmp_path / "checkpoints" / "checkpoint_1"
    accelerator, *_ = build(tmp_path, resume=path)
    assert next(accelerator.epochs(2)) == 0
    assert accelerator.step == 10
    assert f"Going on from {path}: step 10, epoch 0." in capsys.readouterr().err
    monkeypatch.setenv("DRIVETRAIN_RESUME", "auto")
    accelerator, *_ = build(tmp_path)
    assert accelerator.resume() == str(tmp_path / "checkpoints" / "checkpoint_4")
    assert accelerator.resume() is None
    monkeypatch.undo()
    accelerator, *_ = build(tmp_path, resume=tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="nowhere is no whole checkpoint: it doesn't exist"):
        accelerator.resume()


def test_auto_skips_a_damaged_checkpoint(tmp_path):
    script(tmp_path, every=5, keep=3)
    newest = tmp_path / "checkpoints" / "checkpoint_4"
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    accelerator, *_ = build(tmp_path, resume="auto")
    with pytest.warns(UserWarning, match="Skipping .*checkpoint_4"):
        assert accelerator.resume() == str(newest.with_name("checkpoint_3"))


def failing_script(folder):
    accelerator, model, optimizer, _, _ = build(folder)

    def hook(models, weights, output_dir):
        if accelerator.is_main_process:
            Path(output_dir, "link").symlink_to("/nowhere")

    accelerator.register_save_state_pre_hook(hook)
    try:
        for _ in range(3000):
            accelerator.backward(model(torch.ones(1, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.checkpoint(every=1000)
    except CheckpointError as error:
        return accelerator.step, str(error)
    finally:
        accelerator._stopper.close()


def test_a_failure_in_the_background_shows_in_the_loop_on_all_ranks_at_one_step(ranks, tmp_path):
    answers = ranks.run(failing_script, tmp_path)
    assert {step for step, _ in answers} == {answers[0][0]}
    assert answers[0][0] > 1000
    assert all("a hook wrote link" in text for _, text in answers)
    assert names(tmp_path) == []


def missing(folder):
    accelerator, *_ = build(folder)
    started = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(folder / "nowhere")
    accelerator._finish_checkpoints()
    return str(caught.value), time.monotonic() - started


def test_a_checkpoint_that_does_not_exist_is_one_clear_error_at_once_on_all_ranks(ranks, tmp_path):
    for text, seconds in ranks.run(missing, tmp_path):
        assert "nowhere is no whole checkpoint: it doesn't exist" in text
        assert "shared" not in text
        assert seconds < 25  # the time that a late file system gets


# -- windows that can't be saved -------------------------------------------------------------------------------------------


def without_mid_window_state(accelerator):
    spec = accelerator.backend.spec
    kept = spec.capabilities - {Capability.MID_WINDOW_STATE}
    accelerator.backend.spec = dataclasses.replace(spec, capabilities=kept)


@pytest.mark.parametrize("with_loader", [True, False])
def test_a_save_inside_a_window_that_the_backend_cannot_give_is_made_at_its_end(tmp_path, with_loader):
    def run(save_at=None, resume=False):
        accelerator, model, optimizer, scheduler, loader = build(tmp_path, gradient_accumulation_steps=3)
        without_mid_window_state(accelerator)
        if resume:
            accelerator.load_state(tmp_path / "c")
        batches = loader if with_loader else [(torch.full((2, 4), float(i)),) for i in range(3 * accelerator.step, 12)]
        losses, made = [], []
        for i, (x,) in enumerate(batches):
            with accelerator.accumulate(model):
                loss = model(x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if i == save_at:
                with pytest.warns(UserWarning, match="is made when the window ends"):
                    assert accelerator.save_state(tmp_path / "c") == str(tmp_path / "c")
                assert accelerator.wait_for_checkpoint() is None
            losses.append(loss.item())
            made.append((tmp_path / "c").exists())
        accelerator._finish_checkpoints()
        return losses, made

    losses, made = run(save_at=3)
    # The save comes when the loop's body is done with the window's last batch: it is seen one batch later.
    assert made.index(True) == 6
    assert run(resume=True)[0] == losses[6:]


def test_a_deferred_save_whose_window_never_ends_is_told(tmp_path):
    accelerator, model, optimizer, *_ = build(tmp_path, gradient_accumulation_steps=3)
    without_mid_window_state(accelerator)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 4)).sum())
        optimizer.step()
    with pytest.warns(UserWarning, match="when the window ends"):
        accelerator.save_state(tmp_path / "c")
    with pytest.warns(UserWarning, match="that was to be made at its end wasn't"):
        accelerator.end_training()
    assert not (tmp_path / "c").exists()


# -- trackers --------------------------------------------------------------------------------------------------------------


def test_trackers_hear_of_each_checkpoint_and_their_runs_go_on(tmp_path):
    def run(**settings):
        facts = [TrackingOptions(run_facts=True)]
        accelerator, model, optimizer, *_ = build(
            tmp_path, log_with="jsonl", resume="auto", kwargs_handlers=facts, **settings
        )
        accelerator.init_trackers("demo")
        directory = accelerator.get_tracker("jsonl", unwrap=True)
        for _ in accelerator.epochs(accelerator.step + 1):
            accelerator.backward(model(torch.ones(1, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": float(accelerator.step)}, step=accelerator.step)
            accelerator.checkpoint(metrics={"accuracy": 0.5})
        if not settings:
            accelerator.log(
                {"loss": -1.0}, step=accelerator.step + 1
            )  # after the last checkpoint: void for who goes on
        accelerator.end_training()
        return directory

    directory = run()
    told = read_run(directory)
    path = tmp_path / "checkpoints" / "checkpoint_0"
    assert [v for _, v in told.series("checkpoint/path")] == [str(path)]
    assert [v for _, v in told.series("checkpoint/step")] == [1]
    assert [v for _, v in told.series("checkpoint/bytes")] == [Manifest.read(path).size]
    assert [v for _, v in told.series("checkpoint/accuracy")] == [0.5]
    assert all(v > 0 for _, v in told.series("checkpoint/seconds"))


# -- a job that is preempted -----------------------------------------------------------------------------------------------

TRAIN = """
import sys, time, torch
from drivetrain import Accelerator
from drivetrain.utils import set_seed

set_seed(0)
accelerator = Accelerator(cpu=True, project_dir=sys.argv[1], resume="auto", log_with="jsonl")
accelerator.init_trackers("job")
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.randn(40, 2, generator=torch.Generator().manual_seed(1)))
loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1), loader)
for epoch in accelerator.epochs(int(sys.argv[2])):
    for (x,) in loader:
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss}, step=accelerator.step)
        accelerator.checkpoint(every=10_000, keep=2)
        if accelerator.should_stop:
            break
        if accelerator.step == 7 and len(sys.argv) > 3:
            print("ready", flush=True)
        time.sleep(float(sys.argv[3]) if len(sys.argv) > 3 else 0)
weights = [round(float(v), 7) for p in model.parameters() for v in p.flatten()]
print("ended", accelerator.step, accelerator.should_stop, weights, flush=True)
accelerator.end_training()
"""


def test_a_preempted_job_saves_within_the_grace_period_and_goes_on(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)

    def launch(*arguments):
        command = [
            sys.executable,
            "-m",
            "drivetrain",
            "launch",
            "--cpu",
            "--num-processes",
            "2",
            tmp_path / "train.py",
            *arguments,
        ]
        env = {**os.environ, "MARK": f"script-{tmp_path.name}", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
        )

    job = launch(tmp_path / "run", 4, 0.05)
    assert "ready" in job.stdout.readline()
    job.send_signal(signal.SIGTERM)
    out, err = job.communicate(timeout=60)
    stopped = int(re.search(r"ended (\d+) True", out)[1])
    assert 7 <= stopped < 40
    assert steps(tmp_path / "run") == [stopped]
    out, err = launch(tmp_path / "run", 4).communicate(timeout=60)
    assert f"step {stopped}" in err
    straight, _ = launch(tmp_path / "straight", 4).communicate(timeout=60)
    ended = re.search(r"ended 40 False (\[.*\])", out)
    assert ended and ended[1] in straight
    runs = [p.parent for p in (tmp_path / "run").rglob("metrics.jsonl")]
    assert len(runs) == 1  # the tracker's run went on, too
    assert [s for s, _ in read_run(runs[0]).series("loss")] == list(range(1, 41))
    assert marked_processes(f"script-{tmp_path.name}", within=5) == []


def test_a_run_that_ends_before_a_save_is_due_saves_its_end_and_warns_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses, _, step = script(tmp_path, every=10_000)
    assert step == len(losses) == 24
    assert steps(tmp_path) == [24]
