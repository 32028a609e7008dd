"""The plan that is chosen against all candidates, each trained and timed on two CPU ranks.

Run it with the packages on the path: ``python -m tests.benchmarks.bench_planner``. The chosen plan is to be within a tenth of the fastest that fits.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from tests.integration import planner_cases as cases

from drivetrain.interfaces import TrainingRequest
from drivetrain.memory import make_plans, measure_machine, profile_model

STRATEGIES = ("ddp", "ddp-view", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
#: Family, samples per rank and step.
MODELS = {"transformer": 16, "embedding": 256}


def candidates(family, share):
    """Each way to divide, recompute and accumulate."""
    for strategy in STRATEGIES:
        for recompute in ("none", "all"):
            for accumulation in (1, 2):
                yield cases.Config(family, strategy, recompute, share // accumulation, accumulation)


def seconds(config, steps):
    """Median time of a step on this rank."""
    accelerator = cases.accelerator_for(config)
    torch.manual_seed(0)
    model = cases.MODELS[config.family]()
    model, optimizer = accelerator.prepare(model, cases.OPTIMIZERS[config.optimizer](model.parameters()))
    batch = cases.batch_of(config.family, config.micro_batch)
    times = []
    for _ in range(steps):
        dist.barrier()
        started = time.perf_counter()
        for _ in range(config.accumulation):
            with accelerator.accumulate(model):
                accelerator.backward(cases.loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
        times.append(time.perf_counter() - started)
    return sorted(times[1:])[len(times[1:]) // 2]


def choose(family, share, limit):
    """What the planner takes on this machine, as a configuration, and all predictions."""
    smallest = share // 2
    profile = profile_model(cases.MODELS[family](), cases.batch_of(family, smallest), loss=cases.loss_of)
    hardware = replace(measure_machine(torch.device("cpu"), devices=2), memory=limit)
    request = TrainingRequest(
        batch_size=2 * share, micro_batches=(smallest, share), recompute=tuple(profile.timelines), headroom=0
    )
    report = make_plans(profile, hardware, request, keep=lambda p: not p.sync_each_batch)
    names = {("ddp", ""): "ddp", ("ddp", "gradients in buckets"): "ddp-view"}

    def config(plan):
        strategy = names.get((plan.backend, plan.strategy), plan.strategy)
        return cases.Config(family, strategy, plan.recompute, plan.micro_batch, plan.accumulation)

    found = {config(p): (p.peak_bytes, p.step_seconds) for p in report.plans}
    return None if report.best is None else config(report.best), found


def on_rank(args):
    rows = []
    for family, share in MODELS.items():
        # Measured in turns: what else the machine does hits all alike.
        configs = list(candidates(family, share))
        times = {c: [] for c in configs}
        for _ in range(args.turns):
            for config in configs:
                times[config].append(seconds(config, args.steps))
        measured = {c: min(t) for c, t in times.items()}
        _, found = choose(family, share, 10**12)
        needs = sorted(peak for peak, _ in found.values())
        for limit in (needs[-1], needs[len(needs) // 2], needs[0]):
            best, _ = choose(family, share, limit)
            fitting = {c: t for c, t in measured.items() if found[c][0] <= limit}
            fastest = min(fitting, key=fitting.get)
            rows.append(
                {
                    "family": family,
                    "limit": limit,
                    "fit": len(fitting),
                    "chosen": asdict(best),
                    "fastest": asdict(fastest),
                    "ratio": measured[best] / measured[fastest],
                }
            )
    return rows


def words(config):
    return f"{config['strategy']}, recompute {config['recompute']}, {config['micro_batch']} x {config['accumulation']}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="steps of each candidate in a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        rows = on_rank(args)
        if dist.get_rank() == 0:
            Path(args.out).write_text(json.dumps(rows))
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
        flags = [f"--steps={args.steps}", f"--turns={args.turns}", f"--out={out}"]
        done = subprocess.run([*launcher, f"{__package__}.bench_planner", *flags], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        rows = json.loads(out.read_text())
    print(
        "| model | memory | candidates that fit | chosen | fastest measured | chosen / fastest |\n|---|---|---|---|---|---|"
    )
    for row in rows:
        print(
            f"| {row['family']} | {row['limit'] / 1e6:.0f} MB | {row['fit']} | {words(row['chosen'])} | {words(row['fastest'])} | {row['ratio']:.2f} |"
        )


if __name__ == "__main__":
    main()
