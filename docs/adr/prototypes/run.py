"""Run the prototype on two CPU ranks and print its differences to plain PyTorch.

    python docs/adr/prototypes/run.py [--backends deepspeed-2 ...] [--parity-only]

It needs DeepSpeed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from drivetrain.errors import DrivetrainError
from drivetrain.testing.distributions import write_plugin
from drivetrain.testing.training import Case, Result, reference
from drivetrain.testing.workers import RemoteError, WorkerPool

HERE = Path(__file__).parent
WORLD = 2
TOLERANCE = 5e-6
BACKENDS = {f"deepspeed-{n}": ("deepspeed-prototype", n) for n in range(4)}
REFUSED = {
    ("deepspeed-0", check): "At stage 0 the engine's fp16 optimizer is another one" for check in ("fp16", "overflow")
}
REFUSED |= {(f"deepspeed-{n}", "used_optimizer"): "The optimizer must be a new one" for n in range(4)}
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore", "DRIVETRAIN_PLUGINS": "prototypes,fsdp"}


def install(folder: Path) -> None:
    """Write the prototypes as a distribution that this process and its children have."""
    files = {f.name: f.read_text(encoding="utf-8") for f in HERE.glob("prototype_*.py")}
    write_plugin(folder, "prototypes", (HERE / "plugin.py").read_text(encoding="utf-8"), files=files)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def largest(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """The largest difference between tensors by name; infinite where names differ, NaN where there are none."""
    if not a or not b:
        return float("nan")
    if a.keys() != b.keys():
        return float("inf")
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a)


def differences(found: Result, expected: Result) -> dict[str, float]:
    """Of each kind of number."""
    result = {}
    for kind in ("losses", "norms", "rates"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        result[kind] = (
            max(abs(x - y) for x, y in zip(ours, theirs, strict=True)) if len(ours) == len(theirs) else float("inf")
        )
    result["gradients"] = largest(found.gradients, expected.gradients)
    result["weights"] = largest(found.weights, expected.weights)
    return result


class Checks:
    """Runs checks of one backend after another, and keeps what failed.

    Args:
        pool: Live ranks.
        directory: For checkpoints.
    """

    def __init__(self, pool: WorkerPool, directory: Path) -> None:
        import prototype_checks

        self.pool = pool
        self.directory = directory
        self.on_rank = prototype_checks
        self.failures = 0

    def parity(self, name: str) -> Iterator[tuple[str, ...]]:
        """One row for each combination."""
        for accumulation, weighted, max_norm in itertools.product((1, 4), (False, True), (None, 0.5)):
            case = Case(accumulation=accumulation, weighted=weighted, max_norm=max_norm)
            results = self.pool.run(self.on_rank.parity, case, *BACKENDS[name])
            expected = reference(case, WORLD)
            figures = differences(results[0], expected)
            figures["ranks"] = largest(results[0].weights, results[1].weights)
            self.failures += not all(v <= TOLERANCE for k, v in figures.items() if k != "gradients" or v == v)
            row = (name, str(accumulation), "yes" if weighted else "", "" if max_norm is None else str(max_norm))
            yield (*row, *(number(v) for v in figures.values()))

    def behaviour(self, name: str) -> Iterator[tuple[str, str, str]]:
        """Name, what is checked, what was found."""
        for check in (
            self.metrics,
            self.stream,
            self.by_hand,
            self.two_losses,
            self.used_optimizer,
            self.bf16,
            self.fp16,
            self.overflow,
            self.resume,
            self.elsewhere,
            self.across,
        ):
            refusal = REFUSED.get((name, check.__name__))
            try:
                found = check(name)
                self.failures += refusal is not None
            except RemoteError as error:
                refused = refusal is not None and all(refusal in text for text in error.failures.values())
                found = f"refused: {refusal}" if refused else f"WRONG: {error}"
                self.failures += not refused
            except (AssertionError, DrivetrainError) as error:
                found = f"WRONG: {error}"
                self.failures += 1
            yield name, str(check.__doc__), found

    def metrics(self, name: str) -> str:
        """gather_for_metrics, 45 samples"""
        seen = self.pool.run(self.on_rank.metrics, Case(), *BACKENDS[name])
        assert all(s == list(range(45)) for s in seen), seen
        return "each sample once, in order"

    def stream(self, name: str) -> str:
        """windows of 4 of a stream of unknown length, corrected at their end"""
        case = Case(accumulation=4, sized=False)
        found = self.pool.run(self.on_rank.parity, case, *BACKENDS[name])[0]
        figures = differences(found, reference(case, WORLD))
        return self.close(max(v for v in figures.values() if v == v))

    def by_hand(self, name: str) -> str:
        """windows of 4 cut by the script"""
        case = Case(accumulation=4, samples=64, epochs=1)
        weights = self.pool.run(self.on_rank.by_hand, case, *BACKENDS[name])[0]
        return self.close(largest(weights, reference(case, WORLD).weights))

    def two_losses(self, name: str) -> str:
        """two backward() in each micro-batch"""
        case = Case(accumulation=4, epochs=1)
        weights = self.pool.run(self.on_rank.two_losses, case, *BACKENDS[name])[0]
        return self.close(largest(weights, reference(case, WORLD).weights))

    def used_optimizer(self, name: str) -> str:
        """optimizer that has a state already"""
        return self.close(max(self.pool.run(self.on_rank.used_optimizer, Case(), *BACKENDS[name])))

    def bf16(self, name: str) -> str:
        """bf16 with item weights: losses against fp32"""
        return self.half(name, "bf16")

    def fp16(self, name: str) -> str:
        """fp16 with item weights: losses against fp32"""
        return self.half(name, "fp16")

    def half(self, name: str, precision: str) -> str:
        case = Case(accumulation=4, weighted=True)
        found = self.pool.run(self.on_rank.parity, case, *BACKENDS[name], mixed_precision=precision)[0]
        expected = reference(case, WORLD).losses
        return self.close(max(abs(a - b) for a, b in zip(found.losses, expected, strict=True)), 2e-2)

    def overflow(self, name: str) -> str:
        """fp16, an infinity on one rank"""
        found = self.pool.run(self.on_rank.overflow, Case(), *BACKENDS[name])
        assert found[0] == found[1], found
        scale = found[0]["scale"]
        assert found[0]["skipped"] == [False, True, False], found[0]
        assert found[0]["moved"] == [True, False, True] and found[0]["steps"] == [1, 1, 2], found[0]
        assert scale[1] == scale[0] / 2 == scale[2], found[0]
        return "both ranks skip that step alone and halve the scale"

    def resume(self, name: str) -> str:
        """save_state, load_state into fresh objects, second epoch"""
        case, path = Case(accumulation=4), str(self.directory / name)
        self.pool.run(self.on_rank.save, case, *BACKENDS[name], path)
        weights = self.pool.run(self.on_rank.resume, case, *BACKENDS[name], path)[0]
        return self.close(largest(weights, reference(case, WORLD).weights))

    def elsewhere(self, name: str) -> str:
        """the same checkpoint, loaded by one process with the single backend"""
        case = Case(accumulation=4, batch_size=4 * WORLD)
        weights = self.on_rank.resume(case, "single", None, str(self.directory / name))
        return self.close(largest(weights, reference(case, 1).weights))

    def across(self, name: str) -> str:
        """the same checkpoint, loaded on two ranks by the fsdp plugin"""
        case = Case(accumulation=4)
        weights = self.pool.run(self.on_rank.resume, case, "fsdp", None, str(self.directory / name))[0]
        return self.close(largest(weights, reference(case, WORLD).weights))

    def close(self, difference: float, tolerance: float = TOLERANCE) -> str:
        assert difference <= tolerance, number(difference)
        return number(difference)


def number(value: float) -> str:
    """For a cell."""
    return "" if value != value else "0" if value == 0 else f"{value:.0e}"


def main() -> int:
    """Print two tables; exit status 1 if a number is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--parity-only", action="store_true")
    arguments = parser.parse_args()
    names = arguments.backends
    console = Console(width=150)
    if importlib.util.find_spec("deepspeed") is None:
        console.print("deepspeed isn't installed")
        return 1
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as checkpoints:
        install(Path(folder))
        with WorkerPool(WORLD, environment=ENVIRONMENT, timeout=120) as pool:
            checks = Checks(pool, Path(checkpoints))
            kinds = ("losses", "norms", "rates", "gradients", "weights", "between ranks")
            table = Table("backend", "accumulation", "weighted", "clip", *kinds)
            for name in names:
                for row in checks.parity(name):
                    table.add_row(*row)
            console.print(table)
            if not arguments.parity_only:
                table = Table("backend", "check", "found")
                for name in names:
                    for row in checks.behaviour(name):
                        table.add_row(*row)
                console.print(table)
    console.print(f"{checks.failures} wrong" if checks.failures else "all as expected")
    return int(checks.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
