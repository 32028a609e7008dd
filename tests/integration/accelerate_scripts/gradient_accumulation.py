"""Gradient accumulation with clipping at the window's end, and a last window that is shorter than the others."""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

MAX_GRAD_NORM = 0.5


def build_model():
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))


def make_dataset(size):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(size, 6, generator=generator)
    targets = torch.sin(inputs.sum(1, keepdim=True)) + 0.1 * torch.randn(size, 1, generator=generator)
    return TensorDataset(inputs, targets)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--mixed_precision", default="no")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--num_samples", type=int, default=150)
    parser.add_argument("--num_epochs", type=int, default=3)
    args = parser.parse_args()

    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
    )
    set_seed(0)
    dataset = make_dataset(args.num_samples)
    train_dataloader = DataLoader(dataset, batch_size=8)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.9)
    model, optimizer, train_dataloader, scheduler = accelerator.prepare(model, optimizer, train_dataloader, scheduler)

    updates, norms = 0, []
    for _ in range(args.num_epochs):
        model.train()
        for inputs, targets in train_dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)))
                    updates += 1
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    model.eval()
    inputs, targets = (tensor.to(accelerator.device) for tensor in dataset.tensors)
    with torch.no_grad():
        final_loss = nn.functional.mse_loss(accelerator.unwrap_model(model)(inputs), targets).item()
    accelerator.print(
        json.dumps({"loss": final_loss, "updates": updates, "norms": norms, "lr": scheduler.get_last_lr()[0]})
    )


if __name__ == "__main__":
    main()
