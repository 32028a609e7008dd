"""Inference over several processes without an Accelerator: prompts are split, results gathered in order."""

import argparse
import json

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, set_seed


def build_model():
    generator = torch.Generator().manual_seed(9)
    model = torch.nn.Linear(16, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.randn(4, 16, generator=generator))
    return model


def encode(prompt):
    counts = torch.zeros(16)
    for character in prompt:
        counts[ord(character) % 16] += 1
    return counts - counts.mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--batch_size", type=int, default=2)
    args = parser.parse_args()

    distributed_state = PartialState(cpu=args.cpu)
    set_seed(0)
    model = build_model().to(distributed_state.device)
    prompts = [f"draw {thing}" for thing in ("a cat", "a boat", "rain", "two dogs", "Rome", "a lamp", "snow")]

    results = []
    with distributed_state.split_between_processes(prompts) as mine:
        for start in range(0, len(mine), args.batch_size):
            chunk = mine[start : start + args.batch_size]
            with torch.inference_mode():
                classes = model(torch.stack([encode(p) for p in chunk]).to(distributed_state.device)).argmax(-1)
            results.extend({"prompt": p, "class": c} for p, c in zip(chunk, classes.tolist(), strict=True))
    distributed_state.wait_for_everyone()
    gathered = gather_object(results)

    # With padding each process has the same number, so that tensors can be gathered; the surplus is cut off.
    with distributed_state.split_between_processes(prompts, apply_padding=True) as padded:
        padded_count = len(padded)
    counts = gather_object([padded_count])
    with distributed_state.split_between_processes(torch.arange(10)) as part:
        tensor_parts = gather_object(part.tolist())
    with distributed_state.split_between_processes({"ids": list(range(5)), "texts": list("abcde")}) as part:
        dict_parts = gather_object([part])

    @distributed_state.on_main_process
    def announce(message):
        print(message)

    announce(f"{len(gathered)} results from {distributed_state.num_processes} processes")
    if distributed_state.is_main_process:
        print(json.dumps({"results": gathered, "padded": counts, "tensor": tensor_parts, "dicts": dict_parts}))


if __name__ == "__main__":
    main()
