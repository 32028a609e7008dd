"""Steps of a mixed-precision training with accumulation, clipping and a scheduler, against hand-written autocast, GradScaler and no_sync loops.

Run it with the packages on the path: ``python -m tests.benchmarks.bench_precision``; for two processes through ``python -m torch.distributed.run
--standalone --nproc_per_node 2 -m tests.benchmarks.bench_precision``. First the two loops must end with equal weights and have sent the same
collectives; then they take turns, and the ratio of their times comes with a 95 % interval. The target is 1 %.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.testing.communication import count_collectives

from . import stats
from .table import Row, render

PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
TARGET = 1.01


def parts(width: int, rows: int, batches: int) -> tuple:
    """Model, optimizer, scheduler, data of this process: always equal."""
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(width, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.999**step)
    world = dist.get_world_size() if dist.is_initialized() else 1
    generator = torch.Generator().manual_seed(1)
    count = rows * batches * world
    data = TensorDataset(torch.randn(count, width, generator=generator), torch.randn(count, 8, generator=generator))
    return model, optimizer, scheduler, data


def by_hand(precision: str, k: int, width: int, rows: int, batches: int) -> tuple[nn.Module, Callable]:
    """The loop as one writes it with torch alone."""
    bare, optimizer, scheduler, data = parts(width, rows, batches)
    dtype = PRECISIONS[precision]
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16", init_scale=1024.0)
    model, sampler = bare, None
    if dist.is_initialized():
        model = DistributedDataParallel(bare)
        sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, batch_size=rows, sampler=sampler)

    def epoch() -> Iterator[None]:
        for i, (x, y) in enumerate(loader):
            last = (i + 1) % k == 0
            with nullcontext() if last or model is bare else model.no_sync():
                with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
                    out = model(x)
                scaler.scale(mse_loss(out.float(), y) / k).backward()
            if last:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                optimizer.zero_grad()
            yield

    return bare, epoch


def with_drivetrain(precision: str, k: int, width: int, rows: int, batches: int) -> tuple[nn.Module, Callable]:
    """The same with an Accelerator."""
    from drivetrain import GradScalerKwargs

    bare, optimizer, scheduler, data = parts(width, rows, batches)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=k,
        kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
    )
    model, optimizer, scheduler, loader = accelerator.prepare(
        bare, optimizer, scheduler, DataLoader(data, batch_size=rows)
    )

    def epoch() -> Iterator[None]:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            yield

    return bare, epoch


def forever(epoch: Callable) -> Iterator[None]:
    while True:
        yield from epoch()


def compare(precision: str, k: int, args: argparse.Namespace) -> tuple[list[Row], str]:
    """The ratio of CPU times per micro-batch, and a sentence if the loops did different work."""
    size = (args.width, args.rows, args.batches)
    made = {"hand": by_hand(precision, k, *size), "drivetrain": with_drivetrain(precision, k, *size)}
    sent = {name: count_collectives(lambda e=epoch: list(e())) for name, (_, epoch) in made.items()}
    apart = max(
        float((a - b).abs().max()) for a, b in zip(*(model.parameters() for model, _ in made.values()), strict=True)
    )
    told = "" if sent["hand"] == sent["drivetrain"] else f"collectives {sent['drivetrain']}, by hand {sent['hand']}; "
    told += f"weights differ by {apart:.1e}" if apart > 1e-5 else ""
    running = {name: forever(epoch) for name, (_, epoch) in made.items()}
    times: dict[str, list[float]] = {name: [] for name in made}
    shuffle = random.Random(0)
    for _ in range(args.blocks):
        for name in shuffle.sample(list(made), len(made)):
            if dist.is_initialized():
                dist.barrier()
            started = time.process_time()
            for _ in islice(running[name], args.steps):
                pass
            times[name].append((time.process_time() - started) / args.steps * 1e6)
    title = f"mixed_precision={precision!r}, accumulation {k}"
    return [
        Row(title, "hand-written loop, CPU time per micro-batch", stats.median(times["hand"]), "us"),
        Row(title, "drivetrain: overhead, CPU time", stats.overhead(times["drivetrain"], times["hand"]), "us"),
        Row(title, "drivetrain / hand-written", stats.paired_ratio(times["drivetrain"], times["hand"]), target=TARGET),
    ], told and f"{title}: {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=150, help="turns of each loop")
    parser.add_argument("--steps", type=int, default=4, help="micro-batches in a turn")
    parser.add_argument("--batches", type=int, default=16, help="micro-batches in an epoch")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rows", type=int, default=192, help="rows of a micro-batch")
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 4])
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    gc.collect()
    gc.freeze()
    rows: list[Row] = []
    notes = []
    for precision in args.precisions:
        for k in args.accumulation:
            found, told = compare(precision, k, args)
            rows += found
            notes += [told] if told else []
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(render(rows))
        print("\n".join(notes) or "The loops sent the same collectives and ended with equal weights.")


if __name__ == "__main__":
    main()
