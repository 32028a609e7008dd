"""Meshes of several dimensions: the same numbers as one process that sees whole batches, layers and sequences."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from drivetrain import Accelerator, GradScalerKwargs, ParallelismConfig
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
        "ranks": (
            accelerator.data_parallel_rank,
            accelerator.context_parallel_rank,
            accelerator.sequence_parallel_rank,
            accelerator.tensor_parallel_rank,
        ),
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
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"cp_size": 2}, {"sp_size": 2}, {"dp_replicate_size": 2}], ids=str)
def test_two_ranks(ranks, sizes, masked):
    results = ranks.run(train, sizes, masked)
    check(results, 2 if "dp_replicate_size" in sizes else 1, masked)
    if "tp_size" in sizes:
        assert [r[4]["ranks"] for r in results] == [(0, 0, 0, 0), (0, 0, 0, 1)]
        assert results[0][4]["explained"]["layers divided"] == "8 colwise, 4 rowwise"
    if "cp_size" in sizes or "sp_size" in sizes:
        assert [r[4]["ranks"] for r in results] == [(0, 0, 0, 0), (0, 1, 0, 0) if "cp_size" in sizes else (0, 0, 1, 0)]
        parameters = sum(p.numel() for p in make()[0].parameters())
        assert sum(r[4]["local"] for r in results) == parameters  # shards, too


FOUR = [
    {"dp_replicate_size": 2, "dp_shard_size": 2},
    {"tp_size": 2},
    {"cp_size": 2, "dp_shard_size": 2},
    {"sp_size": 2, "tp_size": 2},
    {"sp_size": 2, "dp_shard_size": 2},
    {"sp_size": 4},
    {"cp_size": 2, "tp_size": 2},
    {"dp_replicate_size": 2, "tp_size": 2},
]


@pytest.mark.parametrize(
    "sizes", [pytest.param(s, marks=[pytest.mark.full] * (i > 3)) for i, s in enumerate(FOUR)], ids=str
)
def test_four_ranks(workers, sizes, tmp_path):
    """With replicas and shards, tensor and context parallel; the model made without weights, and a checkpoint for one process."""
    directory = str(tmp_path / "checkpoint")
    results = workers(4).run(train, sizes, False, directory=directory, empty=sizes == {"tp_size": 2})
    data = 4 // math.prod(sizes.get(n, 1) for n in ("tp_size", "cp_size", "sp_size"))
    check(results, data, False)
    accelerator = Accelerator(cpu=True, backend="single")
    model, optimizer = accelerator.prepare(*make())
    from drivetrain.checkpoint import read_weights

    for name, value in read_weights(directory).items():
        assert torch.equal(value, results[0][3][name]), name
    accelerator.end_training()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_precision_with_divided_layers(ranks, precision):
    check(ranks.run(train, {"tp_size": 2}, False, precision), 1, False, tolerance=1e-2)


def overflow(sizes, layer):
    """On a rank: three steps, of which the second finds an infinity on rank 1 alone, in what it holds of one layer's gradient."""
    scaling = GradScalerKwargs(init_scale=256.0)
    config = ParallelismConfig(**sizes)
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", parallelism_config=config, kwargs_handlers=[scaling])
    model, optimizer = accelerator.prepare(*make())
    batch, positions = IDS[:2], torch.arange(LENGTH).expand(2, -1)
    facts = {"skipped": [], "scales": [], "moved": []}
    for step in range(3):
        before = whole(accelerator.backend.model_state(model))
        inputs, labels, places = batch[:, :-1].clone(), batch[:, 1:].clone(), positions.clone()
        with accelerator.maybe_context_parallel([inputs, labels, places], [1, 1, 1]):
            loss = F.cross_entropy(model(inputs, places).flatten(0, 1), labels.flatten())
            accelerator.backward(loss)
        if step == 1 and accelerator.process_index == 1:
            gradient = model.get_parameter(layer).grad.to_local()
            gradient.view(-1)[:1] = math.inf
        optimizer.step()
        optimizer.zero_grad()
        after = whole(accelerator.backend.model_state(model))
        facts["skipped"].append(accelerator.optimizer_step_was_skipped)
        facts["scales"].append(float(accelerator.backend.precision.state_dict()["scale"]))
        facts["moved"].append(any(not torch.equal(before[n], after[n]) for n in after))
    local = {n: p.to_local().clone() for n, p in model.named_parameters()}
    accelerator.end_training()
    return facts, after, local


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"sp_size": 2}], ids=str)
@pytest.mark.parametrize(
    "layer", ["blocks.0.mlp.up_proj.weight", "blocks.1.first.weight", "blocks.0.mlp.down_proj.bias"]
)
def test_an_overflow_on_one_rank_is_everyones(ranks, sizes, layer):
    """In a layer that is divided, in one that isn't, and in the bias that all ranks of a divided layer hold."""
    (facts, weights, local), (others, other_weights, other_local) = ranks.run(overflow, sizes, layer)
    assert facts == others
    assert facts == {"skipped": [False, True, False], "scales": [256.0, 128.0, 128.0], "moved": [True, False, True]}
    for name, weight in weights.items():
        assert torch.equal(weight, other_weights[name]), name
        if "tp_size" in sizes and weight.shape == local[name].shape:
            assert torch.equal(local[name], other_local[name]), name


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
        wrong = pytest.raises(UnsupportedError, match="neither that of the whole sequence")
        with accelerator.maybe_context_parallel(), wrong:
            F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(4, 4).bool())
        accelerator.end_training()

    ranks.run(run)


