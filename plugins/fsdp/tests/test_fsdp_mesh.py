"""Meshes of several dimensions: the same numbers as one process that sees whole batches, layers and sequences."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from drivetrain import Accelerator, ParallelismConfig
from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain.testing.training import whole
from drivetrain_fsdp.options import FullyShardedDataParallelPlugin

LENGTH, VOCABULARY = 8, 13
GENERATOR = torch.Generator().manual_seed(2)
IDS = torch.randint(0, VOCABULARY, (22, LENGTH + 1), generator=GENERATOR)


class Attention(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.q_proj, self.v_proj = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.k_proj = torch.nn.Linear(width, width, bias=False)  # its bias would have no gradient but rounding errors
        self.o_proj = torch.nn.Linear(width, width)

    def forward(self, x, mask):
        q, k, v = (
            p(x).view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Block(torch.nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = torch.nn.ModuleDict(
            {"up_proj": torch.nn.Linear(width, 4 * width), "down_proj": torch.nn.Linear(4 * width, width)}
        )

    def forward(self, x, mask):
        x = x + self.attention(self.first(x), mask)
        return x + self.mlp["down_proj"](F.gelu(self.mlp["up_proj"](self.second(x))))


class Decoder(torch.nn.Module):
    def __init__(self, width=16, depth=2):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, width)
        self.positions = torch.nn.Embedding(LENGTH, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, ids, positions, mask=None):
        x = self.tokens(ids) + self.positions(positions)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def make():
    torch.manual_seed(6)
    model = Decoder()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def plain(rows_per_step, masked):
    model, optimizer = make()
    norms, losses = [], []
    for batch in IDS.split(rows_per_step):
        mask = torch.ones(LENGTH, LENGTH).tril().bool() if masked else None
        logits = model(batch[:, :-1], torch.arange(LENGTH).expand(len(batch), -1), mask)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, dict(model.state_dict())


def train(sizes, masked, precision="no", directory=None, empty=False, **plugin):
    from contextlib import nullcontext

    from drivetrain import init_empty_weights

    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=2,
        parallelism_config=ParallelismConfig(**sizes),
        fsdp_plugin=FullyShardedDataParallelPlugin(**plugin),
    )
    with init_empty_weights() if empty else nullcontext():
        model, optimizer = make()
    torch.manual_seed(6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(IDS, batch_size=2))
    losses, norms, seen, sums = [], [], [], torch.zeros(2)
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch[:, 0]).tolist()
        positions = torch.arange(LENGTH).repeat(len(batch), 1)
        inputs, labels = batch[:, :-1].clone(), batch[:, 1:].clone()
        mask = torch.ones(LENGTH, LENGTH).tril().bool() if masked else None
        with (
            accelerator.accumulate(model),
            accelerator.maybe_context_parallel([inputs, labels, positions], [1, 1, 1]),
        ):
            loss = F.cross_entropy(model(inputs, positions, mask).flatten(0, 1), labels.flatten())
            accelerator.backward(loss)
            rows = loader.batch.rows
            sums += torch.tensor([float(loss.detach()) * rows * labels.shape[1], rows * labels.shape[1]])
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                total, count = accelerator.reduce(sums).tolist()
                losses.append(total / count)
                sums.zero_()
            optimizer.step()
            optimizer.zero_grad()
        assert inputs.shape == (len(batch), LENGTH)
    weights = whole(accelerator.backend.model_state(model))
    facts = {
        "local": sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)),
        "ranks": (accelerator.data_parallel_rank, accelerator.context_parallel_rank, accelerator.tensor_parallel_rank),
        "mesh": accelerator.torch_device_mesh.mesh_dim_names,
        "explained": accelerator.backend.describe(),
    }
    if directory:
        accelerator.save_state(directory)
    accelerator.end_training()
    return losses, norms, seen, weights, facts


def check(results, data, masked, tolerance=2e-5):
    losses, norms, weights = plain(2 * 2 * data, masked)
    for ours, our_norms, seen, our_weights, _ in results:
        assert ours == pytest.approx(losses, abs=tolerance)
        assert our_norms == pytest.approx(norms, abs=tolerance * 10)
        assert seen == IDS[:, 0].tolist()
        assert our_weights.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(our_weights[name], weight, atol=tolerance * 10, rtol=0, msg=name)


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "mask"])
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"cp_size": 2}, {"dp_replicate_size": 2}], ids=str)
def test_two_ranks(ranks, sizes, masked):
    results = ranks.run(train, sizes, masked)
    check(results, 2 if "dp_replicate_size" in sizes else 1, masked)
    if "tp_size" in sizes:
        assert [r[4]["ranks"] for r in results] == [(0, 0, 0), (0, 0, 1)]
        assert results[0][4]["explained"]["layers divided"] == "8 colwise, 4 rowwise"
    if "cp_size" in sizes:
        assert [r[4]["ranks"] for r in results] == [(0, 0, 0), (0, 1, 0)]
        parameters = sum(p.numel() for p in make()[0].parameters())
        assert sum(r[4]["local"] for r in results) == parameters  # shards, too


FOUR = [
    {"dp_replicate_size": 2, "dp_shard_size": 2},
    {"tp_size": 2},
    {"cp_size": 2, "dp_shard_size": 2},
    {"cp_size": 2, "tp_size": 2},
    {"dp_replicate_size": 2, "tp_size": 2},
]


@pytest.mark.parametrize(
    "sizes", [pytest.param(s, marks=[pytest.mark.full] * (i > 2)) for i, s in enumerate(FOUR)], ids=str
)
def test_four_ranks(workers, sizes, tmp_path):
    """With replicas and shards, tensor and context parallel; the model made without weights, and a checkpoint for one process."""
    directory = str(tmp_path / "checkpoint")
    results = workers(4).run(train, sizes, False, directory=directory, empty=sizes == {"tp_size": 2})
    data = 4 // (sizes.get("tp_size", 1) * sizes.get("cp_size", 1))
    check(results, data, False)
    accelerator = Accelerator(cpu=True, backend="single")
    model, optimizer = accelerator.prepare(*make())
    from drivetrain.checkpoint import read_weights

    for name, value in read_weights(directory).items():
        assert torch.equal(value, results[0][3][name]), name
    accelerator.end_training()


def test_precision_with_divided_layers(ranks):
    check(ranks.run(train, {"tp_size": 2}, False, "bf16"), 1, False, tolerance=1e-2)

    def run():
        with pytest.raises(UnsupportedError, match="bf16"):
            train({"tp_size": 2}, False, "fp16")

    ranks.run(run)


# -- what is refused -------------------------------------------------------------------------------------------------------


def start(model, **sizes):
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes))
    try:
        return accelerator.prepare(model)
    finally:
        accelerator.end_training()


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"tp_size": 2, "tp_plan": {"nothing.*": "colwise"}}, ConfigurationError, "matches no module"),
        ({"tp_size": 2, "tp_plan": {"head": "diagonal"}}, ConfigurationError, "Styles are"),
        ({"tp_size": 2, "tp_plan": {"head": "colwise"}}, UnsupportedError, "13 outputs"),
        ({"tp_size": 2, "tp_plan": {"blocks.0.first": "colwise"}}, UnsupportedError, "LayerNorm"),
        ({"tp_size": 3}, ConfigurationError, "doesn't divide 2 processes"),
        ({"dp_replicate_size": 1, "dp_shard_size": 1}, ConfigurationError, "is for 1 processes, not for 2"),
    ],
)
def test_wrong_meshes_and_plans(ranks, sizes, error, message):
    def run():
        with pytest.raises(error, match=message):
            start(Decoder(), **sizes)

    ranks.run(run)


def test_no_plan_is_an_error(ranks):
    def run():
        with pytest.raises(ConfigurationError, match="has no plan of its own"):
            start(torch.nn.Linear(2, 2), tp_size=2)

    ranks.run(run)


def test_sequences_that_cannot_be_shared(ranks):
    def run():
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
        for buffers, dims, message in (
            ([torch.zeros(1, 3)], [1], "pad them"),
            ([torch.zeros(1, 4)], [], "one for each"),
        ):
            with pytest.raises(ConfigurationError, match=message), accelerator.maybe_context_parallel(buffers, dims):
                pass
        x = torch.randn(1, 2, 4, 8)
        with accelerator.maybe_context_parallel():
            with pytest.raises(UnsupportedError, match="neither that of the whole sequence"):
                F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(4, 4).bool())
            attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            with pytest.raises(UnsupportedError, match="need_weights=False"):
                attention(x[0], x[0], x[0])
        accelerator.end_training()

    ranks.run(run)


def test_padding_masks_are_divided_like_tokens(ranks):
    def run():
        accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(cp_size=2))
        torch.manual_seed(1)
        q, k, v = torch.randn(3, 2, 2, 8, 4)
        padding = torch.arange(8).expand(2, 8) < torch.tensor([[5], [7]])
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=padding[:, None, None])
        with accelerator.maybe_context_parallel([q, k, v, padding.clone()], [2, 2, 2, 1]):
            part = F.scaled_dot_product_attention(
                q, k, v, attn_mask=padding.chunk(2, 1)[accelerator.context_parallel_rank][:, None, None]
            )
        accelerator.end_training()
        torch.testing.assert_close(part, expected.chunk(2, 2)[accelerator.process_index])

    ranks.run(run)


def test_backends_without_a_mesh_refuse_one():
    with pytest.raises(UnsupportedError, match="device-mesh"):
        Accelerator(cpu=True, backend="single", parallelism_config=ParallelismConfig())
