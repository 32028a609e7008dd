"""``python -m tests.benchmarks`` (or ``nox -s bench``): run the benchmarks, print one table."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from . import MODULES, processes, steps
from .table import Row, render

SECTIONS = ("steps", "import", "cli", "launch", "notes")


@dataclass(slots=True)
class Report:
    """What was measured so far. A section that fails doesn't take the others' results with it."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def section(self, title: str) -> Iterator[None]:
        """Say on stderr what is measured and what came out; keep the error if it fails."""
        print(f"[{title}]", file=sys.stderr, flush=True)
        before = len(self.rows)
        try:
            yield
        except RuntimeError as error:
            self.failures.append(f"{title}: {error}")
        print(render(self.rows[before:]), file=sys.stderr, flush=True)

    def to_dict(self) -> dict[str, object]:
        """The report as plain data."""
        rows = [row.to_dict() for row in self.rows]
        return {"machine": _machine(), "rows": rows, "notes": self.notes, "failures": self.failures}


def main() -> int:
    """Run the chosen sections; the exit status is 1 if one fails, or misses a target with ``--strict``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--peers", nargs="+", help="peers of the steps benchmark (default: all that are installed)")
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2], help="for the steps benchmark")
    parser.add_argument("--accumulation", nargs="+", type=int, default=[1, 4], help="for the steps benchmark")
    parser.add_argument("--blocks", type=int, default=300, help="turns of each peer in the steps benchmark")
    parser.add_argument("--steps", type=int, default=20, help="steps in a turn")
    parser.add_argument("--batches", type=int, default=400, help="steps in an epoch")
    parser.add_argument("--repeats", type=int, default=12, help="runs of each process")
    parser.add_argument("--launches", type=int, default=8, help="launches of each kind")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--strict", action="store_true", help="fail if a target is missed")
    args = parser.parse_args()

    # One thread everywhere, as the launchers set it for their children.
    os.environ["OMP_NUM_THREADS"] = "1"
    report = _measure(args)
    print(_machine())
    print(render(report.rows))
    for title, texts in (("Other work than the hand-written loop's", report.notes), ("FAILED", report.failures)):
        if texts:
            print(f"\n{title}:\n  " + "\n  ".join(texts))
    if args.json:
        args.json.write_text(json.dumps(report.to_dict(), indent=1))
    missed = args.strict and any(row.holds is False for row in report.rows)
    return int(bool(missed or report.failures))


def _measure(args: argparse.Namespace) -> Report:
    report = Report()
    if "steps" in args.only:
        for count, accumulation in product(args.processes, args.accumulation):
            title = f"per step, {count} process{'es' if count > 1 else ''}, accumulation {accumulation}"
            with report.section(title):
                result = steps.measure(
                    peers=_peers(args.peers),
                    processes=count,
                    accumulation=accumulation,
                    blocks=args.blocks,
                    steps=args.steps,
                    batches=args.batches,
                )
                report.rows += steps.rows(result, title)
                report.notes += [f"{title}: {text}" for text in steps.differences(result)]
    for name, measure, repeats in (
        ("import", processes.construction, args.repeats),
        ("cli", processes.command_line, args.repeats),
        ("launch", processes.launch, args.launches),
        ("notes", processes.notes, args.repeats),
    ):
        if name in args.only:
            with report.section(name):
                report.rows += measure(repeats)
    return report


def _peers(chosen: list[str] | None) -> list[str]:
    names = processes.available(MODULES)
    return names if chosen is None else [name for name in names if name in {"hand", *chosen}]


def _machine() -> str:
    packages = ("torch", "accelerate", "lightning-fabric", "drivetrain")
    found = []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} not installed")
    return (
        f"Python {platform.python_version()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; {', '.join(found)}"
    )


if __name__ == "__main__":
    sys.exit(main())
