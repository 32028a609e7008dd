"""Writes the table of docs/training.md that sets windows' gradients beside Accelerate's.

    python docs/tools/accumulation_table.py

Each case is trained on two processes with the same code under both names. The table holds the largest difference of any gradient from that of the one
big batch in float64, relative to its norm.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.nn.functional import cross_entropy

RANKS, STEPS, BATCH = 2, 4, 4
#: Samples, and whether the loss is a mean over items, by what the table says.
CASES = {
    "64 rows: all windows and batches full": (64, False),
    "56 rows: the last window has 3 micro-batches": (56, False),
    "61 rows: the last batch is uneven, too": (61, False),
    "64 rows with 0 to 4 items each: the mean over items": (64, True),
    "61 rows with 0 to 4 items each": (61, True),
}
PAGE = Path(__file__).parents[1] / "training.md"
BEGIN, END = "<!-- accumulation: written by docs/tools/accumulation_table.py -->\n", "<!-- end of accumulation -->\n"


def rows_of(samples: int) -> dict[str, torch.Tensor]:
    """Features, labels, numbers of items."""
    g = torch.Generator().manual_seed(0)
    return {
        "x": torch.randn(samples, 6, generator=g),
        "y": torch.randint(0, 3, (samples,), generator=g),
        "n": torch.randint(0, 5, (samples,), generator=g),
    }


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def gradients(library: str, samples: int, by_items: bool) -> list[dict[str, Any]]:
    """On a rank: each window's gradient."""
    accelerator = importlib.import_module(library).Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    data = rows_of(samples)
    rows: Any = [{k: v[i] for k, v in data.items()} for i in range(samples)]
    model = make_model()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0), torch.utils.data.DataLoader(rows, batch_size=BATCH)
    )
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            each = cross_entropy(model(batch["x"]), batch["y"], reduction="none")
            if by_items:
                items = batch["n"].sum()
                loss = (each * batch["n"]).sum() / items.clamp(min=1)
                # What a user of either library writes: Accelerate knows no items.
                accelerator.backward(loss, **({"weight": items} if library == "drivetrain" else {}))
            else:
                accelerator.backward(each.mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), float("inf"))
                seen.append({"gradient": [p.grad.clone() for p in model.parameters()]})
            optimizer.step()
            optimizer.zero_grad()
    return seen


def error(by_rank: list[list[dict[str, Any]]], samples: int, by_items: bool) -> float:
    """The largest distance of a window's gradient from the big batch's, relative to that one's norm."""
    data, worst = rows_of(samples), 0.0
    size = RANKS * STEPS * BATCH
    for number, window in enumerate(zip(*by_rank, strict=True)):
        # What the window holds of the data set; rows that were repeated to fill batches up aren't part of it.
        rows = list(range(number * size, min((number + 1) * size, samples)))
        model = make_model().double()
        each = cross_entropy(model(data["x"][rows].double()), data["y"][rows], reduction="none")
        n = data["n"][rows].double() if by_items else torch.ones(len(rows), dtype=torch.float64)
        ((each * n).sum() / n.sum()).backward()
        exact = torch.cat([p.grad.flatten() for p in model.parameters()])
        found = torch.cat([g.flatten() for g in window[0]["gradient"]]).double()
        worst = max(worst, float((found - exact).norm() / exact.norm()))
    return worst


def _rank(rank: int, folder: str, port: int, libraries: list[str]) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true",
    )  # fmt: skip
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS)
    found = {(lib, case): gradients(lib, *CASES[case]) for lib in libraries for case in CASES}
    torch.save(found, f"{folder}/{rank}.pt")


def measure(libraries: list[str]) -> dict[tuple[str, str], float]:
    """The errors, by library and case."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, port, libraries), RANKS)
        ranks = [torch.load(f"{folder}/{rank}.pt") for rank in range(RANKS)]
    return {key: error([found[key] for found in ranks], *CASES[key[1]]) for key in ranks[0]}


def table(errors: dict[tuple[str, str], float]) -> str:
    lines = ["| two processes, windows of 4 micro-batches of 4 rows | here | Accelerate |", "|---|---|---|"]
    for case in CASES:
        cells = [f"{errors[lib, case]:.0e}" if errors[lib, case] < 1e-3 else f"{100 * errors[lib, case]:.0f} %"
                 for lib in ("drivetrain", "accelerate")]  # fmt: skip
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    if not rest:
        sys.exit(f"{PAGE.name} lacks the lines between which the table stands")
    PAGE.write_text(f"{head}{BEGIN}\n{table(measure(['drivetrain', 'accelerate']))}\n\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
