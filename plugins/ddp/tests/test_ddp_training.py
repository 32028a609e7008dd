"""Numbers under DistributedDataParallel's settings, in unusual models, with uneven inputs."""

import pytest
import torch
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain.data import DataLoaderConfiguration
from drivetrain.errors import NotPreparedError, UnsupportedError
from drivetrain.testing.communication import count_collectives
from drivetrain.testing.training import Case, Stream, reference, train
from drivetrain_ddp.options import DistributedDataParallelKwargs


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.0002},
        {"broadcast_buffers": False},
        {"gradient_as_bucket_view": True, "find_unused_parameters": True, "bucket_cap_mb": 0.0002},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ],
    ids=lambda options: "-".join(options),
)
def test_settings_change_no_number(ranks, options, accumulation):
    case = Case(
        accumulation=accumulation,
        weighted=accumulation == 4,
        accelerator={"cpu": True, "kwargs_handlers": [DistributedDataParallelKwargs(**options)]},
    )
    expected = reference(case, world_size=2)
    for result in ranks.run(train, case):
        assert result.largest_difference(expected) < 1e-5


class Routed(torch.nn.Module):
    """Uses one of two layers, by turns."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 1) for _ in range(2))
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator)

    def forward(self, x, which):
        return self.layers[which](x).squeeze(-1)


ROWS = torch.randn(24, 3, generator=torch.Generator().manual_seed(5))


def train_routed(steps, rank_routes):
    """Gradients of each window; which layer is used depends on the micro-batch, and perhaps on the rank."""
    options = DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, kwargs_handlers=[options])
    inner = Routed()
    model, optimizer, loader = accelerator.prepare(
        inner, torch.optim.SGD(inner.parameters(), lr=0.1), DataLoader(ROWS, batch_size=3)
    )
    for i, batch in enumerate(loader):
        with accelerator.accumulate(model):
            which = i % 2 if not rank_routes else accelerator.process_index
            accelerator.backward(model(batch, which).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().clone() for p in inner.parameters()]


@pytest.mark.parametrize("rank_routes", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_unused_parameters_train_as_in_plain_pytorch(ranks, steps, rank_routes):
    model = Routed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, len(ROWS), 6 * steps):
        loss = 0
        for i in range(start // 6, start // 6 + steps):
            for rank in range(2):
                rows = ROWS[i * 6 + rank * 3 :][:3]
                loss = loss + model(rows, rank if rank_routes else i % 2).pow(2).sum()
        (loss / (6 * steps)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in ranks.run(train_routed, steps, rank_routes):
        torch.testing.assert_close(weights, [p.detach() for p in model.parameters()])


def test_batch_norm_statistics_are_those_of_rank_0s_rows(ranks):
    def run():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        inner = torch.nn.Sequential(torch.nn.BatchNorm1d(3, affine=False), torch.nn.Linear(3, 1))
        model, loader = accelerator.prepare(inner, DataLoader(ROWS, batch_size=3))
        sent = []
        for batch in loader:
            with accelerator.accumulate(model):
                losses = []
                sent.append(count_collectives(lambda: losses.append(model(batch).mean())).get("broadcast", 0))
                accelerator.backward(losses[0])
        model(ROWS[:3])  # brings rank 0's statistics
        return inner[0].running_mean, inner[0].num_batches_tracked.item(), [n > 0 for n in sent]

    plain = torch.nn.BatchNorm1d(3, affine=False)
    for rows in [*ROWS.split(6), ROWS]:
        plain(rows[:3])
    for mean, batches, sent in ranks.run(run):
        torch.testing.assert_close(mean, plain.running_mean)
        assert batches == 5
        assert sent == [True, False] * 2  # once per window


# -- uneven inputs ---------------------------------------------------------------------------------------------------------


def start(steps, data, **kwargs):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps, **kwargs)
    inner = torch.nn.Linear(3, 1)
    model, optimizer, loader = accelerator.prepare(
        inner, torch.optim.SGD(inner.parameters(), lr=0.1), DataLoader(data, batch_size=3)
    )
    return accelerator, model, optimizer, loader


def test_even_batches_for_one_block(ranks):
    def run():
        accelerator, model, optimizer, loader = start(2, ROWS[:21])
        counts = []
        for even in (False, None):
            with accelerator.join_uneven_inputs([model], even_batches=even):
                counts.append(0)
                for batch in loader:
                    counts[-1] += 1
                    with accelerator.accumulate(model):
                        accelerator.backward(model(batch).mean())
                        optimizer.step()
                        optimizer.zero_grad()
        return counts, accelerator.step, model.module.weight.detach().clone()

    (first, steps, weight), (second, other_steps, other_weight) = ranks.run(run)
    assert (first, second) == ([4, 4], [3, 4])
    assert steps == other_steps == 5  # windows of 2 and 1 micro-batches, and of 1 on rank 0 alone; then 2 of 2
    assert torch.equal(weight, other_weight)


def test_what_cannot_be_joined_is_refused(ranks):
    def run():
        answers = []
        even = DataLoaderConfiguration(even_batches=False)
        accelerator, model, _, loader = start(2, ROWS[:21], dataloader_config=even)
        with pytest.raises(UnsupportedError) as error, accelerator.join_uneven_inputs([model]):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch).mean(), weight=3)
        answers.append(str(error.value))
        with pytest.raises(NotPreparedError) as error, accelerator.join_uneven_inputs([torch.nn.Linear(1, 1)]):
            pass
        answers.append(str(error.value))
        accelerator, model, _, loader = start(2, Stream(ROWS[:21]), dataloader_config=even)
        with pytest.raises(UnsupportedError) as error, accelerator.join_uneven_inputs([model]):
            for _ in loader:
                with accelerator.accumulate(model):
                    pass
        answers.append(str(error.value))
        return answers

    for weight, prepared, stream in ranks.run(run):
        assert "leave weight out" in weight
        assert "went through accelerator.prepare" in prepared
        assert "map-style data set" in stream
