"""Prints what send_to_device and gather cost beside the bare calls of torch; nothing here depends on the machine's speed."""

import timeit

import torch
import torch.distributed as dist

from drivetrain.parallel import gather, gather_object, reduce, send_to_device

CPU, META = torch.device("cpu"), torch.device("meta")


def microseconds(function, number):
    return min(timeit.repeat(function, number=number, repeat=5)) / number * 1e6


def report(title, rows):
    print(f"\n{title}")
    for name, value in rows.items():
        print(f"  {name:<52}{value:8.1f} us")


def test_cost_of_moves():
    batch = {f"column{i}": torch.ones(2) for i in range(4)}
    nested = {"inputs": batch, "ids": ["a", "b"], "extra": (torch.ones(1), None)}
    rows = {
        "4 tensors in place, torch": microseconds(lambda: {k: v.to(CPU) for k, v in batch.items()}, 2000),
        "4 tensors in place": microseconds(lambda: send_to_device(batch, CPU), 2000),
        "4 tensors moved, torch": microseconds(lambda: {k: v.to(META) for k, v in batch.items()}, 1000),
        "4 tensors moved": microseconds(lambda: send_to_device(batch, META), 1000),
        "nested, 5 tensors, in place": microseconds(lambda: send_to_device(nested, CPU), 1000),
    }
    report("send_to_device", rows)
    assert send_to_device(batch, CPU) is batch


def test_cost_of_collectives(ranks):
    def run():
        one, metrics, large = torch.ones(4), [torch.ones(4)] * 4, torch.ones(200_000)
        outputs = [torch.empty(4) for _ in range(dist.get_world_size())]
        wide = [torch.empty(200_000) for _ in range(dist.get_world_size())]
        objects = [None] * dist.get_world_size()
        return {
            "gather 4 floats, torch": microseconds(lambda: dist.all_gather(outputs, one), 50),
            "gather 4 floats": microseconds(lambda: gather(one), 50),
            "gather 4 tensors, torch": microseconds(lambda: [dist.all_gather(outputs, t) for t in metrics], 50),
            "gather 4 tensors": microseconds(lambda: gather(metrics), 50),
            "gather 200 000 floats, torch": microseconds(lambda: dist.all_gather(wide, large), 20),
            "gather 200 000 floats": microseconds(lambda: gather(large), 20),
            "reduce 4 floats, torch": microseconds(lambda: dist.all_reduce(one.clone()), 50),
            "reduce 4 floats": microseconds(lambda: reduce(one), 50),
            "gather a small object, torch": microseconds(lambda: dist.all_gather_object(objects, [1]), 50),
            "gather a small object": microseconds(lambda: gather_object([1]), 50),
        }

    report("collectives, 2 gloo ranks", ranks.run(run)[0])
