"""One training on two processes with six trackers, all offline: what each system wrote is read back and equals what was logged, once."""

import importlib.util
import math
import pathlib

import numpy as np
import pytest
import torch
from tests.quiet_trackers import QUIET_COMET, QUIET_WANDB

from drivetrain.testing.tracker import StoredRun
from drivetrain.tracking import read_run

PLUGINS = pathlib.Path(__file__).parents[2] / "plugins"
STEPS = 40

INIT_KWARGS = {
    "wandb": {"mode": "offline", "settings": QUIET_WANDB},
    "comet_ml": {"mode": "offline", "display_summary_level": 0, **QUIET_COMET},
    "mlflow": {"run_name": "two"},
}


def load(plugin, name):
    """A module of a plugin's tests: how to read back what its system wrote."""
    pytest.importorskip(f"drivetrain_{plugin}")
    spec = importlib.util.spec_from_file_location(name, PLUGINS / plugin / "tests" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _train(directory):
    """Every rank calls everything; returns what each step's values were."""
    import os

    os.environ.update(MLFLOW_DISABLE_TELEMETRY="true", COMET_DISABLE_AUTO_LOGGING="1", WANDB_SILENT="true")
    from drivetrain import Accelerator

    names = ["jsonl", "tensorboard", "wandb", "mlflow", "comet_ml", "neptune"]
    accelerator = Accelerator(cpu=True, log_with=names, project_dir=directory)
    accelerator.init_trackers("two ranks", {"optimizer": {"lr": 0.1}, "note": "x" * 7000}, INIT_KWARGS)
    rank = accelerator.process_index
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    generator = torch.Generator().manual_seed(rank)
    values = []
    for step in range(STEPS):
        count = 2 + (step + rank) % 3  # items differ between ranks
        x = torch.randn(count, 1, generator=generator)
        loss = (model(x) - 3 * x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"train/loss": loss.detach()}, step=step, reduce="mean", weight=count)
        weight = accelerator.unwrap_model(model).weight.detach()
        accelerator.log({"weight": weight, "rank": rank, "nan": math.nan}, step=step)
        values.append((loss.item(), count, weight.item()))
        if step == 20:
            accelerator.save_state(pathlib.Path(directory, "saved"))
    accelerator.log_images({"sample": np.arange(1, 49, dtype=np.uint8).reshape(4, 4, 3)}, step=STEPS)
    accelerator.log_table("scores", ["name", "score"], [["a", 0.5], ["b", 2]], step=STEPS)
    file = pathlib.Path(directory, "model.bin")
    if rank == 0:
        file.write_bytes(b"weights")
    accelerator.wait_for_everyone()
    accelerator.log_artifact(file, step=STEPS)
    accelerator.end_training()
    return values


@pytest.fixture(scope="module")
def trained(workers, tmp_path_factory):
    """The directory of the runs, and the values that must be in them."""
    pytest.importorskip("drivetrain_ddp")
    for plugin in ("tensorboard", "wandb", "mlflow", "comet", "neptune"):
        pytest.importorskip(f"drivetrain_{plugin}")
    directory = tmp_path_factory.mktemp("two-ranks")
    first, second = workers(2, {"DRIVETRAIN_TEST_POOL": "trackers"}).run(_train, str(directory))
    assert [w for *_, w in first] == [w for *_, w in second]
    losses = [(a * n + b * m) / (n + m) for (a, n, _), (b, m, _) in zip(first, second, strict=True)]
    return directory, {
        "train/loss": losses,
        "weight": [w for *_, w in first],
        "rank": [0] * STEPS,
        "nan": [math.nan] * STEPS,
    }


def jsonl(directory):
    run = read_run(directory / "two ranks".replace(" ", "%20"))
    [table] = run.find("table")
    return StoredRun(
        scalars={name: run.series(name) for name in run.names},
        config=run.config,
        images={
            m.name: [(m.step, load("tensorboard", "test_tracker_conformance_tensorboard").read_image(m.files[0]))]
            for m in run.find("images")
        },
        tables={"scores": (table.data["columns"], table.data["rows"])},
        artifacts={m.name: m.files[0].read_bytes() for m in run.find("artifact")},
    )


READERS = {
    "jsonl": jsonl,
    "tensorboard": lambda d: load("tensorboard", "test_tracker_conformance_tensorboard").read(d),
    "wandb": lambda d: load("wandb", "test_tracker_conformance_wandb").read_runs(d),
    "mlflow": lambda d: load("mlflow", "mlflow_reader").read(f"sqlite:///{d}/mlflow.db"),
    "comet": lambda d: load("comet", "comet_reader").read(d)[0],
    "neptune": lambda d: load("neptune", "neptune_reader").read(d),
}


@pytest.mark.parametrize("system", READERS)
def test_each_system_has_what_was_logged_once_from_the_main_process(trained, system):
    directory, expected = trained
    stored = READERS[system](directory)
    tolerance = 1e-6 if system == "tensorboard" else 1e-12
    for name, values in expected.items():
        points = stored.scalars[name]
        assert [step for step, _ in points] == list(range(STEPS)), name
        assert [float(value) for _, value in points] == pytest.approx(values, rel=tolerance, nan_ok=True), name
    assert float(stored.config["optimizer/lr"]) == 0.1 and stored.config["note"] == "x" * 7000
    [(step, image)] = stored.images["sample"]
    assert step == STEPS and np.array_equal(image[..., :3], np.arange(1, 49, dtype=np.uint8).reshape(4, 4, 3))
    if system == "tensorboard":  # has no tables: the text of one
        assert [step for step, text in stored.texts["scores"] if "| b | 2 |" in text] == [STEPS]
    else:
        assert stored.tables["scores"] == (["name", "score"], [["a", 0.5], ["b", 2]])
    assert stored.artifacts["model.bin"] == b"weights"
    assert not list(directory.rglob("drivetrain-spool"))
