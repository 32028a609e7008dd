"""What checkpoints cost: seconds that training is blocked by a save, in step and in the background, and seconds of a load.

Run it with the packages on the path: ``python tests/benchmarks/bench_checkpoint.py [--megabytes 1200] [--directory /where/to]``. Peers are a plain
``torch.save`` of the same state (without fsync, which ours has) and Accelerate's ``save_state`` where it is installed. All are run in turns; the table shows medians, minima and
the median of the ratio to ``torch.save`` in the same turn.
"""

import argparse
import importlib.util
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from drivetrain import Accelerator

WIDTH = 1024


def parts(megabytes):
    """A model of linear layers whose weights and AdamW state take about so many bytes in all."""
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def by_hand(megabytes, folder):
    model, optimizer = parts(megabytes)
    file = folder / "torch.pt"

    def save():
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)

    def load():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return {"torch.save": save, "torch.load": load}


def ours(megabytes, folder):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*parts(megabytes))

    def background():
        accelerator.save_state(folder / "background", blocking=False)

    return {
        "save_state": lambda: accelerator.save_state(folder / "blocking"),
        "save_state(blocking=False)": background,
        "wait_for_checkpoint": accelerator.wait_for_checkpoint,
        "load_state": lambda: accelerator.load_state(folder / "blocking"),
        "load_state(verify=False)": lambda: accelerator.load_state(folder / "blocking", verify=False),
    }


def accelerate(megabytes, folder):
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.prepare(*parts(megabytes))
    return {
        "Accelerate's save_state": lambda: accelerator.save_state(str(folder / "accelerate")),
        "Accelerate's load_state": lambda: accelerator.load_state(str(folder / "accelerate")),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400, help="model and optimizer state together")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--directory", type=Path, help="on the disk to be measured")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.directory))
    calls = {**by_hand(args.megabytes, folder), **ours(args.megabytes, folder)}
    if importlib.util.find_spec("accelerate") is not None:
        calls |= accelerate(args.megabytes, folder)
    seconds = {name: [] for name in calls}
    try:
        for turn in range(args.turns + 1):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                if turn:  # the first one allocates staging and page cache
                    seconds[name].append(time.perf_counter() - start)
    finally:
        shutil.rmtree(folder)
    print(f"{args.megabytes} MB, {torch.get_num_threads()} threads, {args.turns} turns, seconds")
    print(f"{'':30}{'median':>9}{'minimum':>9}{'x torch':>9}")
    for name, times in seconds.items():
        base = seconds["torch.load" if "load" in name else "torch.save"]
        ratio = statistics.median(a / b for a, b in zip(times, base, strict=True))
        print(f"{name:30}{statistics.median(times):9.3f}{min(times):9.3f}{ratio:9.2f}")
    print(
        f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB for three copies of the state"
    )


if __name__ == "__main__":
    main()
