import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from drivetrain._builtin.jsonl import JSONL_SPEC
from drivetrain.errors import ConfigurationError
from drivetrain.tracking import TrackerHub, TrackingOptions, read_run
from drivetrain_tensorboard.plugin import SPEC

QUICK = TrackingOptions(interval=0.005)


def accumulate(directory):
    [run] = {path.parent for path in directory.rglob("events.out.tfevents.*")}
    return EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0, "images": 0}).Reload()


def points(events, name):
    return [(e.step, e.value) for e in events.Scalars(name)]


def text(event):
    return event.tensor_proto.string_val[0].decode()


def hub_with(directory, *specs):
    return TrackerHub.from_plan(specs or [SPEC], logging_dir=directory, options=QUICK)


def test_the_entry_module_imports_neither_torch_nor_tensorboard():
    code = "import sys, drivetrain_tensorboard.plugin; print({'torch', 'tensorboard'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def _train(directory):
    """Two ranks fit a line; every rank calls log on every step."""
    import os

    import torch.distributed as dist

    from drivetrain.specs import ProcessInfo

    rank = dist.get_rank()
    hub = TrackerHub.from_plan(
        [SPEC, JSONL_SPEC], process=ProcessInfo(rank=rank, world_size=dist.get_world_size()), logging_dir=directory
    )
    hub.start("line", {"optimizer": {"lr": 0.1}}, run_ids=None)
    generator = torch.Generator().manual_seed(rank)
    weight, losses = torch.zeros((), requires_grad=True), []
    for step in range(200):
        x = torch.randn(8, generator=generator)
        loss = ((weight * x - 3 * x) ** 2).mean()
        (gradient,) = torch.autograd.grad(loss, weight)
        dist.all_reduce(gradient)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        hub.log({"train/loss": mean, "train/weight": weight, "rank": rank}, step=step)
        losses.append((mean.item(), weight.item()))
        with torch.no_grad():
            weight -= 0.1 * gradient / dist.get_world_size()
        mean.zero_()
        if step == 100:
            assert hub.flush()
    hub.log_images({"sample": torch.full((3, 4, 4), 0.5)}, 200)
    hub.log_artifact(__import__("pathlib").Path(directory, "model.txt"), step=200)
    assert hub.finish()
    return losses, os.getpid()


def test_two_ranks_train_and_only_the_main_process_stores_each_value_once(ranks, tmp_path):
    (tmp_path / "model.txt").write_text("weights")
    (losses, _), (others, _) = ranks.run(_train, str(tmp_path))
    assert losses == others and abs(losses[-1][1] - 3) < 0.1
    run, events = read_run(tmp_path), accumulate(tmp_path / "line")
    assert run.series("train/loss") == [(s, loss) for s, (loss, _) in enumerate(losses)]
    assert run.series("train/weight") == [(s, weight) for s, (_, weight) in enumerate(losses)]
    assert run.series("rank") == [(s, 0) for s in range(200)]
    for name in ("train/loss", "train/weight"):
        assert points(events, name) == run.series(name)  # a float32 tensor's values are exact in both
    assert points(events, "rank") == [(s, 0.0) for s in range(200)]
    assert [e.step for e in events.Images("sample")] == [200] and len(run.find("images", "sample")) == 1
    assert run.find("artifact")[0].files[0].read_text() == "weights"
    assert [p.read_text() for p in tmp_path.rglob("artifacts/model.txt")] == ["weights", "weights"]
    assert not (tmp_path / "drivetrain-spool").exists()


def test_a_resumed_run_hides_what_was_logged_after_the_checkpoint(tmp_path):
    hub = hub_with(tmp_path, SPEC, JSONL_SPEC)
    hub.start("p")
    for step in range(10):
        hub.log({"loss": float(step)}, step=step)
    run_ids = hub.run_ids()
    hub.finish()
    again = hub_with(tmp_path, SPEC, JSONL_SPEC)
    again.start("p", run_ids=run_ids, resume_step=5)
    for step in range(6, 12):
        again.log({"loss": 100.0 + step}, step=step)
    again.finish()
    expected = [(s, float(s)) for s in range(6)] + [(s, 100.0 + s) for s in range(6, 12)]
    assert read_run(tmp_path).series("loss") == expected
    assert points(accumulate(tmp_path / "p"), "loss") == expected


def test_a_second_configuration_is_found_in_the_text(tmp_path):
    hub = hub_with(tmp_path)
    hub.start("p", {"lr": 0.1, "betas": (0.9, 0.99), "none": None})
    hub.log_config({"late": True})
    hub.finish()
    texts = [json.loads(text(e)) for e in accumulate(tmp_path).Tensors("config/text_summary")]
    assert texts == [{"lr": 0.1, "betas": "[0.9, 0.99]", "none": None}, {"late": True}]


