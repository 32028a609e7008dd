import json
import subprocess
from importlib import metadata

import pytest
import torch

from drivetrain import Accelerator
from drivetrain._engine.run_facts import git_facts
from drivetrain.config.handlers import GradScalerKwargs
from drivetrain.tracking import TrackingOptions, read_run


def train(accelerator, steps, groups=1):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD([{"params": parameters[i::groups], "lr": 0.1 * (i + 1)} for i in range(groups)])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    norms = []
    for _ in range(steps):
        loss = model(torch.ones(4, 2)).square().mean()
        accelerator.backward(loss)
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        accelerator.log_training({"loss": loss.detach()}, items=4)
        scheduler.step()
        optimizer.zero_grad()
    return norms


def test_a_helper_logs_how_training_goes(tmp_path):
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("p")
    norms = train(accelerator, 3)
    accelerator.log_training(step=10)
    accelerator.end_training()
    run = read_run(tmp_path)
    assert run.series("lr") == [(1, 0.1), (2, 0.05), (3, 0.025), (10, 0.0125)]
    assert run.series("grad_norm")[:3] == list(zip((1, 2, 3), norms, strict=True))
    assert [s for s, _ in run.series("steps_per_second")] == [2, 3, 10]
    for (_, steps), (_, items) in zip(run.series("steps_per_second"), run.series("items_per_second"), strict=False):
        assert items == pytest.approx(4 * steps)
    assert run.series("steps_per_second")[-1][1] == 0.0 and [s for s, _ in run.series("loss")] == [1, 2, 3]
    assert "loss_scale" not in run.names and not [n for n in run.names if n.startswith("memory/")]
    assert not run.config and not run.media


def test_learning_rates_of_several_groups_and_the_loss_scale(tmp_path):
    scaling = GradScalerKwargs(init_scale=1024.0)
    accelerator = Accelerator(
        cpu=True, log_with="jsonl", project_dir=tmp_path, mixed_precision="fp16", kwargs_handlers=[scaling]
    )
    accelerator.init_trackers("p")
    train(accelerator, 1, groups=2)
    accelerator.end_training()
    run = read_run(tmp_path)
    assert run.series("lr/0") == [(1, 0.1)] and run.series("lr/1") == [(1, 0.2)]
    assert run.series("loss_scale") == [(1, 1024.0)]


def test_one_switch_logs_what_the_run_is(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_SECRET_TOKEN", "sesame-open")
    facts = TrackingOptions(run_facts=True)
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=tmp_path, kwargs_handlers=[facts])
    accelerator.init_trackers("p", {"lr": 0.1})
    train(accelerator, 2)
    path = accelerator.save_state(tmp_path / "saved")
    accelerator.load_state(path)
    explained = accelerator.explain()
    accelerator.end_training()
    run = read_run(tmp_path / "p")
    assert run.config["lr"] == 0.1 and run.config["drivetrain/settings/mixed_precision"] == "no"
    assert run.config["drivetrain/chosen/backend"] == "single" and run.config["drivetrain/num_processes"] == 1
    assert run.config["drivetrain/packages/torch"] == metadata.version("torch")
    texts = {m.name: (m.step, m.data) for m in run.find("text")}
    assert "precision" in texts["drivetrain/explain"][1] and "Chosen" in explained
    assert "python" in texts["drivetrain/environment"][1] and "sesame-open" not in json.dumps(run.config) + str(texts)
    assert [v for _, v in run.series("checkpoint/path")] == [path] and [
        v for _, v in run.series("checkpoint/step")
    ] == [2]
    steps = [step for step, rss in run.series("memory/process_rss") if rss > 0]
    assert steps == [1, 2, 2, 2]  # with each log_training, at the checkpoint, at its loading


def test_the_commit_is_that_of_the_repository(tmp_path):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    git("init", "-q", "-b", "trunk")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    git("remote", "add", "origin", "https://me:sesame@host/repo.git")
    expected = {
        "commit": git("rev-parse", "HEAD").strip(),
        "branch": "trunk",
        "remote": "https://(left out)@host/repo.git",
    }
    assert git_facts(tmp_path) == {**expected, "changed": False}
    (tmp_path / "file").write_text("2")
    assert git_facts(tmp_path)["changed"] is True
