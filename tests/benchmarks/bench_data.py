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
    """A map-style data set read from its start; has no length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return (self.rows[i] for i in range(len(self.rows)))


class Rows(Dataset):
    """The same row of ``width`` floats again and again."""

    def __init__(self, length, width):
        self.length = length
        self.row = torch.zeros(width)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.row


class Sentences(Dataset):
    """Token numbers, from 1 to 200 of them."""

    def __init__(self, length):
        self.lengths = np.random.default_rng(0).integers(1, 200, length).tolist()

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return torch.arange(self.lengths[index])


class ByLength:
    """A batch sampler: batches of sentences of about one length, at most 8192 tokens each."""

    def __init__(self, lengths):
        self.batches = [[]]
        for index in np.argsort(lengths).tolist():
            if (len(self.batches[-1]) + 1) * lengths[index] > 8192:
                self.batches.append([])
            self.batches[-1].append(index)

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def padded(sentences):
    return torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True)


def bucketed():
    data = Sentences(6000)
    return DataLoader(data, batch_sampler=ByLength(data.lengths), collate_fn=padded)


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
    images = Images(6400, 3, 32, 32)
    for name, target, make in (
        (
            "nothing to read (the loader's own cost)",
            None,
            lambda: DataLoader(Nothing(500, 1), collate_fn=lambda r: r[0]),
        ),
        ("64 rows of 3x32x32", 1.03, lambda: DataLoader(images, batch_size=64, shuffle=True)),
        ("32 rows of 3x224x224", 1.03, lambda: DataLoader(Images(1920, 3, 224, 224), batch_size=32, shuffle=True)),
        ("sentences in batches by length, padded", 1.03, bucketed),
        ("ragged: 64 sentences in a list", 1.03, lambda: DataLoader(Sentences(6400), batch_size=64, collate_fn=list)),
        ("a stream without a length, 64 rows of 3x32x32", 1.03, lambda: DataLoader(Stream(images), batch_size=64)),
    ):
        loaders = [make(), prepare_data_loader(make(), device="cpu")]
        if HAS_ACCELERATE:
            from accelerate import Accelerator

            loaders.append(Accelerator(cpu=True).prepare(make()))
        series = [[] for _ in loaders]
        for block in range(blocks + 1):
            for place in range(len(loaders)) if block % 2 else reversed(range(len(loaders))):
                value = _epoch(loaders[place])
                if block:
                    series[place].append(value)
        section = "plain iteration, prepared against bare"
        rows.append(Row(section, name, stats.ratio(series[1], series[0]), target=target))
        rows.append(Row(section, "  per batch, bare", stats.median(series[0]), "us"))
        rows.append(Row(section, "  per batch, more when prepared", stats.overhead(series[1], series[0]), "us"))
        if HAS_ACCELERATE:
            rows.append(Row(section, "  per batch, more by Accelerate", stats.overhead(series[2], series[0]), "us"))
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


def _dispatch(peers, make, epochs):
    """On a rank of a pool: of each peer's epochs, time and CPU time per step in milliseconds; bytes received for each byte used.

    Peers take turns. The time of a step is the tenth percentile of an epoch's, which other work on the machine hardly moves.
    """
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
    loaders = {peer: _prepared(peer, make()) for peer in peers}
    times, cpu, shares = {peer: [] for peer in peers}, {peer: [] for peer in peers}, {}
    try:
        for epoch in range(epochs + 1):
            for peer in peers if epoch % 2 else reversed(peers):
                received[0] = used = 0
                dist.barrier()
                start, marks = time.process_time(), [time.perf_counter()]
                for batch in loaders[peer]:
                    tensors = batch if isinstance(batch, list) else [batch]
                    used += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
                    marks.append(time.perf_counter())
                if epoch:
                    times[peer].append(float(np.quantile(np.diff(marks), 0.1)) * 1000)
                    cpu[peer].append((time.process_time() - start) / (len(marks) - 1) * 1000)
                shares[peer] = received[0] / used
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
    return times, cpu, shares


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
    """Data read by rank 0 for all."""
    rows = []
    kinds = (
        ("batches of 1 KB per rank", 1.5, lambda: DataLoader(Stream(Rows(6400, 16)), batch_size=16)),
        ("batches of 50 KB per rank", 1.02, lambda: DataLoader(Stream(Rows(6400, 784)), batch_size=16)),
        ("batches of 4 MB per rank", 1.01, lambda: DataLoader(Stream(Rows(640, 65536)), batch_size=16)),
        (
            "ragged, 16 sentences in a list",
            1.2,
            lambda: DataLoader(Stream(Sentences(3200)), batch_size=16, collate_fn=list),
        ),
    )
    with WorkerPool(world, timeout=300) as pool:
        for text, target, make in kinds:
            peers = {"ahead": "drivetrain", "plain": "drivetrain, prefetch=0"}
            if HAS_ACCELERATE and "ragged" not in text:  # it slices each sentence instead of the list
                peers["accelerate"] = "Accelerate"
            section = f"dispatching to {world} ranks, {text}"
            ranks = pool.run(_dispatch, list(peers), make, epochs)
            slowest = {peer: np.max([times[peer] for times, _, _ in ranks], axis=0).tolist() for peer in peers}
            cpu = {peer: np.sum([used[peer] for _, used, _ in ranks], axis=0).tolist() for peer in peers}
            for peer, name in peers.items():
                rows.append(Row(section, f"{name}: time per step", stats.median(slowest[peer]), "ms"))
                rows.append(Row(section, f"{name}: CPU time per step, all ranks", stats.median(cpu[peer]), "ms"))
                if peer != "accelerate" and "accelerate" in peers:
                    for what, series in (("time", slowest), ("CPU time", cpu)):
                        ratio = stats.ratio(series[peer], series["accelerate"])
                        rows.append(Row(section, f"{name}: {what} / Accelerate's", ratio, target=1.0))
                share = stats.median([ranks[-1][2][peer]] * 2)
                wanted = None if peer == "accelerate" else target
                rows.append(Row(section, f"{name}: bytes received / used", share, target=wanted))
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
