"""Three trainings that take turns step by step in the same processes: through drivetrain, by hand, and by hand once more.

The third says how finely this machine can tell two trainings apart. A second launch makes them in the opposite order, since where a training's memory lies
matters. With one process nobody waits for anybody, and what the library itself costs is seen best.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from . import stats
from .table import Row

ROWS = 16
WARM_UP = 10
OURS, HAND, AGAIN = "drivetrain", "by hand", "by hand again"

#: A model and what does its step number i.
Training = tuple[torch.nn.Module, Callable[[int], None]]


class Block(torch.nn.Module):
    """A transformer's feed-forward block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.first, self.second = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        return x + self.second(torch.nn.functional.gelu(self.first(self.norm(x))))


def parts(args: argparse.Namespace) -> tuple[torch.nn.Sequential, torch.Tensor]:
    """Model and batches of this process: always equal. The first layer lets blocks begin with what was computed in the training's precision."""
    torch.manual_seed(0)
    blocks = (Block(args.width) for _ in range(args.depth))
    model = torch.nn.Sequential(torch.nn.Linear(args.width, args.width), *blocks, torch.nn.Linear(args.width, 1))
    return model, torch.randn(64, ROWS, args.width, generator=torch.Generator().manual_seed(1 + dist.get_rank()))


def parser(description: str) -> argparse.ArgumentParser:
    """A benchmark's command line, with what they have in common."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--processes", type=int, default=2)
    made.add_argument("--width", type=int, default=256)
    made.add_argument("--depth", type=int, default=6)
    made.add_argument("--steps", type=int, default=240, help="of each training in each of the two launches")
    made.add_argument("--reverse", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return made


def take_turns(
    args: argparse.Namespace,
    makers: Mapping[str, Callable[[], Training]],
    weights: Callable[[torch.nn.Module], list[torch.Tensor]],
) -> dict[str, object]:
    """Make the trainings, let them take turns, and compare the weights after the first steps: later, Adam makes much of the last bit of a gradient.

    Returns:
        Seconds of each step by training ("wall" and "busy"), the largest difference of any weight from the first loop by hand
        ("differences"), and what they sent in one step ("sent").
    """
    order = list(reversed(makers)) if args.reverse else list(makers)
    made = {name: makers[name]() for name in order}
    orders = list(itertools.permutations(order))
    wall: dict[str, list[float]] = {name: [] for name in order}
    busy: dict[str, list[float]] = {name: [] for name in order}
    differences: dict[str, float] = {}
    for i in range(WARM_UP + args.steps):
        if i == WARM_UP:
            hand = weights(made[HAND][0])
            for name, (model, _) in made.items():
                pairs = zip(weights(model), hand, strict=True)
                differences[name] = max(float((a - b).detach().abs().max()) for a, b in pairs)
        for name in orders[i % len(orders)]:
            dist.barrier()
            start, cpu = time.perf_counter(), time.process_time()
            made[name][1](i)
            cpu = time.process_time() - cpu
            dist.barrier()
            if i >= WARM_UP:
                wall[name].append(time.perf_counter() - start)
                busy[name].append(cpu)
    sent = {name: _collectives(lambda step=step: step(0)) for name, (_, step) in made.items()}
    return {"wall": wall, "busy": busy, "differences": differences, "sent": sent}


def _collectives(step: Callable[[], None]) -> dict[str, int]:
    with torch.profiler.profile() as profile:
        step()
    names = [e.name for e in profile.events() if e.name.startswith("c10d::")]
    return {name: names.count(name) for name in sorted(set(names))}


def tell(found: Mapping[str, object]) -> None:
    """From the first process to the one that started it."""
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)


def launch(module: str, processes: int, *more: str) -> dict:
    """Run a benchmark as ``--worker`` in new processes; what the first one had to tell."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*launcher, "-m", module, "--worker", *sys.argv[1:], *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((ln for ln in done.stdout.splitlines() if ln.startswith("RESULT ")), None)
    if line is None:
        sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
    return json.loads(line.removeprefix("RESULT "))


def compare(module: str, args: argparse.Namespace, title: str) -> list[Row]:
    """Both launches, and their table; weights must be equal, and what was sent too."""
    launches = [launch(module, args.processes), launch(module, args.processes, "--reverse")]
    for one in launches:
        assert max(one["differences"].values()) < 1e-5, one["differences"]
        assert one["sent"][OURS] == one["sent"][HAND] == one["sent"][AGAIN], one["sent"]
    counted = f"{args.processes} process{'es' if args.processes > 1 else ''}"
    title = f"{title}, {counted}, {args.depth} blocks of width {args.width}"
    rows = []
    for kind, label in (("wall", "wall time"), ("busy", "CPU time")):
        ours, hand, again = ([t for one in launches for t in one[kind][name]] for name in (OURS, HAND, AGAIN))
        rows += [
            Row(title, f"by hand, {label} per step", stats.median([1e6 * t for t in hand]), "us"),
            Row(title, f"drivetrain / by hand, {label}", stats.paired_ratio(ours, hand), target=1.01),
            Row(title, f"by hand again / by hand, {label}", stats.paired_ratio(again, hand)),
        ]
    return rows
