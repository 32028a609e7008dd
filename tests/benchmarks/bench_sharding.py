"""Sharded training against a loop written by hand with ``fully_shard``: CPU and wall time per step, collectives, weights, peak memory.

Run it with the packages on the path: ``python -m tests.benchmarks.bench_sharding [--processes 1 --width 256 --depth 6 --precision bf16]``; how it measures
stands in `tests.benchmarks.turns`. Peak memory is the largest running sum of what the profiler saw allocated, from before the model is made to the end of
the second step, in processes of their own.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from .table import render
from .turns import AGAIN, HAND, OURS, compare, launch, parser, parts, take_turns, tell


def by_hand(args):
    model, batches = parts(args)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "cast_forward_inputs": False}
    policy = MixedPrecisionPolicy(**low) if args.precision == "bf16" else MixedPrecisionPolicy()
    for block in model[1:-1]:
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


MAKERS = {OURS: ours, HAND: by_hand, AGAIN: by_hand}


def peak(args):
    """Most bytes at once, of one training."""
    with torch.profiler.profile(profile_memory=True) as recording:
        _, step = MAKERS[args.peak](args)
        for i in range(2):
            step(i)
    events = [e for e in recording.profiler.kineto_results.events() if e.name() == "[memory]"]
    most = now = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return {"peak": most}


def worker(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    makers = {name: lambda make=make: make(args) for name, make in MAKERS.items()}
    tell(peak(args) if args.peak else take_turns(args, makers, weights))
    dist.destroy_process_group()


def weights(model):
    return [p.full_tensor() for p in model.parameters()]


def main():
    line = parser(__doc__.splitlines()[0])
    line.add_argument("--precision", choices=("no", "bf16"), default="no")
    line.add_argument("--peaks", type=int, default=6, help="processes that measure each one's peak memory")
    line.add_argument("--peak", choices=MAKERS, help=argparse.SUPPRESS)
    args = line.parse_args()
    if args.worker:
        worker(args)
        return
    print(render(compare(__spec__.name, args, f"sharded, precision {args.precision}")))
    for name in (OURS, HAND):
        found = [launch(__spec__.name, args.processes, f"--peak={name}")["peak"] for _ in range(args.peaks)]
        # When gloo's threads let buffers go differs from run to run: the smallest peak is what the training needs.
        print(f"peak memory, {name}: {min(found) / 1e6:.2f} MB (up to {max(found) / 1e6:.2f} in {args.peaks} runs)")


if __name__ == "__main__":
    main()
