"""What tracking costs the training thread: microseconds per ``log`` of ten scalars, against the system's own library called by hand.

Run it with ``python -m tests.benchmarks.bench_tracking``. Prints one table, and steps per second with trackers on and off.
"""

import argparse
import importlib
import importlib.util
import json
import logging
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tests.quiet_trackers import QUIET_COMET, QUIET_WANDB

from drivetrain._builtin.jsonl import JSONL_SPEC
from drivetrain.tracking import TrackerHub

NAMES = [f"train/metric_{i}" for i in range(10)]


def values_of(kind):
    make = {
        "Python floats": lambda i: i * 0.37,
        "CPU tensors": lambda i: torch.tensor(i * 0.37),
        "bf16 tensors": lambda i: torch.tensor(i * 0.37, dtype=torch.bfloat16),
        "NumPy scalars": lambda i: np.float32(i * 0.37),
    }[kind]
    return {name: make(i) for i, name in enumerate(NAMES)}


KINDS = ("Python floats", "CPU tensors", "bf16 tensors", "NumPy scalars")


def cost(log, rows, count):
    """Median and 99th percentile of one call, in microseconds, at about the pace of training."""
    times = []
    limit = time.perf_counter() + 2.0  # enough calls of what takes milliseconds
    for step in range(count):
        if time.perf_counter() > limit:
            break
        start = time.perf_counter_ns()
        log(rows, step)
        times.append(time.perf_counter_ns() - start)
        if step % 10 == 0:
            time.sleep(0.001)
    times.sort()
    return statistics.median(times) / 1000, times[int(0.99 * len(times))] / 1000


INIT_KWARGS = {
    "wandb": {"mode": "offline", "settings": QUIET_WANDB},
    "comet": {"mode": "offline", "display_summary_level": 0, **QUIET_COMET},
}
PLUGINS = ("tensorboard", "wandb", "mlflow", "comet", "neptune")


def spec_of(name):
    """The tracker's descriptor; None if its plugin isn't installed."""
    if name == "jsonl":
        return JSONL_SPEC
    if importlib.util.find_spec(f"drivetrain_{name}") is None:
        return None
    return importlib.import_module(f"drivetrain_{name}.plugin").SPEC


def hub_for(*specs):
    hub = TrackerHub.from_plan(specs, logging_dir=tempfile.mkdtemp())
    hub.start("bench", init_kwargs={s.name: INIT_KWARGS[s.name] for s in specs if s.name in INIT_KWARGS})
    return hub


def by_hand_jsonl():
    file = Path(tempfile.mkdtemp(), "rows.jsonl").open("a")  # noqa: SIM115

    def log(rows, step):
        file.write(json.dumps({"step": step, **{k: float(v) for k, v in rows.items()}}) + "\n")
        file.flush()

    return log, file.close


def by_hand_tensorboard():
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tempfile.mkdtemp())

    def log(rows, step):
        for name, value in rows.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def by_hand_wandb():
    import wandb

    run = wandb.init(mode="offline", project="bench", dir=tempfile.mkdtemp(), settings=wandb.Settings(**QUIET_WANDB))
    return lambda rows, step: run.log(rows, step=step), run.finish


def by_hand_mlflow():
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tempfile.mkdtemp()}/ml.db")
    run_id = client.create_run(client.create_experiment("bench")).info.run_id
    metric = mlflow.entities.Metric

    def log(rows, step):
        now = int(time.time() * 1000)
        client.log_batch(run_id, metrics=[metric(k, float(v), now, step) for k, v in rows.items()])

    return log, lambda: client.set_terminated(run_id)


def by_hand_comet():
    import comet_ml

    experiment = comet_ml.OfflineExperiment(
        project_name="bench", offline_directory=tempfile.mkdtemp(), display_summary_level=0, **QUIET_COMET
    )
    return lambda rows, step: experiment.log_metrics(rows, step=step), experiment.end


def by_hand_neptune():
    import neptune_scale

    run = neptune_scale.Run(
        project="local/bench",
        mode="offline",
        log_directory=tempfile.mkdtemp(),
        enable_console_log_capture=False,
        source_tracking_config=None,
    )
    return lambda rows, step: run.log_metrics({k: float(v) for k, v in rows.items()}, step=step), run.close


