"""What docs/migrating-from-accelerate.md says of Drivetrain, on two live ranks."""

from __future__ import annotations

import os

import pytest
import torch

from drivetrain import Accelerator, AcceleratorState, DataLoaderConfiguration, ProjectConfiguration
from drivetrain.errors import ConfigurationError, DrivetrainError, PluginNotFoundError
from drivetrain.tracking import GeneralTracker, read_run
from drivetrain.utils import gather_object, reduce


def parts(accelerator):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    return accelerator.prepare(model, optimizer, scheduler)


def test_schedulers_step_once_per_optimizer_step(ranks):
    def run():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model, optimizer, scheduler = parts(accelerator)
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).mean())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return accelerator.step, scheduler.get_last_lr()

    assert ranks.run(run) == [(2, [0.1 / 4])] * 2


def test_no_sample_counts_twice(ranks):
    def run(even):
        config = DataLoaderConfiguration(even_batches=even)
        loader = Accelerator(cpu=True, dataloader_config=config).prepare(
            torch.utils.data.DataLoader(range(7), batch_size=2)
        )
        return [b.tolist() for b in loader]

    assert ranks.run(run, True) == [[[0, 1], [4, 5]], [[2, 3], [6]]]
    assert ranks.run(run, "repeat") == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]


def test_clipping_inside_a_window_clips_nothing():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, _, _ = parts(accelerator)
    norms = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).mean() * 100)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
    assert norms == [0.0, pytest.approx(100 * 2**0.5)]


def test_accelerators_do_not_share_state():
    first = Accelerator(cpu=True, gradient_accumulation_steps=4, mixed_precision="bf16")
    second = Accelerator(cpu=True)
    assert (first.gradient_accumulation_steps, first.mixed_precision) == (4, "bf16")
    assert (second.gradient_accumulation_steps, second.mixed_precision) == (1, "no")
    with pytest.raises(DrivetrainError, match=r"accelerator\.state"):
        AcceleratorState()


def test_arguments_beat_variables_and_constructors_write_none(monkeypatch):
    monkeypatch.setenv("DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS", "7")
    before = dict(os.environ)
    assert Accelerator(cpu=True, gradient_accumulation_steps=2).gradient_accumulation_steps == 2
    assert Accelerator(cpu=True).gradient_accumulation_steps == 7
    assert dict(os.environ) == before


def test_variables_of_accelerate_are_named(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.warns(UserWarning, match=r"ACCELERATE_MIXED_PRECISION \(use DRIVETRAIN_MIXED_PRECISION\)"):
        assert Accelerator(cpu=True).mixed_precision == "no"


def test_collectives(ranks):
    def run():
        accelerator = Accelerator(cpu=True)
        rank = accelerator.process_index
        with accelerator.split_between_processes([1, 2, 3], apply_padding=True) as part:
            pass
        kept = torch.tensor([1.0])
        reduce(kept)
        return {
            "scaled": accelerator.reduce(torch.tensor([1.0]), scale=3.0).tolist(),
            # Added up in half precision, the sum would be infinite.
            "half": reduce(torch.tensor(60000.0, dtype=torch.float16), "sum", 0.5).item(),
            "mean of integers": reduce(torch.tensor([1, 2][rank])).item(),
            "kept": kept.tolist(),
            "uneven": accelerator.gather(torch.full((1 + rank,), rank)).tolist(),
            "objects": gather_object({"rank": rank}),
            "padded": part,
        }

    first, second = ranks.run(run)
    assert (first.pop("padded"), second.pop("padded")) == ([1, 2], [3, 3])
    assert first == second == {
        "scaled": [6.0],
        "half": 60000.0,
        "mean of integers": 1.5,
        "kept": [1.0],
        "uneven": [0, 1, 1],
        "objects": [{"rank": 0}, {"rank": 1}],
    }  # fmt: skip


def test_on_process_needs_an_index():
    with pytest.raises(ConfigurationError, match="process_index"):
        Accelerator(cpu=True).on_process(print)


def test_load_state_takes_the_newest_whole_checkpoint_and_saving_goes_on_after_it(tmp_path):
    def build():
        project = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True)
        accelerator = Accelerator(cpu=True, project_config=project)
        parts(accelerator)
        return accelerator

    whole = build().save_state()
    (tmp_path / "checkpoints" / "checkpoint_1").mkdir()
    again = build()
    with pytest.warns(UserWarning, match="Skipping .*checkpoint_1"):
        assert again.load_state() == whole
    assert again.save_state().endswith("checkpoint_2")
    files = [p.suffix for p in (tmp_path / "checkpoints" / "checkpoint_2").iterdir()]
    assert set(files) == {".json", ".safetensors"}


def test_trackers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PluginNotFoundError, match="nosuch"):
        Accelerator(cpu=True, log_with="nosuch", project_dir=tmp_path)
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("demo")
    accelerator.log({"loss": torch.tensor(0.5), "nested": {"value": 1}})
    accelerator.end_training()
    (about,) = (tmp_path / "runs" / "demo").glob("*/run.json")
    assert read_run(about.parent).rows[0].values == {"loss": 0.5, "nested/value": 1}


def test_a_tracker_for_every_process_runs_on_every_process(ranks):
    def run():
        class Everywhere(GeneralTracker):
            name = "everywhere"
            requires_logging_directory = False
            main_process_only = False
            tracker = None

            def __init__(self):
                super().__init__()
                self.rows = []

            def log(self, values, step=None, **kwargs):
                self.rows.append(values)

        tracker = Everywhere()
        accelerator = Accelerator(cpu=True, log_with=tracker)
        accelerator.init_trackers("demo")
        accelerator.log({"rank": accelerator.process_index})
        accelerator.end_training()
        return tracker.rows

    assert ranks.run(run) == [[{"rank": 0}], [{"rank": 1}]]
