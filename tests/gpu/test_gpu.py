"""What only a GPU can show: one script of a few minutes, `pytest -m gpu tests/gpu`.

The device's and the backends' conformance, and what has no equivalent on a CPU: that a training step waits for the device nowhere, that batches move while
the one before is computed on, that fp16's scale is agreed on the device, and that checkpoints are staged without a pause.
"""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain import Accelerator, FullyShardedDataParallelPlugin
from drivetrain._plugins import get_registry
from drivetrain.data import DataLoaderConfiguration, prepare_data_loader, rng_state, set_rng_state
from drivetrain.testing.backend import BackendConformance
from drivetrain.testing.device import DeviceConformance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

get = get_registry().get
COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0


class TestCUDA(DeviceConformance):
    spec = get("device", "cuda")
    world_sizes = tuple(range(1, min(COUNT, 2) + 1))


class TestSingle(BackendConformance):
    spec = get("backend", "single")
    world_sizes = (1,)
    precisions = ("fp32", "bf16", "fp16")
    arguments = {"device": "cuda"}


class TestDDP(BackendConformance):
    spec = get("backend", "ddp")
    world_sizes = tuple(range(1, min(COUNT, 3) + 1))
    precisions = ("fp32", "bf16", "fp16")
    arguments = {"device": "cuda"}


class TestFSDP(BackendConformance):
    spec = get("backend", "fsdp")
    world_sizes = tuple(range(1, min(COUNT, 3) + 1))
    precisions = ("fp32", "bf16", "fp16")
    arguments = {
        "device": "cuda",
        "fsdp_plugin": FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Linear"]),
    }


@pytest.mark.parametrize("offload", [False, True])
def test_offloaded_shards_train_alike_in_less_device_memory(workers, offload):
    """Parameters, gradients and optimizer state of 64 MB are on the device, or in the CPU's memory."""

    def run(offload):
        plugin = FullyShardedDataParallelPlugin(cpu_offload=offload)
        accelerator = Accelerator(device="cuda", fsdp_plugin=plugin)
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Tanh()) for _ in range(4))
        )
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        rows = torch.ones(4, 1024, device=accelerator.device)
        losses = []
        for _ in range(3):
            loss = model(rows).pow(2).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        held = {p.device.type for p in model.parameters()}
        held |= {t.device.type for s in optimizer.state.values() for t in s.values() if t.ndim}
        memory = torch.cuda.memory_allocated()
        accelerator.end_training()
        return losses, held, memory

    (losses, held, memory), *_ = workers(1).run(run, offload)
    (expected, *_), *_ = workers(1).run(run, False)
    assert losses == pytest.approx(expected, rel=1e-3)
    assert held == ({"cpu"} if offload else {"cuda"})
    assert (memory < 24e6) is offload


def parts(precision: str, **arguments):
    accelerator = Accelerator(device="cuda", mixed_precision=precision, **arguments)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    data = TensorDataset(torch.randn(512, 64), torch.randn(512, 1))
    loader = DataLoader(data, batch_size=16, pin_memory=True)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_no_step_waits_for_the_device(precision, accumulation):
    config = DataLoaderConfiguration(non_blocking=True)
    accelerator, model, optimizer, scheduler, loader = parts(
        precision, gradient_accumulation_steps=accumulation, dataloader_config=config
    )
    steps = 0
    try:
        for x, y in loader:
            if accelerator.step == 2:  # the first windows may build something
                torch.cuda.set_sync_debug_mode("error")
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.log({"loss": loss}, step=accelerator.step)
            steps += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert steps == len(loader) and accelerator.step == steps // accumulation


def test_an_overflow_skips_the_step_and_halves_the_scale():
    accelerator, model, optimizer, scheduler, loader = parts("fp16")
    before = [p.detach().clone() for p in model.parameters()]
    x, y = next(iter(loader))
    scale = accelerator.scaler.get_scale()
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y) * float("inf"))
    optimizer.step()
    optimizer.zero_grad()
    accelerator.backward(torch.nn.functional.mse_loss(model(x), y))  # a window's end is known when the next one starts
    assert accelerator.optimizer_step_was_skipped and accelerator.step == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert accelerator.scaler.get_scale() == scale / 2


def train(accelerator, model, optimizer, loader, steps: int, save=lambda: None, save_after: int = 10) -> list[float]:
    losses = []
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if len(losses) == save_after:
            save()
        if len(losses) == steps:
            break
    return losses


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_resumed_training_is_bit_identical(tmp_path, precision, blocking):
    accelerator, model, optimizer, _, loader = parts(precision)
    path = tmp_path / "ten"
    # An asynchronous save must not see the steps after it.
    losses = train(accelerator, model, optimizer, loader, 20, lambda: accelerator.save_state(path, blocking=blocking))
    accelerator.wait_for_checkpoint()
    accelerator, model, optimizer, _, loader = parts(precision)
    accelerator.load_state(path)
    assert train(accelerator, model, optimizer, loader, 10) == losses[10:]


class Rows(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return torch.full((1 << 18,), float(i))


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("workers", [0, 2])
def test_every_batch_arrives_whole_and_in_order(prefetch, workers):
    config = DataLoaderConfiguration(non_blocking=True, prefetch=prefetch)
    loader = DataLoader(Rows(), batch_size=4, pin_memory=True, num_workers=workers)
    prepared = prepare_data_loader(loader, device="cuda", config=config)
    assert prepared._drivetrain.placement.overlaps == bool(prefetch)
    work = torch.randn(2048, 2048, device="cuda")
    sums = []
    for batch in prepared:
        assert batch.device.type == "cuda"
        for _ in range(20):
            work = (work @ work).clamp(-1, 1)  # keeps the device busy while the next batch is copied
        sums.append(batch.mean(dim=1))
        del batch
    assert torch.cat(sums).tolist() == [float(i) for i in range(40)]


def test_generators_of_devices_are_part_of_the_state():
    state = rng_state()
    first = torch.rand(3, device="cuda")
    assert set(state["devices"]) == {f"cuda:{i}" for i in range(COUNT)}
    set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), first)


def test_memory_is_given_back():
    accelerator, model, optimizer, _, loader = parts("no")
    train(accelerator, model, optimizer, loader, 2)
    before = torch.cuda.memory_allocated()
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    assert torch.cuda.memory_allocated() < before
