"""Searching a batch size where the forward has collectives: processes agree at the end of a try."""

import os

import pytest
import torch

from drivetrain import Accelerator, DeepSpeedPlugin, find_executable_batch_size
from drivetrain.errors import DrivetrainError
from drivetrain.testing.workers import WorkerPool

BACKENDS = {
    "fsdp": lambda: {"backend": "fsdp"},
    "deepspeed": lambda: {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=3)},
}


def search(backend, failing, limit=2):
    """Sizes that this rank tried; the ranks that are named run out above a limit."""
    accelerator = Accelerator(cpu=True, **BACKENDS[backend]())
    sizes = []

    def train(batch_size):
        sizes.append(batch_size)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        loader = torch.utils.data.DataLoader(torch.ones(16, 4), batch_size=batch_size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x in loader:
            with accelerator.accumulate(model):
                if accelerator.process_index in failing and batch_size > limit:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                accelerator.backward(model(x).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()

    find_executable_batch_size(train, 8, accelerator=accelerator)()
    accelerator.end_training()
    return sizes


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_run_out_at_one_place(ranks, backend):
    assert ranks.run(search, backend, (0, 1)) == [[8, 4, 2]] * 2


def alone(backend):
    try:
        return search(backend, (1,))
    except DrivetrainError as error:
        if os.environ["RANK"] == "1":
            raise RuntimeError(str(error)) from None


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_that_runs_out_alone_says_so_and_does_not_hang(backend):
    """The others, in a collective, are ended by the launcher (here: by the pool)."""
    from drivetrain.testing.workers import RemoteError

    with WorkerPool(2, timeout=90) as pool, pytest.raises(RemoteError) as caught:
        pool.run(alone, backend)
    assert "Memory ran out on rank 1, and the others didn't end their try within 20 seconds" in str(caught.value)
