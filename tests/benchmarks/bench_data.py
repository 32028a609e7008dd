"""What loaders cost: plain iteration, resuming deep in an epoch, dispatching; against torch's DataLoader and Accelerate.

Run it with the packages on the path: ``python -m tests.benchmarks.bench_data``. Accelerate's rows need it installed.
"""

import argparse
import importlib.util
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from drivetrain.data import DataLoaderConfiguration, prepare_data_loader, skip_first_batches
from drivetrain.testing.workers import WorkerPool

from . import stats
from .table import Row, render

HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None


class Images(Dataset):
    """Images that are normalised when they are read, as after decoding."""

    def __init__(self, length, *shape):
        self.length = length
        self.image = torch.zeros(shape)
        self.label = torch.zeros(())

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return (self.image - 0.5) / 0.25, self.label


class Nothing(Images):
    """Rows that are there already."""

    def __getitem__(self, index):
        return self.image, self.label


class Stream(IterableDataset):
    """Rows of ``width`` floats."""

    def __init__(self, length, width):
        self.length = length
        self.row = torch.zeros(width)

    def __iter__(self):
        return (self.row for _ in range(self.length))


# -- plain iteration -------------------------------------------------------------------------------------------------------


def _epoch(loader):
    """Microseconds from one batch to the next: the tenth percentile of an epoch, which other work on the machine hardly moves."""
    times = []
    last = time.perf_counter_ns()
    for _ in loader:
        now = time.perf_counter_ns()
        times.append(now - last)
        last = now
    return float(np.quantile(times[1:], 0.1)) / 1000


def iteration(blocks):
    """Interleaved epochs of the same loader, bare and prepared, in changing order."""
    rows = []
    for name, target, make in (
        (
            "nothing to read (the loader's own cost)",
            None,
            lambda: DataLoader(Nothing(500, 1), collate_fn=lambda r: r[0]),
        ),
        ("64 rows of 3x32x32", 1.03, lambda: DataLoader(Images(6400, 3, 32, 32), batch_size=64, shuffle=True)),
        ("32 rows of 3x224x224", 1.03, lambda: DataLoader(Images(960, 3, 224, 224), batch_size=32, shuffle=True)),
    ):
        bare, prepared = make(), prepare_data_loader(make(), device="cpu")
        series = ([], [])
        for block in range(blocks + 1):
            for place in (0, 1) if block % 2 else (1, 0):
                value = _epoch((bare, prepared)[place])
                if block:
                    series[place].append(value)
        section = "plain iteration, prepared against bare"
        rows.append(Row(section, name, stats.ratio(series[1], series[0]), target=target))
        rows.append(Row(section, "  per batch, bare", stats.median(series[0]), "us"))
        rows.append(Row(section, "  per batch, more when prepared", stats.overhead(series[1], series[0]), "us"))
    return rows


# -- resuming --------------------------------------------------------------------------------------------------------------


def _first_batch(loader):
    start = time.process_time()
    next(iter(loader))
    return (time.process_time() - start) * 1000


def resuming(blocks):
    """CPU time to the first batch after nine tenths of an epoch of a million samples."""
    length, size = 1_000_000, 10
    done = length * 9 // 10 // size

    def make():
        return DataLoader(range(length), batch_size=size, shuffle=True)

    ours = prepare_data_loader(make())
    state = {**ours.state_dict(), "epoch": 0, "taken": done}

    def resumed():
        ours.load_state_dict(state)
        return ours

    def started():
        ours.set_epoch(0)
        return ours

    runs = {
        "start of an epoch, torch": make,
        "start of an epoch": started,
        "load_state_dict at 90 %": resumed,
        "skip_first_batches at 90 %": lambda: skip_first_batches(started(), done),
    }
    if HAS_ACCELERATE:
        from accelerate import Accelerator
        from accelerate.data_loader import skip_first_batches as accelerates

        theirs = Accelerator(cpu=True).prepare(make())
        runs["Accelerate, skip_first_batches at 90 %"] = lambda: accelerates(theirs, done)
    found = {name: [] for name in runs}
    for block in range(blocks + 1):
        for name, run in runs.items():
            value = _first_batch(run())
            if block:
                found[name].append(value)
    section = "first batch of an epoch of a million shuffled samples: CPU time"
    rows = [Row(section, name, stats.median(series), "ms") for name, series in found.items()]
    start = found["start of an epoch"]
    rows.append(
        Row(
            section, "load_state_dict at 90 % / start", stats.ratio(found["load_state_dict at 90 %"], start), target=1.1
        )
    )
    return rows


# -- dispatching -----------------------------------------------------------------------------------------------------------


def _dispatch(peer, steps, size, width, epochs):
    """Seconds per epoch and bytes received, on every rank of a pool."""
    import torch.distributed as dist

    received = [0]
    originals = {name: getattr(dist, name) for name in ("irecv", "broadcast", "broadcast_object_list")}

    def counting(name):
        def call(value, *args, **kwargs):
            result = originals[name](value, *args, **kwargs)
            if isinstance(value, torch.Tensor) and dist.get_rank() > 0:
                received[0] += value.numel() * value.element_size()
            return result

        return call

    for name in ("irecv", "broadcast"):
        setattr(dist, name, counting(name))
    try:
        data = DataLoader(Stream(steps * size * dist.get_world_size(), width), batch_size=size)
        loader = _prepared(peer, data)
        times = []
        for _ in range(epochs):
            dist.barrier()
            start = time.perf_counter()
            used = sum(batch.numel() * batch.element_size() for batch in loader)
            times.append(time.perf_counter() - start)
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
    return times[1:], received[0] / epochs, used


def _prepared(peer, loader):
    import torch.distributed as dist

    if peer == "accelerate":
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration as Theirs

        return Accelerator(cpu=True, dataloader_config=Theirs(dispatch_batches=True)).prepare(loader)
    return prepare_data_loader(
        loader,
        num_processes=dist.get_world_size(),
        process_index=dist.get_rank(),
        config=DataLoaderConfiguration(dispatch_batches=True, prefetch=int(peer == "ahead")),
    )


def dispatching(epochs, world=2):
    """Streams read by rank 0 for all."""
    rows = []
    peers = {"drivetrain": "ahead", "drivetrain, prefetch=0": "plain"}
    if HAS_ACCELERATE:
        peers["Accelerate"] = "accelerate"
    with WorkerPool(world, timeout=300) as pool:
        for width, text in ((16, "batches of 1 KB per rank"), (65536, "batches of 4 MB per rank")):
            steps = 200 if width == 16 else 20
            section = f"dispatching to {world} ranks, {text}"
            for name, peer in peers.items():
                ranks = pool.run(_dispatch, peer, steps, 16, width, epochs + 1)
                slowest = np.max([times for times, _, _ in ranks], axis=0) / steps * 1000
                _, received, used = ranks[-1]
                rows.append(Row(section, f"{name}: time per step", stats.median(slowest.tolist()), "ms"))
                share = stats.median([received / used] * 2)
                target = 1.5 if width == 16 else 1.01
                rows.append(
                    Row(section, f"{name}: bytes received / used", share, target=target if "drive" in name else None)
                )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=30, help="epochs per figure")
    parser.add_argument("--only", nargs="+", choices=("iteration", "resuming", "dispatching"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, measure in (("iteration", iteration), ("resuming", resuming), ("dispatching", dispatching)):
        if arguments.only is None or name in arguments.only:
            rows += measure(arguments.blocks)
    print(render(rows))


if __name__ == "__main__":
    main()
