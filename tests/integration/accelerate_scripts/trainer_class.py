"""A trainer class that uses much of the surface: state, ordering of processes, logging, collectives, custom state."""

import argparse
import json
import logging
import os

import torch
from accelerate import Accelerator, DistributedType
from accelerate.logging import get_logger
from accelerate.utils import (
    GradientAccumulationPlugin,
    broadcast_object_list,
    extract_model_from_parallel,
    find_executable_batch_size,
    gather_object,
    is_bf16_available,
    is_tensorboard_available,
    is_wandb_available,
    pad_across_processes,
    set_seed,
    tqdm,
)
from torch.utils.data import DataLoader, TensorDataset

logger = get_logger(__name__)


def build_model():
    return torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))


def make_dataset(size=160):
    generator = torch.Generator().manual_seed(31)
    inputs = torch.randn(size, 10, generator=generator)
    return TensorDataset(inputs, inputs.pow(2).mean(1, keepdim=True))


class RunningAverage:
    """Part of the checkpoint through `register_for_checkpointing`."""

    def __init__(self):
        self.value, self.count = 0.0, 0

    def update(self, value):
        self.count += 1
        self.value += (value - self.value) / self.count

    def state_dict(self):
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state):
        self.value, self.count = state["value"], state["count"]


class Trainer:
    def __init__(self, args):
        self.args = args
        self.accelerator = Accelerator(
            cpu=args.cpu,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2),
            step_scheduler_with_optimizer=True,
            project_dir=args.output_dir,
        )
        set_seed(args.seed)
        with self.accelerator.main_process_first():
            self.dataset = make_dataset()
        with self.accelerator.local_main_process_first():
            os.makedirs(args.output_dir, exist_ok=True)
        self.model = build_model()
        self.average = RunningAverage()
        self.accelerator.register_for_checkpointing(self.average)
        logger.info("the state: %s", self.accelerator.state, main_process_only=True)

    @property
    def is_distributed(self):
        return self.accelerator.distributed_type != DistributedType.NO

    def train(self, batch_size):
        accelerator = self.accelerator
        accelerator.free_memory()
        if accelerator.num_processes * batch_size > 16:
            raise RuntimeError("CUDA out of memory. Tried to allocate too much")
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        dataloader = DataLoader(self.dataset, batch_size=batch_size)
        model, self.optimizer, dataloader = accelerator.prepare(self.model, self.optimizer, dataloader)
        progress = tqdm(total=len(dataloader) * self.args.num_epochs, desc="train")
        self.updates = 0
        for _ in range(self.args.num_epochs):
            for inputs, targets in dataloader:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_value_(model.parameters(), 0.05)
                        self.updates += 1
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                progress.update(1)
                self.average.update(accelerator.gather(loss.detach().reshape(1)).mean().item())
        progress.close()
        self.model_wrapped = model
        return batch_size

    def save_and_restore(self):
        accelerator = self.accelerator
        folder = os.path.join(self.args.output_dir, "last")
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        kept = self.average.value
        self.average.value = -1.0
        before = [p.detach().clone() for p in self.model_wrapped.parameters()]
        with torch.no_grad():
            for p in self.model_wrapped.parameters():
                p.zero_()
        accelerator.load_state(folder)
        restored = all(torch.equal(a, b) for a, b in zip(before, self.model_wrapped.parameters(), strict=True))
        return restored and self.average.value == kept

    def collectives(self):
        accelerator = self.accelerator
        rank = accelerator.process_index
        ragged = torch.full((2 + rank, 3), float(rank), device=accelerator.device)
        padded = accelerator.pad_across_processes(ragged, dim=0, pad_index=-1)
        same = torch.equal(padded, pad_across_processes(ragged, dim=0, pad_index=-1))
        gathered = accelerator.gather(padded)
        shared = [rank, "from rank 0"] if accelerator.is_main_process else [None, None]
        broadcast_object_list(shared, from_process=0)
        reduced = accelerator.reduce({"a": torch.ones(2, device=accelerator.device) * rank}, reduction="sum")
        return {
            "gathered_shape": list(gathered.shape),
            "pads": int((gathered == -1).sum()),
            "same_as_utils": same,
            "shared": shared,
            "sum": reduced["a"].tolist(),
            "objects": gather_object([f"rank {rank}"]),
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--output_dir", default="runs")
    parser.add_argument("--num_epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)

    trainer = Trainer(args)
    accelerator = trainer.accelerator

    @find_executable_batch_size(starting_batch_size=32)
    def train_with_fitting_batch(batch_size):
        accelerator.print(f"trying batch size {batch_size}")
        return trainer.train(batch_size)

    batch_size = train_with_fitting_batch()
    calls = []

    @accelerator.on_main_process
    def only_on_main(text):
        calls.append(text)

    @accelerator.on_local_main_process
    def only_on_local_main(text):
        calls.append(text)

    @accelerator.on_last_process
    def only_on_last(text):
        calls.append(text)

    only_on_main("main")
    only_on_local_main("local main")
    only_on_last("last")
    accelerator.on_process(lambda: calls.append("process 0"), process_index=0)()

    plain = accelerator.unwrap_model(trainer.model_wrapped)
    inputs, targets = (tensor.to(accelerator.device) for tensor in trainer.dataset.tensors)
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(plain(inputs), targets).item()
    result = {
        "loss": loss,
        "batch_size": batch_size,
        "updates": trainer.updates,
        "restored": trainer.save_and_restore(),
        "collectives": trainer.collectives(),
        "calls": gather_object([calls]),
        "unwrapped": extract_model_from_parallel(trainer.model_wrapped) is plain,
        "distributed": trainer.is_distributed,
        "use_distributed": accelerator.use_distributed,
        "available": [bool(f()) for f in (is_bf16_available, is_tensorboard_available, is_wandb_available)],
        "device": accelerator.device.type,
        "main": [accelerator.is_main_process, accelerator.is_local_main_process, accelerator.local_process_index],
        "state": accelerator.state.num_processes,
    }
    logger.warning("finished", main_process_only=False)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    if accelerator.is_main_process:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
