"""A model without weights is sharded, then filled: by its own functions, by rank 0, from a checkpoint; in little memory."""

import pytest
import torch

from drivetrain import Accelerator, init_empty_weights
from drivetrain.errors import UnsupportedError
from drivetrain.testing.training import whole
from drivetrain_fsdp.options import FullyShardedDataParallelPlugin


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = torch.nn.LayerNorm(width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x):
        y = self.norm(x)
        return x + self.mlp(y + self.attention(y, y, y, need_weights=False)[0])


class Model(torch.nn.Module):
    """With an embedding tied to the head, and a buffer that isn't saved."""

    def __init__(self, width=8, depth=3):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, width)
        self.register_buffer("scale", torch.linspace(0.5, 1, width), persistent=False)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))
        self.head = torch.nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def accelerate(**fields):
    return Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**fields))


def prepare(empty_ranks, directory=None, **fields):
    accelerator = accelerate(**fields)
    torch.manual_seed(3 + accelerator.process_index)
    if accelerator.process_index in empty_ranks:
        with init_empty_weights():
            model = Model()
        assert all(p.is_meta for p in model.parameters()) and not model.scale.is_meta
    else:
        model = Model()
    torch.manual_seed(3 + accelerator.process_index)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    if directory:
        accelerator.load_state(directory)
    weights = whole(accelerator.backend.model_state(model))
    ids = torch.arange(6).view(2, 3) + accelerator.process_index
    accelerator.backward(model(ids).pow(2).mean())
    optimizer.step()
    assert model.head.weight is model.embedding.weight
    after = whole(accelerator.backend.model_state(model))
    accelerator.end_training()
    return weights, after


def expected_weights():
    torch.manual_seed(3)
    return {n: p.detach() for n, p in Model().state_dict().items()}


@pytest.mark.parametrize("empty_ranks", [(), (0, 1), (1,)], ids=["none", "all", "all but rank 0"])
def test_weights_are_those_that_rank_0_would_have_made(ranks, empty_ranks):
    expected = expected_weights()
    results = ranks.run(prepare, empty_ranks)
    for weights, after in results:
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[n], expected[n]) for n in expected)
        assert all(torch.equal(after[n], results[0][1][n]) for n in after)
        assert not torch.equal(after["blocks.0.norm.weight"], weights["blocks.0.norm.weight"])


def save(directory):
    accelerator = accelerate()
    torch.manual_seed(5)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    accelerator.save_state(directory)
    weights = whole(accelerator.backend.model_state(model))
    accelerator.end_training()
    return weights


def test_weights_from_a_checkpoint(ranks, tmp_path):
    saved, _ = ranks.run(save, str(tmp_path / "checkpoint"))
    for weights, _ in ranks.run(prepare, (0, 1), str(tmp_path / "checkpoint"), param_init_fn=lambda module: None):
        assert all(torch.equal(weights[n], saved[n]) for n in saved)


class Bare(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 4))


def test_what_cannot_be_filled_is_refused_on_every_rank(ranks):
    def run(make, **fields):
        accelerator = accelerate(**fields)
        with pytest.raises(UnsupportedError) as error:
            accelerator.prepare(make(accelerator.process_index))
        accelerator.end_training()
        return str(error.value)

    def bare(rank):
        with init_empty_weights():
            return Bare()

    def half(rank):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        return model if rank == 0 else torch.nn.Sequential(model[0], torch.nn.Linear(2, 2, device="meta"))

    def first(rank):
        return torch.nn.Linear(2, 2, device="meta" if rank == 0 else "cpu")

    def others(rank):
        return torch.nn.Linear(2, 2, device="cpu" if rank == 0 else "meta")

    assert all("param_init_fn" in text for text in ranks.run(run, bare))
    assert all("(ranks [1])" in text for text in ranks.run(run, half))
    assert all("Ranks [1] have weights" in text for text in ranks.run(run, first))
    assert all("cpu_ram" in text for text in ranks.run(run, others, cpu_ram_efficient_loading=False))


def test_whole_models_refuse_empty_weights():
    with init_empty_weights():
        model = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="init_empty_weights"):
        Accelerator(cpu=True, backend="single").prepare(model)


def peak(empty):
    """Most bytes of tensors at once, from before the model is made until it is prepared; and what is left."""
    from torch.profiler import profile

    accelerator = accelerate()
    with profile(profile_memory=True) as recording:
        if empty:
            with init_empty_weights():
                model = Model(width=64, depth=8)
        else:
            model = Model(width=64, depth=8)
        model = accelerator.prepare(model)
    held = sum(p.to_local().nbytes for p in model.parameters())
    events = [e for e in recording.profiler.kineto_results.events() if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    most = now = 0
    for size in sizes:
        now += size
        most = max(most, now)
    accelerator.end_training()
    return most, held, sum(p.numel() * 4 for p in model.blocks[0].parameters())


def test_peak_memory_is_about_the_shard(ranks):
    for most, held, block in ranks.run(peak, True):
        assert held < most < 1.2 * held + 2 * block  # gloo's threads may let go of a module's weights later
    for most, held, _ in ranks.run(peak, False):
        assert most > 2 * held  # the whole model
