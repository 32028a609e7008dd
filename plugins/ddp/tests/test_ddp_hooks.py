"""Compressed gradients train as whole ones do, within what their dtype holds; buffers stay equal."""

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain.testing.training import Case, reference, train
from drivetrain_ddp.options import DistributedDataParallelKwargs


def train_with(accumulation, **options):
    handlers = [DistributedDataParallelKwargs(**options)]
    return train(
        Case(accumulation=accumulation, optimizer="sgd", accelerator={"cpu": True, "kwargs_handlers": handlers})
    )


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(("hook", "tolerance"), [("no", 1e-6), ("fp16", 1e-2), ("bf16", 5e-2)])
def test_compressed_gradients_train_alike(ranks, hook, tolerance, accumulation):
    expected = reference(Case(accumulation=accumulation, optimizer="sgd"), world_size=2)
    results = ranks.run(train_with, accumulation, comm_hook=hook)
    for result in results:
        assert result.largest_difference(expected) < tolerance
        assert (result.largest_difference(expected) > 1e-6) is (hook != "no")
    assert results[0].largest_difference(results[1]) == 0.0


def test_power_sgd_is_exact_until_it_starts_and_approximates_from_then_on(ranks):
    expected = reference(Case(optimizer="sgd"), world_size=2)
    (late, _) = ranks.run(train_with, 1, comm_hook="power_sgd", comm_state_option={"start_powerSGD_iter": 1000})
    assert late.largest_difference(expected) < 1e-6
    early, other = ranks.run(
        train_with, 1, comm_hook="power_sgd", comm_state_option={"start_powerSGD_iter": 2, "min_compression_rate": 0.5}
    )
    assert early.largest_difference(expected) > 1e-4
    assert early.largest_difference(other) == 0.0
    assert early.losses[-1] == pytest.approx(expected.losses[-1], rel=0.25)


def test_statistics_of_batch_norm_are_rank_0s_everywhere(ranks):
    def run():
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        data = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
        model, loader = accelerator.prepare(model, DataLoader(data, batch_size=4))
        for batch in loader:
            accelerator.backward(model(batch).pow(2).mean())
        model(data[:4])  # a forward in training mode starts from rank 0's statistics
        return accelerator.gather(model.module[1].running_mean[None] * 1).tolist(), model.module[
            1
        ].num_batches_tracked.item()

    for (first, second), batches in ranks.run(run):
        assert first == second
        assert batches == 3
