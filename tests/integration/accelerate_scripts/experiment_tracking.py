"""Experiment tracking: TensorBoard and a tracker of one's own, hyperparameters, metrics per epoch."""

import argparse
import json
import os

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset


class LinesTracker(GeneralTracker):
    """Appends each call to a file, one JSON object a line."""

    name = "lines"
    requires_logging_directory = True

    def __init__(self, run_name, logging_dir):
        super().__init__()
        self.path = os.path.join(logging_dir, f"{run_name}.jsonl")
        self.file = None

    @on_main_process
    def start(self):
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        self.file = open(self.path, "w")

    @property
    def tracker(self):
        return self.file

    @on_main_process
    def store_init_configuration(self, values):
        self.file.write(json.dumps({"config": values}) + "\n")

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.file.write(json.dumps({"step": step, **values}) + "\n")

    @on_main_process
    def finish(self):
        self.file.close()


def build_model():
    return torch.nn.Linear(4, 1)


def make_dataset():
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(96, 4, generator=generator)
    return TensorDataset(inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--with_tracking", action="store_true")
    parser.add_argument("--project_dir", default="runs")
    parser.add_argument("--num_epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    logging_dir = os.path.join(args.project_dir, "logs")
    if args.with_tracking:
        accelerator = Accelerator(
            cpu=args.cpu,
            log_with=["tensorboard", LinesTracker("mine", logging_dir)],
            project_config=ProjectConfiguration(project_dir=args.project_dir, logging_dir=logging_dir),
        )
        accelerator.init_trackers("experiment", config={"lr": args.lr, "num_epochs": args.num_epochs, "cpu": args.cpu})
    else:
        accelerator = Accelerator(cpu=args.cpu)
    set_seed(0)

    train_dataloader = DataLoader(make_dataset(), batch_size=12)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    model, optimizer, train_dataloader = accelerator.prepare(model, optimizer, train_dataloader)

    history = []
    for epoch in range(args.num_epochs):
        total_loss = torch.zeros((), device=accelerator.device)
        for inputs, targets in train_dataloader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            total_loss += loss.detach()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        epoch_loss = accelerator.reduce(total_loss, reduction="mean").item() / len(train_dataloader)
        history.append(epoch_loss)
        if args.with_tracking:
            accelerator.log({"train_loss": epoch_loss, "epoch": epoch}, step=epoch)

    if args.with_tracking:
        writer = accelerator.get_tracker("tensorboard", unwrap=True)
        if accelerator.is_main_process:
            writer.add_text("note", "written by the script itself", 0)
        accelerator.log({"final_loss": history[-1]}, step=args.num_epochs)
        accelerator.end_training()
    accelerator.print(json.dumps({"history": history}))


if __name__ == "__main__":
    main()
