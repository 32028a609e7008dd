"""Early stopping: one process sees that the validation loss stopped falling, all processes stop."""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


class EarlyStopping:
    def __init__(self, patience, min_delta):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.count = float("inf"), 0

    def should_stop(self, loss):
        if loss < self.best - self.min_delta:
            self.best, self.count = loss, 0
        else:
            self.count += 1
        return self.count >= self.patience


def build_model():
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def make_dataset(size, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 8, generator=generator)
    return TensorDataset(
        inputs, inputs[:, :2].sum(1, keepdim=True).sin() + 0.3 * torch.randn(size, 1, generator=generator)
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--max_epochs", type=int, default=60)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--min_delta", type=float, default=0.002)
    args = parser.parse_args()

    accelerator = Accelerator(cpu=args.cpu)
    set_seed(4)
    train_dataloader = DataLoader(make_dataset(128, 21), batch_size=16)
    eval_dataloader = DataLoader(make_dataset(64, 22), batch_size=16)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    stopping = EarlyStopping(args.patience, args.min_delta)

    for epoch in range(args.max_epochs):
        model.train()
        for inputs, targets in train_dataloader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()

        model.eval()
        rows = []
        for inputs, targets in eval_dataloader:
            with torch.no_grad():
                row_losses = (model(inputs) - targets).pow(2).squeeze(1)
            rows.append(accelerator.gather_for_metrics(row_losses))
        eval_loss = torch.cat(rows).mean().item()

        # Only the last process decides; the others learn of it through the trigger.
        if accelerator.is_last_process and stopping.should_stop(eval_loss):
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break

    epochs = accelerator.gather(torch.tensor([epoch], device=accelerator.device)).tolist()
    again = accelerator.check_trigger()
    accelerator.print(json.dumps({"stopped": epochs, "eval_loss": eval_loss, "trigger_after": again}))


if __name__ == "__main__":
    main()
