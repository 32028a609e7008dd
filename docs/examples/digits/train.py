"""Recognises handwritten digits: a small network on scikit-learn's images, on any number of processes.

    drivetrain launch --cpu --num-processes 2 docs/examples/digits/train.py

needs scikit-learn and matplotlib. Whatever the number of processes, one step sees 64 images. Stopped (Ctrl-C, SIGTERM, a crash) and started again, it
goes on where it was; --fresh starts over.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from drivetrain import Accelerator
from drivetrain.utils import set_seed, tqdm


def make_loaders(batch_size: int) -> tuple[DataLoader, DataLoader]:
    images, digits = load_digits(return_X_y=True)  # 1,797 images of 8 by 8 pixels, 0 to 16
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(digits))
    train, valid = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(valid, batch_size)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = [accelerator.gather_for_metrics(model(images).argmax(1) == digits) for images, digits in loader]
    model.train()
    return torch.cat(right).float().mean().item()


class Curves:
    """What the picture shows; saved with the training's state, so that it is whole after an interruption."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.accuracies: list[float] = []

    def state_dict(self) -> dict[str, list[float]]:
        return {"losses": self.losses, "accuracies": self.accuracies}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.losses, self.accuracies = state["losses"], state["accuracies"]


def draw(losses: list[float], accuracies: list[float], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", linewidth=1)
    axes.set(xlabel="step", ylabel="training loss", ylim=(0, None))
    steps = [(i + 1) * len(losses) / len(accuracies) for i in range(len(accuracies))]
    right = axes.twinx()
    right.plot(steps, [100 * a for a in accuracies], "o-", color="tab:orange")
    right.set(ylabel="validation accuracy in %", ylim=(None, 100))
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--output", type=Path, default=Path("runs/digits"))
    parser.add_argument("--fresh", action="store_true", help="don't go on from an earlier run's checkpoint")
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(log_with="jsonl", project_dir=args.output, resume=None if args.fresh else "auto")
    accelerator.init_trackers("digits", config={"lr": args.lr, "epochs": args.epochs})

    train_loader, valid_loader = accelerator.prepare(*make_loaders(batch_size=64 // accelerator.num_processes))
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train_loader))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    curves = Curves()
    accelerator.register_for_checkpointing(curves)
    for epoch in accelerator.epochs(args.epochs):
        progress = tqdm(train_loader, desc=f"epoch {epoch + 1}/{args.epochs}", unit=" steps")
        for images, digits in progress:
            loss = nn.functional.cross_entropy(model(images), digits)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            curves.losses.append(loss.item())
            accelerator.log({"loss": loss, "lr": scheduler.get_last_lr()[0]}, step=accelerator.step)
            progress.set_postfix(loss=f"{curves.losses[-1]:.3f}")
            if accelerator.should_stop:
                break
        else:
            curves.accuracies.append(evaluate(accelerator, model, valid_loader))
            accelerator.log({"accuracy": curves.accuracies[-1]}, step=accelerator.step)
            accelerator.print(f"epoch {epoch + 1}: validation accuracy {curves.accuracies[-1]:.1%}")
        accelerator.checkpoint(keep=2)

    if not curves.accuracies:
        accelerator.print("Stopped in the first epoch. Start it again: it goes on from there.")
        accelerator.end_training()
        return
    if accelerator.is_main_process:
        draw(curves.losses, curves.accuracies, args.output / "loss.png")
    accelerator.end_training()
    accelerator.print(
        f"\n{accelerator.num_processes} processes: {curves.accuracies[-1]:.1%} of {len(valid_loader.dataset)} images right.\n"
        f"  loss curve   {args.output / 'loss.png'}\n"
        f"  metrics      {next(args.output.rglob('metrics.jsonl'), 'none')}\n"
        f"  checkpoints  {args.output / 'checkpoints'}\n"
        "Next: launch with --num-processes 1 (and --fresh) and compare, or with --mixed-precision bf16: the script stays as it is;\n"
        "`drivetrain explain` says what was chosen here, and why; `drivetrain quickstart` writes a script to start from."
    )


if __name__ == "__main__":
    main()
