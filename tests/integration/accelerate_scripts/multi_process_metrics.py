"""Metrics over several processes: each sample counts once whatever the size of the set, tensors and objects alike."""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(11)
        self.inputs = torch.randn(size, 5, generator=generator)
        self.labels = (self.inputs.sum(1) > 0).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"x": self.inputs[index], "label": self.labels[index], "index": index, "name": f"sample-{index}"}


def build_model():
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--sizes", type=int, nargs="+", default=[103, 64, 33, 5, 1])
    args = parser.parse_args()

    accelerator = Accelerator(cpu=args.cpu)
    set_seed(1)
    model = accelerator.prepare(build_model())
    model.eval()

    report = {}
    for size in args.sizes:
        dataloader = accelerator.prepare(DataLoader(Samples(size), batch_size=args.batch_size))
        outputs, indices, names = [], [], []
        for batch in dataloader:
            with torch.no_grad():
                logits = model(batch["x"])
            gathered = accelerator.gather_for_metrics(
                {"prediction": logits.argmax(-1), "label": batch["label"], "index": batch["index"]}
            )
            outputs.append((gathered["prediction"], gathered["label"]))
            indices.extend(gathered["index"].tolist())
            names.extend(accelerator.gather_for_metrics(batch["name"], use_gather_object=True))
        predictions, labels = (torch.cat(column) for column in zip(*outputs, strict=True))
        report[str(size)] = {
            "accuracy": (predictions == labels).float().mean().item(),
            "indices": sorted(indices),
            "names": len(set(names)),
            "name_count": len(names),
        }

    everyone = accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device))
    total = accelerator.reduce(torch.tensor(1.0, device=accelerator.device), reduction="sum").item()
    accelerator.print(json.dumps({"sizes": report, "ranks": everyone.tolist(), "total": total}))


if __name__ == "__main__":
    main()
