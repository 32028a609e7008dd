"""Batches copied on a stream of their own while the one before is computed on. Needs a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from drivetrain.data import DataLoaderConfiguration, prepare_data_loader, rng_state, set_rng_state

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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
    assert set(state["devices"]) == {f"cuda:{i}" for i in range(torch.cuda.device_count())}
    set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), first)
