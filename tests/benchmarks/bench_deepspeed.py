"""Training through DeepSpeed's engine against a loop written by hand with it: time per step, and the weights at the end.

Run it with the packages on the path: ``python -m tests.benchmarks.bench_deepspeed [--stage 2 --width 256 --depth 6]``. Three trainings take turns step by
step in the same processes, in changing order: through drivetrain, by hand, and by hand once more, which says how finely this machine can tell two
trainings apart. A second launch makes them in the opposite order, since where an engine's memory lies matters. All weights must be equal at the end.
With ``--processes 1`` nobody waits for anybody, and what the library itself costs is seen best.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time

import torch
import torch.distributed as dist

from . import stats
from .bench_sharding import Block
from .table import Row, render

ROWS = 16
WARM_UP = 10
OURS, HAND, AGAIN = "drivetrain", "by hand", "by hand again"


def parts(args):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(args.width) for _ in range(args.depth)), torch.nn.Linear(args.width, 1))
    batches = torch.randn(64, ROWS, args.width, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches


def ours(args, accelerator):
    model, optimizer, batches = parts(args)
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(i):
        accelerator.backward(model(batches[i % len(batches)]).float().pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def by_hand(args, configuration):
    import deepspeed

    model, optimizer, batches = parts(args)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration, dist_init_required=False)

    def step(i):
        engine.backward(engine(batches[i % len(batches)]).float().pow(2).mean())
        engine.step()

    return engine, step


def worker(args):
    configuration = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 5_000_000},
    }
    from drivetrain import Accelerator, DeepSpeedPlugin

    # Communication for all of them; and an Accelerator outlives what it prepared.
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=dict(configuration)))
    makers = {
        OURS: lambda: ours(args, accelerator),
        HAND: lambda: by_hand(args, dict(configuration)),
        AGAIN: lambda: by_hand(args, dict(configuration)),
    }
    order = [AGAIN, HAND, OURS] if args.reverse else [OURS, HAND, AGAIN]
    made = {name: makers[name]() for name in order}
    orders = list(itertools.permutations(order))
    wall: dict[str, list[float]] = {name: [] for name in order}
    busy: dict[str, list[float]] = {name: [] for name in order}
    for i in range(WARM_UP + args.steps):
        for name in orders[i % len(orders)]:
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            made[name][1](i)
            cpu = time.process_time() - cpu
            dist.barrier()
            if i >= WARM_UP:
                wall[name].append(time.perf_counter() - start)
                busy[name].append(cpu)
    from deepspeed.utils import safe_get_full_fp32_param

    def weights(engine):
        return [safe_get_full_fp32_param(p) if args.stage else p.detach() for p in engine.module.parameters()]

    hand = weights(made[HAND][0])
    differences = {
        name: max(float((a - b).abs().max()) for a, b in zip(weights(engine), hand, strict=True))
        for name, (engine, _) in made.items()
    }
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({"wall": wall, "busy": busy, "differences": differences}), flush=True)


def launch(processes, *more):
    """Train in new processes; what the first one has measured."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*launcher, "-m", __spec__.name, "--worker", *sys.argv[1:], *more], capture_output=True, text=True
    )
    line = next((ln for ln in done.stdout.splitlines() if ln.startswith("RESULT ")), None)
    if line is None:
        sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
    result = json.loads(line.removeprefix("RESULT "))
    assert max(result["differences"].values()) < 1e-5, result["differences"]
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--steps", type=int, default=240, help="of each training in each of the two launches")
    parser.add_argument("--reverse", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    launches = [launch(args.processes), launch(args.processes, "--reverse")]
    counted = f"{args.processes} process{'es' if args.processes > 1 else ''}"
    title = f"ZeRO stage {args.stage}, {counted}, {args.depth} blocks of width {args.width}"
    rows = []
    for kind, label in (("wall", "wall time"), ("busy", "CPU time")):
        ours_, hand, again = ([t for one in launches for t in one[kind][name]] for name in (OURS, HAND, AGAIN))
        rows += [
            Row(title, f"by hand, {label} per step", stats.median([1e6 * t for t in hand]), "us"),
            Row(title, f"drivetrain / by hand, {label}", stats.paired_ratio(ours_, hand), target=1.01),
            Row(title, f"by hand again / by hand, {label}", stats.paired_ratio(again, hand)),
        ]
    print(render(rows))


if __name__ == "__main__":
    main()