def test_backends_that_were_not_asked_to_divide_sequences():
    """A script that insists on one gets no other."""
    with pytest.raises(ConfigurationError, match="Leave sp_backend out"):
        Accelerator(cpu=True, backend="fsdp", parallelism_config=ParallelismConfig(sp_size=2, sp_backend="deepspeed"))


IGNORED = -100


def tokens(sizes):
    """On a rank: an epoch whose loss is the mean over all tokens that count, of which parts of a sequence have unequal numbers."""
    config = ParallelismConfig(**sizes)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, parallelism_config=config, backend="fsdp")
    model, optimizer = make()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(IDS[:16], batch_size=2))
    norms = []
    for batch in loader:
        inputs, labels = batch[:, :-1].clone(), targets(batch)
        positions = torch.arange(LENGTH).repeat(len(batch), 1)
        with accelerator.accumulate(model), accelerator.maybe_context_parallel([inputs, labels, positions], [1, 1, 1]):
            loss = F.cross_entropy(model(inputs, positions).flatten(0, 1), labels.flatten(), reduction="sum")
            accelerator.backward(loss, weight=(labels != IGNORED).sum(), reduction="sum")
            norms += [float(accelerator.clip_grad_norm_(model.parameters(), 0.5))] if accelerator.sync_gradients else []
            optimizer.step()
            optimizer.zero_grad()
    weights = whole(accelerator.backend.model_state(model))
    accelerator.end_training()
    return norms, weights


def targets(batch):
    """Most of the first half of each sequence doesn't count."""
    labels = batch[:, 1:].clone()
    labels[:, : LENGTH // 2 - 1] = IGNORED
    return labels


def test_tokens_are_counted_over_the_parts_of_a_sequence(ranks):
    model, optimizer = make()
    norms = []
    for batch in IDS[:16].split(4):
        logits = model(batch[:, :-1], torch.arange(LENGTH).expand(len(batch), -1))
        F.cross_entropy(logits.flatten(0, 1), targets(batch).flatten()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    for ours, weights in ranks.run(tokens, {"sp_size": 2}):
        assert ours == pytest.approx(norms, abs=2e-5)
        for name, weight in model.state_dict().items():
            torch.testing.assert_close(weights[name], weight, atol=2e-5, rtol=0, msg=name)


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