def by_accelerate(name):
    """Accelerate's tracker of that name; it has none for JSON lines and Neptune."""
    from accelerate import tracking

    make = {
        "tensorboard": lambda: tracking.TensorBoardTracker("bench", tempfile.mkdtemp()),
        "wandb": lambda: tracking.WandBTracker("bench", mode="offline", dir=tempfile.mkdtemp(), settings=QUIET_WANDB),
        "mlflow": lambda: tracking.MLflowTracker("bench", logging_dir=f"sqlite:///{tempfile.mkdtemp()}/ml.db"),
        "comet": lambda: tracking.CometMLTracker("bench", online=False),
    }[name]
    tracker = make()
    if hasattr(tracker, "start"):
        tracker.start()

    def log(rows, step):  # Accelerate's trackers know tensors only through item()
        tracker.log({k: v.item() if hasattr(v, "item") else v for k, v in rows.items()}, step=step)

    return log, tracker.finish


def by_drivetrain(*specs):
    hub = hub_for(*specs)
    return hub.log, lambda: hub.finish(60.0)


def contenders():
    accelerate = importlib.util.find_spec("accelerate") is not None
    installed = [name for name in ("jsonl", *PLUGINS) if spec_of(name) is not None]
    for name in installed:
        yield f"{name}, drivetrain", lambda name=name: by_drivetrain(spec_of(name))
        yield f"{name}, by hand", globals()[f"by_hand_{name}"]
        if accelerate and name not in ("jsonl", "neptune"):
            yield f"{name}, Accelerate", lambda name=name: by_accelerate(name)
    yield f"all {len(installed)}, drivetrain", lambda: by_drivetrain(*map(spec_of, installed))


def steps_per_second(log, seconds):
    """Steps per second, and steps per second of this thread's own processor time, of a small model's training that logs ten scalars each step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(512, 256)
    count, limit, used = 0, time.perf_counter() + seconds, time.thread_time()
    while time.perf_counter() < limit:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        if log is not None:
            log(dict.fromkeys(NAMES, loss), count)
        count += 1
    return count / seconds, count / (time.thread_time() - used)


def compare_speed(specs, rounds, seconds):
    """Ratios with trackers on to off, interleaved, each as mean and half a 95 % interval: of steps per second, and per second of processor time."""
    hub = hub_for(*specs)
    steps_per_second(None, seconds)
    ratios = []
    for _ in range(rounds):
        off = steps_per_second(None, seconds)
        on = steps_per_second(hub.log, seconds)
        ratios.append([a / b for a, b in zip(on, off, strict=True)])
        hub.flush(60.0)  # what is left of these rows is no load of the next pair's first run
    hub.finish(60.0)
    return [
        (statistics.mean(column), 1.96 * statistics.stdev(column) / rounds**0.5) for column in zip(*ratios, strict=True)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="calls per figure")
    parser.add_argument("--rounds", type=int, default=8, help="pairs of training runs")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a training run")
    arguments = parser.parse_args()
    logging.getLogger("drivetrain.tracking").setLevel(logging.ERROR)
    os.environ.update(
        MLFLOW_DISABLE_TELEMETRY="true", COMET_DISABLE_AUTO_LOGGING="1", WANDB_SILENT="true", WANDB_MODE="offline"
    )
    os.chdir(tempfile.mkdtemp())  # some systems write where they are
    torch.set_num_threads(1)
    print(f"{'log() of ten scalars, microseconds: median (p99)':52}" + "".join(f"{kind:>20}" for kind in KINDS))
    for name, make in contenders():
        cells = []
        for kind in KINDS:
            log, close = make()
            median, p99 = cost(log, values_of(kind), arguments.count)
            close()  # what it still does in the background is no load of the next one
            cells.append(f"{median:.1f} ({p99:.0f})")
        print(f"{name:52}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
    for name in ("jsonl", *PLUGINS):
        spec = spec_of(name)
        if spec is not None and arguments.rounds:
            (rate, spread), (own, own_spread) = compare_speed([spec], arguments.rounds, arguments.seconds)
            print(
                f"{name} on / off: steps per second {rate:.3f} +- {spread:.3f}, "
                f"per second of the training thread's processor time {own:.3f} +- {own_spread:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
