"""Image classification with OneCycleLR, checkpoints every few steps, and resuming in the middle of an epoch."""

import argparse
import json
import os
import re

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def get_dataloaders(batch_size):
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16.0
    dataset = TensorDataset(images, torch.tensor(digits.target))
    split = torch.Generator().manual_seed(0)
    train, evaluation = torch.utils.data.random_split(dataset, [1437, 360], generator=split)
    return (
        DataLoader(train, shuffle=True, batch_size=batch_size, drop_last=True),
        DataLoader(evaluation, shuffle=False, batch_size=batch_size),
    )


def evaluate(accelerator, model, dataloader):
    model.eval()
    correct = seen = 0
    for images, labels in dataloader:
        with torch.inference_mode():
            predictions = model(images).argmax(dim=-1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        correct += (predictions == labels).sum().item()
        seen += labels.numel()
    return correct / seen, seen


def training_function(args):
    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
        project_dir=args.output_dir,
    )
    set_seed(args.seed)
    train_dataloader, eval_dataloader = get_dataloaders(args.batch_size)
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr / 25)
    lr_scheduler = OneCycleLR(optimizer, max_lr=args.lr, epochs=args.num_epochs, steps_per_epoch=len(train_dataloader))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    overall_step, starting_epoch, resume_step = 0, 0, 0
    if args.resume_from_checkpoint:
        accelerator.print(f"Resuming from {args.resume_from_checkpoint}")
        accelerator.load_state(args.resume_from_checkpoint)
        kind, number = re.fullmatch(r"(epoch|step)_(\d+)", os.path.basename(args.resume_from_checkpoint)).groups()
        if kind == "epoch":
            starting_epoch = int(number) + 1
        else:
            starting_epoch, resume_step = divmod(int(number), len(train_dataloader))
        overall_step = starting_epoch * len(train_dataloader)

    losses = {}
    for epoch in range(starting_epoch, args.num_epochs):
        model.train()
        if hasattr(train_dataloader, "set_epoch"):
            train_dataloader.set_epoch(epoch)
        if args.resume_from_checkpoint and epoch == starting_epoch and resume_step > 0:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
            overall_step += resume_step
        else:
            active_dataloader = train_dataloader
        for images, labels in active_dataloader:
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            losses[overall_step] = accelerator.reduce(loss.detach(), reduction="mean").item()
            if args.checkpointing_steps.isdigit() and overall_step % int(args.checkpointing_steps) == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
        accuracy, seen = evaluate(accelerator, model, eval_dataloader)
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f}")
        if args.checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))

    accelerator.wait_for_everyone()
    accelerator.print(
        json.dumps({"losses": losses, "accuracy": accuracy, "seen": seen, "steps": overall_step, "first": min(losses)})
    )


def main():
    parser = argparse.ArgumentParser(description="Image classification with checkpoints.")
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true", help="Train on the CPU.")
    parser.add_argument("--checkpointing_steps", default="epoch", help="A number of steps, or 'epoch'.")
    parser.add_argument("--output_dir", default="runs")
    parser.add_argument("--resume_from_checkpoint", default=None, help="A folder named step_N or epoch_N.")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=7)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
