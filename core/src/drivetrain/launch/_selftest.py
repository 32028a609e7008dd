"""What the ranks of ``drivetrain test`` run."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Accelerator
from drivetrain.utils import broadcast_object_list, gather_object

_BATCH, _STEPS = 4, 4
#: Largest difference of a weight to plain PyTorch in full precision: rounding of sums in another order; and of narrower arithmetic.
_TOLERANCE = {"no": 1e-5, "fp32": 1e-5}
_NARROW = 5e-2

#: What a check returns: a clause that says what was seen.
Check = Callable[[Accelerator], str]


def main() -> None:
    """Run the checks in turn; an exception ends the rank, and the launcher ends the others."""
    accelerator = Accelerator(gradient_accumulation_steps=1)  # the reference steps after every batch
    _say(
        accelerator,
        f"{accelerator.num_processes} process(es) on {accelerator.device.type}, backend {accelerator.backend.spec.name}",
    )
    for check in (collectives, objects, training, checkpoint):
        start = time.monotonic()
        seen = check(accelerator)
        accelerator.wait_for_everyone()
        _say(accelerator, f"  ok  {check.__name__}: {seen} ({time.monotonic() - start:.1f} s)")
    _say(accelerator, "All is well.")
    if accelerator.num_processes == 1:
        _say(accelerator, "One process has nobody to talk to: `drivetrain test -n 2` tries more.")
    accelerator.end_training()


def collectives(accelerator: Accelerator) -> str:
    """Every process reaches every other, and sums are right."""
    world, rank = accelerator.num_processes, accelerator.process_index
    mine = torch.full((rank + 1,), float(rank), device=accelerator.device)
    padded = accelerator.pad_across_processes(mine, pad_index=-1)
    gathered = accelerator.gather(padded).tolist()
    wanted = [float(r) if i <= r else -1.0 for r in range(world) for i in range(world)]
    _require(gathered == wanted, f"gathered {gathered}, expected {wanted}")
    total = accelerator.reduce(torch.tensor([rank + 1.0], device=accelerator.device), reduction="sum").item()
    _require(total == world * (world + 1) / 2, f"the sum of ranks + 1 is {total}")
    return "gather, pad and reduce agree on all processes"


def objects(accelerator: Accelerator) -> str:
    """Python objects travel."""
    names = gather_object([f"rank {accelerator.process_index}"])
    _require(names == [f"rank {r}" for r in range(accelerator.num_processes)], f"gathered {names}")
    box = broadcast_object_list([{"from": accelerator.process_index}])
    _require(box == [{"from": 0}], f"broadcast {box}")
    return "gathered and broadcast"


def training(accelerator: Accelerator) -> str:
    """A few steps give the weights that plain PyTorch has after the same steps on the whole batch."""
    samples, targets = _data(accelerator.num_processes)
    model, optimizer, loader = _prepared(accelerator, samples, targets)
    _steps(accelerator, model, optimizer, loader)
    state = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return ""
    plain = _model()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for x, y in zip(
        samples.split(_BATCH * accelerator.num_processes),
        targets.split(_BATCH * accelerator.num_processes),
        strict=True,
    ):
        sgd.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        sgd.step()
    off = max((state[name].float().cpu() - value).abs().max().item() for name, value in plain.state_dict().items())
    limit = _TOLERANCE.get(accelerator.mixed_precision, _NARROW)
    _require(off <= limit, f"weights differ from plain PyTorch's by {off:.1e}, more than {limit:.0e}")
    return f"{_STEPS} steps equal plain PyTorch on the whole batch to {off:.0e}"


def checkpoint(accelerator: Accelerator) -> str:
    """A saved state comes back: the next steps are those that would have followed."""
    folder = Path(broadcast_object_list([tempfile.mkdtemp(prefix="drivetrain-test-")])[0])
    try:
        samples, targets = _data(accelerator.num_processes)
        model, optimizer, loader = _prepared(accelerator, samples, targets)
        _steps(accelerator, model, optimizer, loader)
        accelerator.save_state(str(folder / "state"))
        _steps(accelerator, model, optimizer, loader)
        after = {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}
        accelerator.load_state(str(folder / "state"))
        _steps(accelerator, model, optimizer, loader)
        again = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            off = max((again[k].float() - v.float()).abs().max().item() for k, v in after.items())
            _require(off <= _TOLERANCE["no"], f"after loading, training goes on differently by {off:.1e}")
        accelerator.wait_for_everyone()
    finally:
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
    return "saved, loaded, and gone on as before"


def _data(world: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    count = _BATCH * _STEPS * world
    return torch.randn(count, 8, generator=generator), torch.randn(count, 2, generator=generator)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def _prepared(accelerator: Accelerator, samples: torch.Tensor, targets: torch.Tensor) -> Any:
    accelerator.free_memory()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return accelerator.prepare(model, optimizer, DataLoader(TensorDataset(samples, targets), batch_size=_BATCH))


def _steps(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.mse_loss(model(x).float(), y))
            optimizer.step()
            optimizer.zero_grad()


def _require(fine: bool, what: str) -> None:
    if not fine:
        raise SystemExit(f"  failed: {what}")


def _say(accelerator: Accelerator, text: str) -> None:
    if accelerator.is_main_process:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
