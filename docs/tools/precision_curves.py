"""Trains a small transformer on the source of Python's standard library in each precision, and draws the losses.

    python docs/tools/precision_curves.py --out docs/images/precision-curves.svg

writes the picture and the table of docs/training.md; a few minutes on two cores. Tests run a short version.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

PRECISIONS = ("no", "bf16", "fp16", "fp8")
#: How far the loss at the end may lie above or below that of full precision.
BOUNDS = {"bf16": 0.02, "fp16": 0.02, "fp8": 0.05}
CONTEXT, WIDTH, HEADS, LAYERS, VOCABULARY = 64, 64, 4, 2, 128


class Block(nn.Module):
    """Attention and two linear layers, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Says which character comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.tokens(text) + self.places(torch.arange(text.shape[1], device=text.device))
        return self.head(self.norm(self.blocks(x)))


def read_text() -> torch.Tensor:
    """The source of the standard library's modules, as one row of ASCII codes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    raw = b"".join(f.read_bytes() for f in files)
    return torch.tensor(bytearray(b if b < VOCABULARY else ord("?") for b in raw), dtype=torch.uint8)


class Windows(torch.utils.data.Dataset[Any]):
    """Stretches of a text, at places drawn with a seed."""

    def __init__(self, text: torch.Tensor, count: int, seed: int) -> None:
        self.text = text
        generator = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(0, len(text) - CONTEXT - 1, (count,), generator=generator).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = self.starts[index]
        return self.text[start : start + CONTEXT + 1].long()


@dataclass(slots=True)
class Run:
    """Losses of one training."""

    training: list[float]
    held_out: float
    seconds: float


def train(precision: str, seed: int, steps: int, text: torch.Tensor, batch_size: int = 16) -> Run:
    """One training, with warm-up, clipping and two micro-batches per step."""
    from drivetrain import Accelerator

    handlers = []
    if precision == "fp8":
        from drivetrain import AORecipeKwargs

        handlers = [AORecipeKwargs(emulate=True)]
    started = time.perf_counter()
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=2, kwargs_handlers=handlers
    )
    torch.manual_seed(seed)
    model: Any = Transformer()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps + 1)
    held_out = text[-len(text) // 20 :]
    loader: Any = torch.utils.data.DataLoader(
        Windows(text[: -len(text) // 20], steps * batch_size, seed), batch_size=batch_size // 2
    )
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    losses: list[torch.Tensor] = []
    for rows in loader:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    with torch.no_grad():
        rows = torch.stack([Windows(held_out, 256, 0)[i] for i in range(256)])
        final = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).item()
    accelerator.end_training()
    pairs = torch.stack(losses).view(-1, 2).mean(1)
    return Run(pairs.tolist(), final, time.perf_counter() - started)


def train_all(
    steps: int, seeds: Sequence[int], precisions: Sequence[str] = PRECISIONS, batch_size: int = 16
) -> dict[str, list[Run]]:
    """All trainings, by precision."""
    text = read_text()
    return {p: [train(p, seed, steps, text, batch_size) for seed in seeds] for p in precisions}


def differences(runs: dict[str, list[Run]]) -> dict[str, list[float]]:
    """For each precision and seed, how far the loss on held-out text lies from that of full precision, relatively."""
    exact = [run.held_out for run in runs["no"]]
    return {
        p: [run.held_out / full - 1 for run, full in zip(some, exact, strict=True)]
        for p, some in runs.items()
        if p != "no"
    }


def table(runs: dict[str, list[Run]]) -> str:
    """The table of docs/training.md."""
    apart = differences(runs)
    lines = [
        "| precision | loss on held-out text, by seed | from full precision, by seed | bound |",
        "|---|---|---|---|",
    ]
    for precision, some in runs.items():
        losses = ", ".join(f"{run.held_out:.4f}" for run in some)
        off = ", ".join(f"{100 * d:+.2f} %" for d in apart.get(precision, [])) or "-"
        bound = f"{100 * BOUNDS[precision]:.0f} %" if precision in BOUNDS else "-"
        lines.append(f'| `"{precision}"` | {losses} | {off} | {bound} |')
    return "\n".join(lines)


def draw(runs: dict[str, list[Run]], out: Path) -> None:
    """The curves, each the mean over seeds of a running mean, and their distances from full precision's."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "drivetrain"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6))
    exact = _curve(runs["no"])
    for precision, some in runs.items():
        curve = _curve(some)
        steps = range(len(curve))
        left.plot(steps, curve, label={"no": "fp32"}.get(precision, precision), linewidth=1)
        if precision != "no":
            apart = [100 * (a / b - 1) for a, b in zip(curve, exact, strict=True)]
            right.plot(steps, apart, label=precision, linewidth=1)
    left.set(xlabel="optimizer step", ylabel="training loss", title=f"mean of {len(runs['no'])} seeds")
    right.set(xlabel="optimizer step", ylabel="from fp32, in %", title="distance from full precision")
    for axes in (left, right):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def _curve(runs: list[Run], width: int = 20) -> list[float]:
    means = [statistics.fmean(values) for values in zip(*(run.training for run in runs), strict=True)]
    return [statistics.fmean(means[max(i - width, 0) : i + 1]) for i in range(len(means))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the picture here")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runs = train_all(args.steps, range(args.seeds))
    print(table(runs))
    for precision, some in runs.items():
        print(f"{precision}: {statistics.fmean(r.seconds for r in some):.0f} s a training")
    if args.out:
        draw(runs, args.out)
    worst = {p: max(map(abs, values)) for p, values in differences(runs).items()}
    if any(worst[p] > BOUNDS[p] for p in worst):
        raise SystemExit(f"out of bounds: {worst}")


if __name__ == "__main__":
    main()
