"""The plan that is chosen against all candidates, each trained and timed on two CPU ranks.

Run it with the packages on the path: ``python -m tests.benchmarks.bench_planner --families conv,moe``. The chosen plan is to be within a tenth of the
fastest that fits. One candidate of each family is measured twice: by what its two times differ, no smaller difference between plans can be read.
Candidates of ddp and fsdp are measured, with ``--deepspeed`` those of ZeRO's stages instead, as plain as their planner writes them down.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist
from tests.integration import planner_cases as cases

from drivetrain import Accelerator, ActivationCheckpointing, DeepSpeedPlugin
from drivetrain.interfaces import TrainingRequest
from drivetrain.memory import make_plans, measure_machine, profile_model

STRATEGIES = ("ddp", "ddp-view", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
#: Family, samples per rank and step.
MODELS = {"transformer": 16, "embedding": 256, "conv": 16, "moe": 8, "lora": 16}


def candidates(family, share, plans):
    """Each way to divide, recompute and accumulate."""
    deepspeed = dict.fromkeys(c.strategy for c, p in plans.items() if p.backend == "deepspeed")
    for strategy in deepspeed or STRATEGIES:
        for recompute in ("none", "all"):
            for accumulation in (1, 2):
                yield cases.Config(family, strategy, recompute, share // accumulation, accumulation)


def accelerator_for(config, plan):
    """An Accelerator that trains so."""
    if plan.backend != "deepspeed":
        return cases.accelerator_for(config)
    return Accelerator(
        cpu=True,
        gradient_accumulation_steps=config.accumulation,
        kwargs_handlers=[ActivationCheckpointing()] if config.recompute == "all" else [],
        deepspeed_plugin=DeepSpeedPlugin(**plan.options),
    )


def seconds(config, steps, plan):
    """Median time of a step on this rank."""
    accelerator = accelerator_for(config, plan)
    torch.manual_seed(0)
    model = cases.MODELS[config.family]()
    trained = (p for p in model.parameters() if p.requires_grad)
    model, optimizer = accelerator.prepare(model, cases.OPTIMIZERS[config.optimizer](trained))
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
    accelerator.end_training()
    return sorted(times[1:])[len(times[1:]) // 2]


def looked_at(family, share):
    """The model's profile, and this machine."""
    profile = profile_model(cases.MODELS[family](), cases.batch_of(family, share // 2), loss=cases.loss_of)
    return profile, measure_machine(torch.device("cpu"), devices=2)


def choose(family, share, profile, hardware, backends):
    """What the planner takes on such hardware, as a configuration, and all plans by theirs."""
    request = TrainingRequest(
        batch_size=2 * share, micro_batches=(share // 2, share), recompute=tuple(profile.timelines), headroom=0
    )
    report = make_plans(profile, hardware, request, keep=lambda p: p.backend in backends and not p.sync_each_batch)
    names = {("ddp", ""): "ddp", ("ddp", "gradients in buckets"): "ddp-view"}

    def config(plan):
        strategy = names.get((plan.backend, plan.strategy), plan.strategy)
        return cases.Config(family, strategy, plan.recompute, plan.micro_batch, plan.accumulation)

    return None if report.best is None else config(report.best), {config(p): p for p in report.plans}


def rank_correlation(first, second):
    """Spearman's: 1 where both order alike, -1 where they order the other way round. Equal values share their mean rank."""
    ranks = [[sum(o < v for o in values) + sum(o <= v for o in values) for v in values] for values in (first, second)]
    return statistics.correlation(*ranks)


def on_rank(args):
    """For each family: the choice under three limits of memory, all candidates' times, and the control's."""
    results = []
    for family in args.families.split(","):
        share = MODELS[family]
        backends = ("deepspeed",) if args.deepspeed else ("ddp", "fsdp")
        profile, hardware = looked_at(family, share)
        _, plans = choose(family, share, profile, replace(hardware, memory=10**12), backends)
        # Measured in turns: what else the machine does hits all alike.
        configs = list(candidates(family, share, plans))
        times = {c: [] for c in configs}
        control = []
        for _ in range(args.turns):
            for config in configs:
                times[config].append(seconds(config, args.steps, plans[config]))
            control.append(seconds(configs[0], args.steps, plans[configs[0]]))
        measured = {c: min(t) for c, t in times.items()}
        needs = sorted(plans[c].peak_bytes for c in configs)
        choices = []
        for limit in (needs[-1], needs[len(needs) // 2], needs[0]):
            best, _ = choose(family, share, profile, replace(hardware, memory=limit), backends)
            fitting = {c: t for c, t in measured.items() if plans[c].peak_bytes <= limit}
            fastest = min(fitting, key=fitting.get)
            choices.append(
                {
                    "limit": limit,
                    "fit": len(fitting),
                    "chosen": asdict(best),
                    "fastest": asdict(fastest),
                    "ratio": measured[best] / measured[fastest],
                }
            )
        results.append(
            {
                "family": family,
                "choices": choices,
                "candidates": [(asdict(c), plans[c].step_seconds, measured[c]) for c in configs],
                "correlation": rank_correlation(
                    [plans[c].step_seconds for c in configs], [measured[c] for c in configs]
                ),
                "control": min(control) / measured[configs[0]],
            }
        )
    return results


def show(results):
    """Three tables: the choices, how well each family is ordered, and every candidate."""
    print(
        "| model | memory | candidates that fit | chosen | fastest measured | chosen / fastest |\n|---|---|---|---|---|---|"
    )
    for result in results:
        for row in result["choices"]:
            print(
                f"| {result['family']} | {row['limit'] / 1e6:.0f} MB | {row['fit']} | {words(row['chosen'])} | {words(row['fastest'])} | {row['ratio']:.2f} |"
            )
    print("\n| model | rank correlation | the same candidate again |\n|---|---|---|")
    for result in results:
        print(f"| {result['family']} | {result['correlation']:.2f} | {result['control']:.2f} |")
    print("\n| model | candidate | predicted, ms | measured, ms | measured / predicted |\n|---|---|---|---|---|")
    for result in results:
        for config, told, took in result["candidates"]:
            print(f"| {result['family']} | {words(config)} | {told * 1e3:.1f} | {took * 1e3:.1f} | {took / told:.2f} |")


def words(config):
    return f"{config['strategy']}, recompute {config['recompute']}, {config['micro_batch']} x {config['accumulation']}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5, help="steps of each candidate in a turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--families", default=",".join(MODELS), help="families of models, with commas between them")
    parser.add_argument("--deepspeed", action="store_true", help="DeepSpeed's candidates instead")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = set(args.families.split(",")) - set(MODELS)
    if unknown:
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    if args.steps < 2:
        parser.error("--steps is at least 2: the first one makes the optimizer's state and doesn't count")
    if args.out:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        results = on_rank(args)
        if dist.get_rank() == 0:
            Path(args.out).write_text(json.dumps(results))
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
        flags = [
            *(["--deepspeed"] if args.deepspeed else []),
            f"--steps={args.steps}",
            f"--turns={args.turns}",
            f"--families={args.families}",
            f"--out={out}",
        ]
        done = subprocess.run([*launcher, f"{__package__}.bench_planner", *flags], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        show(json.loads(out.read_text()))


if __name__ == "__main__":
    main()
