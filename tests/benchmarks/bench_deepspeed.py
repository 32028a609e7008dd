"""Training through DeepSpeed's engine against a loop written by hand with it: wall time per step, and the weights at the end.

Run it with the packages on the path: ``python -m tests.benchmarks.bench_deepspeed [--stage 2 --width 256 --depth 6]``. Both train on two processes and
take turns in one pair of them; the weights must be equal at the end, within rounding.
"""

from __future__ import annotations

import argparse
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


def parts(args):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(args.width) for _ in range(args.depth)), torch.nn.Linear(args.width, 1))
    batches = torch.randn(64, ROWS, args.width, generator=torch.Generator().manual_seed(1 + dist.get_rank()))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches


def ours(args, configuration):
    from drivetrain import Accelerator, DeepSpeedPlugin

    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=configuration))
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
    model, step = ours(args, dict(configuration))  # brings up communication for both
    engine, plain = by_hand(args, configuration)
    times = {"ours": [], "by hand": []}
    for turn in range(args.turns):
        for name, run in sorted(
            (("ours", step), ("by hand", plain)), key=lambda pair: (pair[0] == "ours") ^ (turn % 2)
        ):
            dist.barrier()
            start = time.perf_counter()
            for i in range(args.steps):
                run(turn * args.steps + i)
            dist.barrier()
            if turn:
                times[name].append((time.perf_counter() - start) / args.steps)
    from deepspeed.utils import safe_get_full_fp32_param

    pairs = zip(model.module.parameters(), engine.module.parameters(), strict=True)
    both = ((safe_get_full_fp32_param(a), safe_get_full_fp32_param(b)) if args.stage else (a, b) for a, b in pairs)
    difference = max(float((a - b).detach().abs().max()) for a, b in both)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps({"times": times, "difference": difference}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--worker", action="store_true")
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", __spec__.name]
    done = subprocess.run([*command, "--worker", *sys.argv[1:]], capture_output=True, text=True)
    line = next((ln for ln in done.stdout.splitlines() if ln.startswith("RESULT ")), None)
    if line is None:
        sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
    result = json.loads(line.removeprefix("RESULT "))
    assert result["difference"] < 1e-5, result["difference"]
    title = f"ZeRO stage {args.stage}, two processes, {args.depth} blocks of width {args.width}"
    times = result["times"]
    rows = [Row(title, "by hand, wall time per step", stats.median([1e6 * t for t in times["by hand"]]), "us")]
    rows.append(Row(title, "drivetrain / by hand", stats.paired_ratio(times["ours"], times["by hand"]), target=1.01))
    print(render(rows))


if __name__ == "__main__":
    main()
