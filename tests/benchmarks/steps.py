"""Overhead per step: a process (or two) in which all peers train in turn, a few steps each.

``measure`` starts it and reads what it found. Times are CPU times of the process: what other programs do on the machine
doesn't count, and waiting for the other rank doesn't either. Wall times are kept beside them.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from . import stats
from .table import Row

# What the overhead of Drivetrain may be, as a part of the peer's.
TARGETS = {"accelerate": 0.25, "fabric": 0.5}


def measure(
    *, peers: list[str], processes: int, accumulation: int, blocks: int, steps: int, batches: int
) -> dict[str, Any]:
    """Let each of ``peers`` train ``steps`` steps in turn, ``blocks`` times; return their times per step in microseconds, and what they did."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        command = [
            sys.executable,
            *(launcher if processes > 1 else []),
            "-m",
            f"{__package__}.steps",
            "--out",
            str(out),
        ]
        command += ["--peers", *peers, "--accumulation", str(accumulation)]
        command += ["--blocks", str(blocks), "--steps", str(steps), "--batches", str(batches)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the steps benchmark failed:\n{done.stderr[-4000:]}")
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def rows(result: dict[str, Any], title: str) -> list[Row]:
    """The table's rows of one configuration."""
    cpu, wall = result["cpu"], result["wall"]
    hand = cpu["hand"]
    found = [Row(title, "hand-written loop, CPU time per step", stats.median(hand), "us")]
    others = [name for name in cpu if name != "hand"]
    for name in others:
        found.append(Row(title, f"{name}: overhead, CPU time", stats.overhead(cpu[name], hand), "us"))
        found.append(Row(title, f"{name}: overhead, wall time", stats.overhead(wall[name], wall["hand"]), "us"))
    if "drivetrain" in cpu:
        for name, target in TARGETS.items():
            if name in cpu:
                interval = stats.overhead_ratio(cpu["drivetrain"], cpu[name], hand)
                found.append(Row(title, f"drivetrain's overhead / {name}'s", interval, target=target))
    return found


def differences(result: dict[str, Any]) -> list[str]:
    """One sentence for each thing in which a peer did other work than the hand-written loop."""
    found = []
    for name, facts in result["facts"].items():
        hand = result["facts"]["hand"]
        if facts["weight_error"] > 1e-5:
            found.append(f"{name}: weights differ by {facts['weight_error']:.1e} after one epoch")
        if facts["collectives"] != hand["collectives"]:
            found.append(f"{name}: collectives {facts['collectives']}, the hand-written loop {hand['collectives']}")
        ours, theirs = Counter(facts["operators"]), Counter(hand["operators"])
        if extra := {op: n for op in sorted(ours | theirs) if (n := ours[op] - theirs[op])}:
            found.append(f"{name}: operators more or fewer than by hand, per {result['epoch']} steps: {extra}")
    return found


def main() -> None:
    """The measuring process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--peers", nargs="+", required=True)
    parser.add_argument("--accumulation", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batches", type=int, required=True)
    args = parser.parse_args()

    import torch

    from . import peers

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    world_size, rank = peers.process_group()
    if args.batches % args.accumulation:
        raise SystemExit("batches must be a multiple of accumulation")
    task = peers.Task(args.accumulation, args.batches, world_size, rank)
    built = {name: peers.build(name, task) for name in args.peers}
    weights = {name: _weights_after_one_epoch(peer) for name, peer in built.items()}
    facts = {
        name: {
            "weight_error": max(
                (a - b).abs().max().item() for a, b in zip(weights[name], weights["hand"], strict=True)
            ),
            **_work(peer),
        }
        for name, peer in built.items()
    }
    cpu, wall = _interleave(built, args.blocks, args.steps, world_size)
    if rank == 0:
        Path(args.out).write_text(json.dumps({"cpu": cpu, "wall": wall, "facts": facts, "epoch": args.batches}))


def _interleave(built: dict[str, Any], blocks: int, steps: int, world_size: int) -> tuple[dict, dict]:
    import torch.distributed as dist

    cpu: dict[str, list[float]] = {name: [] for name in built}
    wall: dict[str, list[float]] = {name: [] for name in built}
    running = {name: _forever(peer) for name, peer in built.items()}
    shuffle = random.Random(0)  # the same order on every rank
    # What importing made is no part of the loops: keep the collector from walking over it in somebody's turn.
    gc.collect()
    gc.freeze()
    for _ in range(blocks):
        for name in shuffle.sample(list(built), len(built)):
            turn = islice(running[name], steps)
            if world_size > 1:
                dist.barrier()
            started_wall, started_cpu = time.perf_counter(), time.process_time()
            deque(turn, maxlen=0)
            cpu[name].append((time.process_time() - started_cpu) / steps * 1e6)
            wall[name].append((time.perf_counter() - started_wall) / steps * 1e6)
    return cpu, wall


def _forever(peer: Any) -> Iterator[None]:
    while True:
        yield from peer.epoch()


def _weights_after_one_epoch(peer: Any) -> list[Any]:
    deque(peer.epoch(), maxlen=0)
    return [parameter.detach().clone() for parameter in peer.model.parameters()]


def _work(peer: Any) -> dict[str, dict[str, int]]:
    """How often each operator and collective ran in one epoch."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        deque(peer.epoch(), maxlen=0)
    counts = Counter(event.name for event in profiler.events())
    return {
        "operators": {name: n for name, n in sorted(counts.items()) if name.startswith("aten::")},
        "collectives": {name: n for name, n in sorted(counts.items()) if name.startswith("c10d::")},
    }


if __name__ == "__main__":
    main()
