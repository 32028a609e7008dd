"""Training through DeepSpeed's engine against a loop written by hand with it: time per step, and the weights at the end.

Run it with the packages on the path: ``python -m tests.benchmarks.bench_deepspeed [--stage 2 --processes 1 --width 256 --depth 6]``; how it measures
stands in `tests.benchmarks.turns`.
"""

from __future__ import annotations

import torch

from .table import render
from .turns import AGAIN, HAND, OURS, ROWS, compare, parser, parts, take_turns, tell


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def ours(args, accelerator):
    model, batches = parts(args)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))

    def step(i):
        accelerator.backward(model(batches[i % len(batches)]).float().pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def by_hand(args, configuration):
    import deepspeed

    model, batches = parts(args)
    given = {"model": model, "optimizer": optimizer_of(model), "config": configuration}
    engine, *_ = deepspeed.initialize(**given, dist_init_required=False)

    def step(i):
        engine.backward(engine(batches[i % len(batches)]).float().pow(2).mean())
        engine.step()

    return engine, step


def worker(args):
    configuration = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage, "reduce_bucket_size": 5_000_000},
    }
    from drivetrain import Accelerator, DeepSpeedPlugin

    # Communication for all of them; and an Accelerator outlives what it prepared.
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=dict(configuration)))
    makers = {
        OURS: lambda: ours(args, accelerator),
        HAND: lambda: by_hand(args, dict(configuration)),
        AGAIN: lambda: by_hand(args, dict(configuration)),
    }

    def weights(engine):
        from deepspeed.utils import safe_get_full_fp32_param

        return [safe_get_full_fp32_param(p) if args.stage else p.detach() for p in engine.module.parameters()]

    tell(take_turns(args, makers, weights))


def main():
    line = parser(__doc__.splitlines()[0])
    line.add_argument("--stage", type=int, default=2)
    args = line.parse_args()
    if args.worker:
        worker(args)
        return
    print(render(compare(__spec__.name, args, f"ZeRO stage {args.stage}")))


if __name__ == "__main__":
    main()
