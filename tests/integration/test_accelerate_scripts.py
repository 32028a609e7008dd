"""Ten typical Accelerate scripts run after the word ``accelerate`` became ``drivetrain``, on one and two processes."""

import subprocess
import sys

import pytest

from .corpus import SCRIPTS, namespace, result_of, run_source, source
from .corpus_reference import expected

LIBRARY = "drivetrain"


def run(workers, name, processes, *arguments):
    """Run the script on live ranks; what rank 0 printed, the result of it, and that no other rank printed a result."""
    outputs = workers(processes).run(run_source, source(name, LIBRARY), name, ["--cpu", *map(str, arguments)])
    assert [result_of(output) for output in outputs[1:]] == [None] * (processes - 1)
    found = result_of(outputs[0])
    assert found is not None, outputs[0]
    return found


def check(name, processes, found, *, rel=2e-4):
    """Each value that plain PyTorch predicts is what the script found."""
    for key, value in expected(name, namespace(name, LIBRARY), processes, found).items():
        if isinstance(value, float) or (isinstance(value, list) and value and isinstance(value[0], float)):
            value = pytest.approx(value, rel=rel, abs=1e-6)
        assert found[key] == value, key


def test_there_are_ten_scripts():
    assert len(SCRIPTS) == 10
    assert all("import drivetrain" in source(n, LIBRARY) or "from drivetrain" in source(n, LIBRARY) for n in SCRIPTS)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        "distributed_inference",
        "early_stopping",
        "gan",
        "gradient_accumulation",
        "multi_process_metrics",
        "nlp_classification",
    ],
)
def test_script_equals_plain_pytorch(workers, name, processes):
    check(name, processes, run(workers, name, processes))


@pytest.mark.parametrize("processes", [1, 2])
def test_trainer_class(workers, tmp_path, processes):
    check("trainer_class", processes, run(workers, "trainer_class", processes, "--output_dir", tmp_path))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("precision", "rel"), [("no", 2e-4), ("bf16", 0.05), ("fp16", 0.01)])
def test_mixed_precision_options(workers, tmp_path, processes, precision, rel):
    name = "mixed_precision_options"
    found = run(workers, name, processes, "--project_dir", tmp_path, "--mixed_precision", precision)
    check(name, processes, found, rel=rel)
    assert found["mixed_precision"] == precision


@pytest.mark.parametrize("processes", [1, 2])
def test_resuming_inside_an_epoch_continues_the_same_run(workers, tmp_path, processes):
    name = "image_classification_resume"
    whole = run(workers, name, processes, "--checkpointing_steps", 29, "--output_dir", tmp_path)
    check(name, processes, whole)
    assert whole["accuracy"] > 0.9
    resumed = run(
        workers, name, processes, "--resume_from_checkpoint", tmp_path / "step_29", "--output_dir", tmp_path / "again"
    )
    assert resumed["first"] == 30
    assert resumed["losses"] == {step: loss for step, loss in whole["losses"].items() if int(step) > 29}
    assert resumed["accuracy"] == whole["accuracy"]


@pytest.mark.parametrize("processes", [1, 2])
def test_tracking(workers, tmp_path, processes):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    name = "experiment_tracking"
    found = run(workers, name, processes, "--with_tracking", "--project_dir", tmp_path)
    check(name, processes, found)
    history = found["history"]

    own = [result_of(line) for line in (tmp_path / "logs" / "mine.jsonl").read_text().splitlines()]
    assert own[0] == {"config": {"lr": 0.05, "num_epochs": 4, "cpu": True}}
    assert own[1:-1] == [{"step": e, "train_loss": loss, "epoch": e} for e, loss in enumerate(history)]
    assert own[-1] == {"step": 4, "final_loss": history[-1]}

    scalars, tags = {}, set()
    for folder in {path.parent for path in tmp_path.rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(folder)).Reload()
        tags.update(events.Tags()["tensors"])
        for tag in events.Tags()["scalars"]:
            scalars.setdefault(tag, []).extend((e.step, e.value) for e in events.Scalars(tag))
    assert scalars["train_loss"] == [(e, pytest.approx(loss, rel=1e-6)) for e, loss in enumerate(history)]
    assert scalars["final_loss"] == [(4, pytest.approx(history[-1], rel=1e-6))]
    assert any("note" in tag for tag in tags)
    assert run(workers, name, processes)["history"] == pytest.approx(history, rel=1e-6)


def test_a_script_through_the_launcher(tmp_path):
    name = "trainer_class"
    script = tmp_path / f"{name}.py"
    script.write_text(source(name, LIBRARY))
    command = [sys.executable, "-m", "drivetrain", "launch", "--cpu", "--num_processes", "2", str(script), "--cpu"]
    done = subprocess.run(
        [*command, "--output_dir", str(tmp_path / "runs")], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # A launcher may label each line with its rank.
    start = done.stdout.index('{"loss"')
    check(name, 2, result_of(done.stdout[start:].splitlines()[0]))
