"""Sharded training against a loop written by hand with ``fully_shard``: CPU and wall time per step, collectives, peak memory.

Run it with the packages on the path: ``python -m tests.benchmarks.bench_sharding [--width 256 --depth 6]``. Both train on two processes, take turns in
one pair of them, and must send the same collectives and end with the same weights. Peak memory is the largest running sum of what the profiler saw
allocated, from before the model is made to the end of the second step, in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from . import stats
from .table import Row, render

ROWS = 16


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.first, self.second = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.second(torch.nn.functional.gelu(self.first(self.norm(x))))


def parts(args):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(args.width) for _ in range(args.depth)), torch.nn.Linear(args.width, 1))
    return model, torch.randn(64, ROWS, args.width, generator=torch.Generator().manual_seed(1 + dist.get_rank()))


def by_hand(args):
    model, batches = parts(args)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "cast_forward_inputs": False}
    policy = MixedPrecisionPolicy(**low) if args.precision == "bf16" else MixedPrecisionPolicy()
    for block in model[:-1]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(i):
        with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
            out = model(batches[i % len(batches)])
        out.float().pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def ours(args):
    from drivetrain import Accelerator

    model, batches = parts(args)
    accelerator = Accelerator(cpu=True, backend="fsdp", mixed_precision=args.precision)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

    def step(i):
        with accelerator.accumulate(model):
            accelerator.backward(model(batches[i % len(batches)]).float().pow(2).mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return model, step


PEERS = {"hand": by_hand, "drivetrain": ours}


def collectives(step):
    with torch.profiler.profile() as profile:
        step(0)
    return dict(Counter(e.name for e in profile.events() if e.name.startswith("c10d::")))


def peak(args):
    """Most bytes at once, of one peer."""
    with torch.profiler.profile(profile_memory=True) as recording:
        _, step = PEERS[args.peak](args)
        for i in range(2):
            step(i)
    events = [e for e in recording.profiler.kineto_results.events() if e.name() == "[memory]"]
    most = now = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return {"peak": most}


def times(args):
    built = {name: make(args) for name, make in PEERS.items()}
    sent = {name: collectives(step) for name, (_, step) in built.items()}
    error = max(
        float((a.full_tensor() - b.full_tensor()).abs().max())
        for a, b in zip(built["hand"][0].parameters(), built["drivetrain"][0].parameters(), strict=True)
    )
    cpu, wall = ({name: [] for name in built} for _ in range(2))
    shuffle = random.Random(0)
    for _ in range(args.blocks):
        for name in shuffle.sample(list(built), len(built)):
            step = built[name][1]
            dist.barrier()
            started = time.perf_counter(), time.process_time()
            for i in range(args.steps):
                step(i)
            cpu[name].append((time.process_time() - started[1]) / args.steps * 1e6)
            wall[name].append((time.perf_counter() - started[0]) / args.steps * 1e6)
    return {"cpu": cpu, "wall": wall, "sent": sent, "error": error}


def start(arguments, **more):
    """What two processes found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
        flags = [f"--{k}={v}" for k, v in {**arguments, **more, "out": out}.items() if v]
        done = subprocess.run([*launcher, f"{__package__}.bench_sharding", *flags], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        return json.loads(out.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--blocks", type=int, default=40, help="turns of each")
    parser.add_argument("--steps", type=int, default=10, help="steps in a turn")
    parser.add_argument("--peaks", type=int, default=4, help="processes that measure each one's peak memory")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--peak", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found = peak(args) if args.peak else times(args)
        if dist.get_rank() == 0:
            Path(args.out).write_text(json.dumps(found))
        dist.destroy_process_group()
        return
    given = {k: v for k, v in vars(args).items() if k not in ("out", "peak")}
    found = start(given)
    # When gloo's threads let buffers go differs from run to run: the smallest peak is what the training needs.
    memory = {name: min(start(given, peak=name)["peak"] for _ in range(args.peaks)) for name in PEERS}
    title = f"sharded, {args.depth} blocks of width {args.width}, precision {args.precision}, 2 processes"
    rows = [Row(title, "by hand, CPU time per step", stats.median(found["cpu"]["hand"]), "us")]
    for kind in ("cpu", "wall"):
        interval = stats.ratio(found[kind]["drivetrain"], found[kind]["hand"])
        rows.append(Row(title, f"drivetrain / by hand, {kind} time", interval, target=1.01))
    print(render(rows))
    print(
        f"collectives of a step: {found['sent']['hand']}, {'equal' if found['sent']['hand'] == found['sent']['drivetrain'] else found['sent']}"
    )
    print(f"weights after the first step differ by {found['error']:.1e}")
    print(f"peak memory: {memory['drivetrain'] / 1e6:.2f} MB, by hand {memory['hand'] / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
