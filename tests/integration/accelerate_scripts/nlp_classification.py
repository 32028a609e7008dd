"""Fine-tuning loop for text classification: AdamW, linear warm-up and decay, dynamic padding, gathered accuracy."""

import argparse
import json
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

VOCABULARY, CLASSES = 40, 3


@dataclass
class ClassifierOutput:
    loss: torch.Tensor
    logits: torch.Tensor


class BagClassifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 16, padding_idx=0)
        self.head = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, CLASSES))

    def forward(self, input_ids, attention_mask, labels):
        mask = attention_mask.unsqueeze(-1)
        pooled = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        logits = self.head(pooled)
        return ClassifierOutput(torch.nn.functional.cross_entropy(logits, labels), logits)


def make_dataset(size, seed):
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for _ in range(size):
        length = int(torch.randint(3, 12, (1,), generator=generator))
        label = int(torch.randint(0, CLASSES, (1,), generator=generator))
        tokens = torch.randint(1, VOCABULARY, (length,), generator=generator)
        tokens[: length // 2 + 1] = torch.randint(
            1 + 12 * label, 13 + 12 * label, (length // 2 + 1,), generator=generator
        )
        examples.append({"input_ids": tokens.tolist(), "labels": label})
    return examples


def collate(examples):
    longest = max(len(e["input_ids"]) for e in examples)
    padded = [e["input_ids"] + [0] * (longest - len(e["input_ids"])) for e in examples]
    input_ids = torch.tensor(padded)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != 0).long(),
        "labels": torch.tensor([e["labels"] for e in examples]),
    }


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def factor(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, factor)


def training_function(args):
    accelerator = Accelerator(cpu=args.cpu, mixed_precision=args.mixed_precision)
    set_seed(args.seed)

    # Both sets are already in random order.
    train_dataloader = DataLoader(make_dataset(200, 1), batch_size=args.batch_size, collate_fn=collate, shuffle=False)
    eval_dataloader = DataLoader(make_dataset(61, 2), batch_size=args.batch_size, collate_fn=collate)

    model = BagClassifier()
    model = model.to(accelerator.device)
    optimizer = AdamW(model.parameters(), lr=args.lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=5, num_training_steps=len(train_dataloader) * args.num_epochs
    )

    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    steps = 0
    for epoch in range(args.num_epochs):
        model.train()
        for batch in train_dataloader:
            batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            steps += 1

        model.eval()
        losses, correct, seen = [], 0, 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            rows = torch.nn.functional.cross_entropy(outputs.logits, batch["labels"], reduction="none")
            losses.append(accelerator.gather_for_metrics(rows))
            correct += (predictions == references).sum().item()
            seen += references.shape[0]
        eval_loss = torch.cat(losses).mean().item()
        accelerator.print(f"epoch {epoch}: loss {eval_loss:.4f}, accuracy {correct / seen:.3f}")

    accelerator.print(
        json.dumps(
            {
                "eval_loss": eval_loss,
                "accuracy": correct / seen,
                "seen": seen,
                "steps": steps,
                "lr": lr_scheduler.get_last_lr()[0],
            }
        )
    )


def main():
    parser = argparse.ArgumentParser(description="Text classification.")
    parser.add_argument("--mixed_precision", default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--cpu", action="store_true", help="Train on the CPU.")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
