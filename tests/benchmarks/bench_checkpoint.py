"""What checkpoints cost: seconds that training is blocked by a save, in step and in the background, and seconds of a load.

Run it with the packages on the path: ``python tests/benchmarks/bench_checkpoint.py [--megabytes 1000] [--directory /where/to]``. Peers are a plain
``torch.save`` of the same state over its own last file, ``torch.save`` to a new file that is fsynced and renamed over the last one (so that one whole file exists at any time, as
with ours), and Accelerate's ``save_state`` where it is installed. All are run in turns, each turn in another order: a save to a new file pays for pages that a load before it gave back to the system,
one over its own file doesn't. The table shows medians, minima, the median of the ratio to ``torch.save`` (``torch.load``) in the same turn, the median of CPU seconds (which say more where the machine is shared), and the memory that a call takes at its peak above what was there before.
On a file system in memory (``--directory /dev/shm``) the disk plays no part.
"""

import argparse
import importlib.util
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
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

    def save_whole():
        beside = folder / "beside.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, beside)
        fd = os.open(beside, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
        beside.replace(folder / "whole.pt")

    def load():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return {"torch.save": save, "torch.save, whole or absent": save_whole, "torch.load": load}


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


def order(names, turn):
    """The calls of a turn, in another order each time; waiting stays behind what it waits for. The first turn makes what is loaded later."""
    if turn:
        names = [name for name in names if name != "wait_for_checkpoint"]
        random.Random(turn).shuffle(names)
        names.insert(names.index("save_state(blocking=False)") + 1, "wait_for_checkpoint")
    return names


def peak(call):
    """GB that a call takes above what was there before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    call()
    return (memory("VmHWM") - before) / 1e6


def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def peaks(maker, megabytes, folder):
    """In a process of its own, whose freed memory goes back to the system at once: else a peak hides in what an earlier call left."""
    command = [
        sys.executable,
        __file__,
        "--peaks",
        maker.__name__,
        "--megabytes",
        str(megabytes),
        "--directory",
        folder,
    ]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_ARENA_MAX": "1"}
    found = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, check=True).stdout
    return json.loads(found.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1000, help="model and optimizer state together")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--directory", type=Path, help="on the disk to be measured")
    parser.add_argument("--peaks", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peaks:
        found = globals()[args.peaks](args.megabytes, args.directory)
        for call in found.values():  # what is allocated once
            call()
        print(json.dumps({name: peak(call) for name, call in found.items()}))
        return
    folder = Path(tempfile.mkdtemp(dir=args.directory))
    makers = [by_hand, ours]
    if importlib.util.find_spec("accelerate") is not None:
        makers.append(accelerate)
    calls = {name: call for maker in makers for name, call in maker(args.megabytes, folder).items()}
    highest = {}
    seconds = {name: [] for name in calls}
    work = {name: [] for name in calls}
    try:
        for turn in range(args.turns + 1):
            for name in order(list(calls), turn):
                call = calls[name]
                start, busy = time.perf_counter(), time.process_time()
                call()
                if turn:  # the first one allocates staging and page cache
                    seconds[name].append(time.perf_counter() - start)
                    work[name].append(time.process_time() - busy)
        if Path("/proc/self/clear_refs").exists():
            for maker in makers:
                highest |= peaks(maker, args.megabytes, folder)
    finally:
        shutil.rmtree(folder)
    print(f"{args.megabytes} MB, {torch.get_num_threads()} threads, {args.turns} turns, seconds")
    print(f"{'':30}{'median':>9}{'minimum':>9}{'x torch':>9}{'CPU':>9}{'peak GB':>9}")
    for name, times in seconds.items():
        base = seconds["torch.load" if "load" in name else "torch.save"]
        ratio = statistics.median(a / b for a, b in zip(times, base, strict=True))
        print(
            f"{name:30}{statistics.median(times):9.3f}{min(times):9.3f}{ratio:9.2f}{statistics.median(work[name]):9.3f}{highest.get(name, float('nan')):9.2f}"
        )


if __name__ == "__main__":
    main()
