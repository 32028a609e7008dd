"""Mixed precision with the options objects: scaler, autocast, DDP, process group, data loader and project folders."""

import argparse
import json
import os
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    set_seed,
)
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.head = nn.Linear(48, 4)
        self.unused = nn.Linear(3, 3)

    def forward(self, inputs):
        return self.head(self.body(inputs))


def make_dataset():
    generator = torch.Generator().manual_seed(17)
    inputs = torch.randn(192, 12, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--mixed_precision", default="bf16", choices=["no", "fp16", "bf16"])
    parser.add_argument("--project_dir", default="runs")
    parser.add_argument("--num_epochs", type=int, default=4)
    args = parser.parse_args()

    accelerator = Accelerator(
        cpu=args.cpu,
        mixed_precision=args.mixed_precision,
        dataloader_config=DataLoaderConfiguration(split_batches=True, non_blocking=True),
        project_config=ProjectConfiguration(
            project_dir=args.project_dir, automatic_checkpoint_naming=True, total_limit=2
        ),
        kwargs_handlers=[
            GradScalerKwargs(init_scale=1024.0, growth_interval=100),
            AutocastKwargs(cache_enabled=True),
            DistributedDataParallelKwargs(find_unused_parameters=True, gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=timedelta(seconds=120)),
        ],
    )
    set_seed(2)
    dataloader = DataLoader(make_dataset(), batch_size=32, num_workers=0, pin_memory=False)
    model = Network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)

    skipped = 0
    for _ in range(args.num_epochs):
        for inputs, labels in dataloader:
            logits = model(inputs)
            with accelerator.autocast():
                loss = nn.functional.cross_entropy(logits, labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            skipped += int(accelerator.optimizer_step_was_skipped)
        accelerator.save_state()

    final = accelerator.reduce(loss.detach().float(), reduction="mean").item()
    accelerator.wait_for_everyone()
    output_dir = os.path.join(args.project_dir, "final")
    accelerator.save_model(model, output_dir)
    accelerator.wait_for_everyone()
    saved = load_file(os.path.join(output_dir, "model.safetensors"))
    current = accelerator.unwrap_model(model).state_dict()
    same = sorted(saved) == sorted(current) and all(torch.equal(saved[k], current[k].cpu()) for k in saved)
    state_dict_dtypes = sorted({str(t.dtype) for t in accelerator.get_state_dict(model).values()})
    accelerator.print(
        json.dumps(
            {
                "loss": final,
                "skipped": skipped,
                "output_dtype": str(logits.dtype),
                "same": same,
                "dtypes": state_dict_dtypes,
                "mixed_precision": accelerator.mixed_precision,
                "batch_rows": inputs.shape[0],
                "checkpoints": sorted(os.listdir(os.path.join(args.project_dir, "checkpoints"))),
            }
        )
    )


if __name__ == "__main__":
    main()
