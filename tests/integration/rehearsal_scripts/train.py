"""Trains a small transformer: what is rehearsed, and what is run for real to compare."""

import argparse
import contextlib

import torch

from drivetrain import Accelerator, ActivationCheckpointing, ParallelismConfig
from drivetrain.utils import set_seed


class Attention(torch.nn.Module):
    def __init__(self, width, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (torch.nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        heads = [
            p(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        ]
        out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return self.fc2(torch.nn.functional.gelu(self.fc1(x)))


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width), MLP(width)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class Model(torch.nn.Module):
    def __init__(self, width, depth, words=256):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(words, width), torch.nn.Linear(width, words)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * 1.0


def parse():
    parser = argparse.ArgumentParser()
    for name, default in (("accumulate", 1), ("width", 64), ("depth", 2), ("rows", 4), ("length", 16), ("steps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("backend", "precision", "mesh", "strategy", "save"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--weighted", action="store_true")
    parser.add_argument("--recompute", action="store_true")
    return parser.parse_args()


def main():
    args = parse()
    set_seed(0)
    options = {}
    if args.strategy:
        from drivetrain import FullyShardedDataParallelPlugin

        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(sharding_strategy=args.strategy)
    if args.mesh:
        sizes = dict(pair.split("=") for pair in args.mesh.split(","))
        options["parallelism_config"] = ParallelismConfig(**{name: int(size) for name, size in sizes.items()})
    if args.recompute:
        options["kwargs_handlers"] = [ActivationCheckpointing()]
    accelerator = Accelerator(
        cpu=True,
        backend=args.backend,
        mixed_precision=args.precision,
        gradient_accumulation_steps=args.accumulate,
        log_with="jsonl" if args.save else None,
        project_dir=args.save,
        **options,
    )
    model = Model(args.width, args.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = args.rows * args.steps * args.accumulate * accelerator.backend.data_world_size
    data = torch.utils.data.TensorDataset(*torch.randint(0, 256, (2, rows, args.length)))
    loader = torch.utils.data.DataLoader(data, batch_size=args.rows, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if args.save:
        accelerator.init_trackers("rehearsed")
    for ids, labels in loader:
        divided = (
            accelerator.maybe_context_parallel([ids, labels], [1, 1])
            if "cp" in (args.mesh or "") or "sp" in (args.mesh or "")
            else contextlib.nullcontext()
        )
        with accelerator.accumulate(model), divided:
            logits = model(ids)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            accelerator.backward(loss, weight=(labels > 10).sum() if args.weighted else None)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.gather_for_metrics(loss.detach())
        if args.save:
            accelerator.log({"loss": loss}, step=accelerator.step)
            accelerator.save_state(f"{args.save}/now")
            accelerator.save_model(model, f"{args.save}/model")
            torch.save(optimizer.state_dict(), f"{args.save}/optimizer.pt")
    return accelerator, model, optimizer


if __name__ == "__main__":
    accelerator, model, optimizer = main()
