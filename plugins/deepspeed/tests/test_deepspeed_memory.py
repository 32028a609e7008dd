"""Predicted memory of ZeRO's stages against what the C library has given out, on two real ranks.

Large blocks are mapped one by one (``mallopt``), so that the sum of the mapped ones is what tensors need, whoever frees them: torch's profiler
doesn't see what threads of the communication library let go of. It is read after each operation.
"""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch
from tests.integration.planner_cases import MODELS, OPTIMIZERS, batch_of, loss_of
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain import Accelerator, DeepSpeedPlugin
from drivetrain.memory import Hardware, profile_model
from drivetrain_deepspeed.zero_memory import Sizes, ZeroMemory

pytestmark = [pytest.mark.full, pytest.mark.slow]

BUCKET = 100_000
SIZES = Sizes(bucket=BUCKET, prefetch=BUCKET, persistent=1000, live=2 * BUCKET)


def mapped_bytes():
    names = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]

    class MallInfo(ctypes.Structure):  # made where it is used: ranks get this function, and a structure can't be sent
        _fields_ = [(name, ctypes.c_size_t) for name in names]

    library = ctypes.CDLL("libc.so.6")
    library.mallinfo2.restype = MallInfo
    return library.mallinfo2().hblkhd


class Meter(TorchDispatchMode):
    """Most mapped bytes after any operation."""

    peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, mapped_bytes())
        return result


def document(stage, rows):
    zero = {"stage": stage, "reduce_bucket_size": BUCKET}
    if stage < 3:
        zero["allgather_bucket_size"] = BUCKET
    else:
        zero |= {"stage3_prefetch_bucket_size": BUCKET, "stage3_param_persistence_threshold": SIZES.persistent}
        zero |= {"stage3_max_live_parameters": SIZES.live, "stage3_max_reuse_distance": SIZES.live}
    return {"train_micro_batch_size_per_gpu": rows, "zero_optimization": zero}


def measured(family, stage, rows, steps, optimizer):
    """The smaller peak of two steps after the first one."""
    plugin = DeepSpeedPlugin(hf_ds_config=document(stage, rows))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, deepspeed_plugin=plugin)
    library = ctypes.CDLL("libc.so.6")
    library.mallopt(-3, 32768)  # M_MMAP_THRESHOLD, in bytes
    library.mallopt(-4, 10**6)  # M_MMAP_MAX: so many blocks
    gc.collect()
    before = mapped_bytes()  # DeepSpeed is imported
    torch.manual_seed(0)
    model = MODELS[family]()
    model, optimizer = accelerator.prepare(
        model, OPTIMIZERS[optimizer](p for p in model.parameters() if p.requires_grad)
    )
    batch = batch_of(family, rows)
    peaks = []
    for _ in range(3):
        with Meter() as meter:
            for _ in range(steps):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
        peaks.append(meter.peak - before)
    accelerator.end_training()
    return min(peaks[1:])


def predicted(family, stage, rows, steps, optimizer):
    torch.manual_seed(0)
    profile = profile_model(MODELS[family](), batch_of(family, rows), optimizer=OPTIMIZERS[optimizer], loss=loss_of)
    hardware = Hardware(name="cpu", memory=10**12, device="cpu", devices=2, devices_per_machine=2)
    memory = ZeroMemory(profile, hardware, stage=stage, offload=(), sizes=SIZES)
    return sum(memory.peak(profile.timelines["none"], samples=rows, accumulation=steps)[1].values())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("family", "rows", "steps", "optimizer"),
    [("transformer", 4, 1, "adamw"), ("conv", 16, 1, "sgd"), ("transformer", 16, 2, "sgd")],
)
def test_within_a_tenth(ranks, family, stage, rows, steps, optimizer):
    for peak in ranks.run(measured, family, stage, rows, steps, optimizer):
        assert predicted(family, stage, rows, steps, optimizer) == pytest.approx(peak, rel=0.1)
