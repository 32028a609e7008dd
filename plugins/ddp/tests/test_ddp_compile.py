"""torch.compile: as many graphs and recompilations as in a loop by hand, and the same numbers."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain.utils import TorchDynamoPlugin


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)

    def forward(self, x):
        return x + self.inner(x).tanh()


def make_model():
    generator = torch.Generator().manual_seed(1)
    model = torch.nn.Sequential(*(Block() for _ in range(5)), torch.nn.Linear(6, 1))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator) / 3
    return model


ROWS = torch.randn(44, 6, generator=torch.Generator().manual_seed(2))  # a smaller last batch: one recompilation


def fresh():
    from torch._dynamo.utils import counters  # here: this module travels to the ranks by value, and with it its globals

    torch._dynamo.reset()
    counters.clear()
    return counters


def count(counters):
    """Graphs, and graph breaks."""
    result = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    fresh()
    return result


def by_hand(backend, regional):
    """This rank's share, compiled and wrapped by hand."""
    counters = fresh()
    distributed = torch.distributed.is_initialized()
    rank, world = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if distributed else (0, 1)
    inner = make_model()
    if regional:
        for block in inner[:5]:
            block.compile(backend=backend)
        model = inner
    else:
        model = torch.compile(inner, backend=backend)
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in ROWS.split(8 * world):
        loss = model(batch.chunk(world)[rank]).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, count(counters)


def by_accelerator(backend, regional):
    counters = fresh()
    dynamo = TorchDynamoPlugin(backend=backend, use_regional_compilation=regional)
    accelerator = Accelerator(cpu=True, dynamo_plugin=dynamo)
    inner = make_model()
    model, optimizer, loader = accelerator.prepare(
        inner, torch.optim.SGD(inner.parameters(), lr=0.1), DataLoader(ROWS, batch_size=8)
    )
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, count(counters), [n for n, _ in accelerator.unwrap_model(model).named_parameters()]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("regional", [False, True], ids=["whole", "regional"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_graphs_and_numbers_are_those_of_a_loop_by_hand(workers, world_size, regional, backend):
    pool = workers(world_size)
    hand = pool.run(by_hand, backend, regional)
    ours = pool.run(by_accelerator, backend, regional)
    for (losses, graphs), (our_losses, our_graphs, names) in zip(hand, ours, strict=True):
        assert our_losses == pytest.approx(losses, abs=1e-6)
        assert our_graphs == graphs
        assert graphs[0] >= 1
        assert names == [n for n, _ in make_model().named_parameters()]