def test_rows_without_a_step_follow_the_last_one(tmp_path):
    hub = hub_with(tmp_path)
    hub.start("p")
    for step in (None, None, 7, None):
        hub.log({"x": 1.0}, step=step)
    hub.finish()
    assert [step for step, _ in points(accumulate(tmp_path), "x")] == [0, 1, 7, 8]


def test_numbers_beyond_float32_are_kept_as_texts(tmp_path):
    hub = hub_with(tmp_path)
    hub.start("p")
    hub.log({"large": 1e300, "huge": 10**400, "inf": math.inf, "largest": 3.4e38}, step=1)
    hub.finish()
    events = accumulate(tmp_path)
    assert text(events.Tensors("large/text_summary")[0]) == "1e+300"
    assert int(text(events.Tensors("huge/text_summary")[0])) == 10**400
    assert points(events, "inf") == [(1, math.inf)] and points(events, "largest")[0][1] == pytest.approx(3.4e38)


def test_the_time_is_that_of_the_call_unless_given(tmp_path):
    hub = hub_with(tmp_path)
    hub.start("p")
    hub.log({"x": 1.0}, 1, {"tensorboard": {"walltime": 1000.0}})
    with pytest.raises(ConfigurationError, match="It knows walltime"):
        hub.log({"x": 1.0}, 1, {"tensorboard": {"wall_time": 1000.0}})
    hub.finish()
    assert [e.wall_time for e in accumulate(tmp_path).Scalars("x")] == [1000.0]


def test_options_name_the_run_and_unknown_ones_are_refused(tmp_path):
    for _ in range(2):
        hub = hub_with(tmp_path)
        hub.start("p", init_kwargs={"tensorboard": {"run_name": "mine", "filename_suffix": ".x"}})
        hub.log({"x": 1.0}, step=1)
        hub.finish()
    assert sorted(p.name for p in (tmp_path / "p").iterdir()) == ["mine", "mine~1"]
    assert any(p.name.endswith(".x") for p in (tmp_path / "p" / "mine").iterdir())
    with pytest.raises(ConfigurationError, match="Did you mean 'flush_secs'"):
        hub.start("p", init_kwargs={"tensorboard": {"flush_sec": 1}})
    with pytest.raises(ConfigurationError, match="max_queue"):
        hub.start("p", init_kwargs={"tensorboard": {"max_queue": "many"}})
    hub.start("p", init_kwargs={"tensorboard": {"log_dir": str(tmp_path / "here")}})
    hub.finish()
    assert list((tmp_path / "here").glob("events*"))


def test_the_summary_writer_is_at_hand_as_in_accelerate(tmp_path):
    hub = hub_with(tmp_path)
    hub.start("p")
    tracker = hub.get("tensorboard")
    assert tracker.writer is tracker.tracker is hub.get("tensorboard", unwrap=True)
    tracker.writer.add_images("direct", np.zeros((2, 4, 4, 3)), 1, dataformats="NHWC")
    tracker.log_images({"batch": np.zeros((2, 3, 4, 4))}, step=2, dataformats="NCHW")
    hub.finish()
    assert sorted(accumulate(tmp_path).Tags()["images"]) == ["batch/0", "batch/1", "direct"]


def test_nonfinite_values_of_a_histogram_are_counted(tmp_path):
    hub = hub_with(tmp_path)
    hub.start("p")
    hub.log_histogram("h", torch.tensor([1.0, 2.0, math.nan, math.inf]), 1)
    hub.log_histogram("none", torch.tensor([math.nan]), 1)
    hub.finish()
    events = accumulate(tmp_path)
    assert events.Histograms("h")[0].histogram_value.num == 2 and points(events, "h/nonfinite") == [(1, 2.0)]
    assert points(events, "none/count") == [(1, 1.0)]


def test_a_figure_of_plotly_becomes_an_artifact(tmp_path, caplog):
    class Plotly:  # what the hub knows of plotly: a figure that can't be drawn by savefig, but has to_html
        def to_html(self):
            return "<html>plot</html>"

    hub = hub_with(tmp_path)
    hub.start("p")
    hub.log_figure("curve", Plotly(), 1)
    hub.log_figure("curve", Plotly(), 2)
    hub.finish()
    files = sorted(tmp_path.rglob("artifacts/*.html"))
    assert [f.read_text() for f in files] == ["<html>plot</html>"] * 2
    assert len([r for r in caplog.records if "has no figures: artifacts are stored instead" in r.getMessage()]) == 1
