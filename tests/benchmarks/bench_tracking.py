"""What tracking costs the training thread: microseconds per ``log`` of ten scalars, against the system's own library called by hand.

Run it with the packages on the path: ``python tests/benchmarks/bench_tracking.py``. Prints one table, and steps per second with trackers on and off.
"""

import argparse
import importlib.util
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

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
    for step in range(count):
        start = time.perf_counter_ns()
        log(rows, step)
        times.append(time.perf_counter_ns() - start)
        if step % 10 == 0:
            time.sleep(0.001)
    times.sort()
    return statistics.median(times) / 1000, times[int(0.99 * len(times))] / 1000


def hub_for(*specs):
    hub = TrackerHub.from_plan(specs, logging_dir=tempfile.mkdtemp())
    hub.start("bench")
    return hub


def by_hand_jsonl():
    file = Path(tempfile.mkdtemp(), "rows.jsonl").open("a")  # noqa: SIM115

    def log(rows, step):
        file.write(json.dumps({"step": step, **{k: float(v) for k, v in rows.items()}}) + "\n")
        file.flush()

    return log


def by_hand_tensorboard():
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tempfile.mkdtemp())

    def log(rows, step):
        for name, value in rows.items():
            writer.add_scalar(name, value, step)

    return log


def accelerate_tensorboard():
    from accelerate.tracking import TensorBoardTracker

    tracker = TensorBoardTracker("bench", tempfile.mkdtemp())
    if hasattr(tracker, "start"):
        tracker.start()

    def log(rows, step):  # Accelerate's tracker knows tensors only through item()
        tracker.log({k: v.item() if hasattr(v, "item") else v for k, v in rows.items()}, step=step)

    return log


def contenders():
    yield "jsonl, drivetrain", lambda: hub_for(JSONL_SPEC).log
    yield "jsonl, by hand", by_hand_jsonl
    if importlib.util.find_spec("drivetrain_tensorboard"):
        from drivetrain_tensorboard.plugin import SPEC

        yield "tensorboard, drivetrain", lambda: hub_for(SPEC).log
        yield "tensorboard, by hand", by_hand_tensorboard
        if importlib.util.find_spec("accelerate"):
            yield "tensorboard, Accelerate", accelerate_tensorboard
        yield "both, drivetrain", lambda: hub_for(JSONL_SPEC, SPEC).log


def steps_per_second(log, seconds):
    """A small model's training loop, logging ten scalars each step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(512, 256)
    count, limit = 0, time.perf_counter() + seconds
    while time.perf_counter() < limit:
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        if log is not None:
            log(dict.fromkeys(NAMES, loss), count)
        count += 1
    return count / seconds


def compare_speed(rounds, seconds):
    """The ratio of steps per second with trackers on to off, interleaved, with a 95 % interval."""
    specs = [JSONL_SPEC]
    if importlib.util.find_spec("drivetrain_tensorboard"):
        from drivetrain_tensorboard.plugin import SPEC

        specs.append(SPEC)
    hub = hub_for(*specs)
    steps_per_second(None, seconds)
    ratios = []
    for _ in range(rounds):
        off = steps_per_second(None, seconds)
        on = steps_per_second(hub.log, seconds)
        ratios.append(on / off)
    hub.finish()
    mean, spread = statistics.mean(ratios), statistics.stdev(ratios) / rounds**0.5
    return off, mean, 1.96 * spread


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="calls per figure")
    parser.add_argument("--rounds", type=int, default=8, help="pairs of training runs")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a training run")
    arguments = parser.parse_args()
    logging.getLogger("drivetrain.tracking").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"{'log() of ten scalars, microseconds: median (p99)':52}" + "".join(f"{kind:>20}" for kind in KINDS))
    for name, make in contenders():
        cells = []
        for kind in KINDS:
            log = make()
            median, p99 = cost(log, values_of(kind), arguments.count)
            cells.append(f"{median:.1f} ({p99:.0f})")
        print(f"{name:52}" + "".join(f"{cell:>20}" for cell in cells))
    off, ratio, interval = compare_speed(arguments.rounds, arguments.seconds)
    print(f"steps per second with trackers on / off: {ratio:.3f} +- {interval:.3f} ({off:.0f} steps/s off)")


if __name__ == "__main__":
    main()
