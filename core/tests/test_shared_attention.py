"""Attention over divided sequences, on two live ranks: the same values and gradients as torch's on whole ones."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain.parallel.attention import GatheringAttention, SwappingAttention
from drivetrain.parallel.config import ParallelismConfig
from drivetrain.parallel.sequences import divide_sequences
from drivetrain.testing.communication import count_collectives

LENGTH, HEADS, WIDTH = 8, 4, 6
BOTH = [GatheringAttention, SwappingAttention]


def inputs(kv_heads=HEADS, batch=3):
    generator = torch.Generator().manual_seed(3)
    shapes = [(batch, HEADS, LENGTH, WIDTH), (batch, kv_heads, LENGTH, WIDTH), (batch, kv_heads, LENGTH, WIDTH + 2)]
    return [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]


def masks():
    """Each kind of mask, by name: of the whole sequence."""
    generator = torch.Generator().manual_seed(5)
    causal = torch.ones(LENGTH, LENGTH).tril().bool()
    additive = torch.randn(1, 1, LENGTH, LENGTH, generator=generator, dtype=torch.float64)
    return {
        "none": None,
        "boolean": causal,
        "per row of the batch": causal[None, None] & (torch.rand(3, 1, 1, LENGTH, generator=generator) > 0.3)
        | torch.eye(LENGTH).bool(),
        "additive": additive,
        "per head": torch.randn(HEADS, LENGTH, LENGTH, generator=generator, dtype=torch.float64),
        "broadcast rows": torch.randn(3, 1, 1, LENGTH, generator=generator, dtype=torch.float64),
    }


def plain(tensors, mask, **kwargs):
    tensors = [t.clone().requires_grad_() for t in tensors]
    out = F.scaled_dot_product_attention(*tensors, attn_mask=mask, **kwargs)
    (out * torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()).sum().backward()
    return [out.detach(), *(t.grad for t in tensors)]


def divided(kind, tensors, mask, **kwargs):
    """On a rank: this rank's part of the same."""
    size, rank = dist.get_world_size(), dist.get_rank()
    parts = [t.chunk(size, -2)[rank].clone().requires_grad_() for t in tensors]
    with kind(dist.group.WORLD):
        out = F.scaled_dot_product_attention(*parts, attn_mask=mask, **kwargs)
        whole = torch.Size([*out.shape[:-2], out.shape[-2] * size, out.shape[-1]])
        factors = torch.arange(whole.numel(), dtype=out.dtype).view(whole).cos().chunk(size, -2)[rank]
        (out * factors).sum().backward()
    return [out.detach(), *(p.grad for p in parts)]


def compare(kind, tensors, mask, **kwargs):
    size, rank = dist.get_world_size(), dist.get_rank()
    for ours, theirs in zip(divided(kind, tensors, mask, **kwargs), plain(tensors, mask, **kwargs), strict=True):
        torch.testing.assert_close(ours, theirs.chunk(size, -2)[rank], atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("kind", BOTH)
def test_every_mask_is_exact(ranks, kind):
    """Whole masks of all shapes, ``is_causal``, ``scale``; a mask's own rows; a padding mask divided like the tokens."""

    def run():
        rank = dist.get_rank()
        for mask in masks().values():
            compare(kind, inputs(), mask)
        compare(kind, inputs(), None, is_causal=True, scale=0.3)
        tensors = inputs()
        mine = [masks()["per head"].chunk(2, -2)[rank], masks()["broadcast rows"].chunk(2, -1)[rank]]
        for part, whole in zip(mine, (masks()["per head"], masks()["broadcast rows"]), strict=True):
            ours, theirs = divided(kind, tensors, part), plain(tensors, whole)
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b.chunk(2, -2)[rank], atol=1e-12, rtol=1e-10)

    ranks.run(run)


@pytest.mark.parametrize("kind", BOTH)
def test_fewer_heads_of_keys(ranks, kind):
    """Grouped queries: heads of keys that processes share, and ones that are fewer than the processes."""

    def run():
        for heads in (2, 1):
            compare(kind, inputs(heads), masks()["boolean"], enable_gqa=True)
        compare(SwappingAttention, inputs(1), None)  # torch broadcasts one head

    ranks.run(run)


@pytest.mark.parametrize("kind", BOTH)
def test_a_mask_that_is_learned_gets_its_gradient(ranks, kind):
    def run():
        tensors = inputs()
        for whole, dim in ((masks()["per head"], -2), (masks()["broadcast rows"], -1), (masks()["per head"], None)):
            expected = whole.clone().requires_grad_()
            plain(tensors, expected)
            ours = (whole if dim is None else whole.chunk(2, dim)[dist.get_rank()]).clone().requires_grad_()
            divided(kind, tensors, ours)
            gradient = ours.grad
            if dim is None:  # each process has the gradient of its queries, or of its heads
                dist.all_reduce(gradient)
                torch.testing.assert_close(gradient, expected.grad)
            else:
                torch.testing.assert_close(gradient, expected.grad.chunk(2, dim)[dist.get_rank()])

    ranks.run(run)


def test_dropout_is_drawn_for_each_processs_heads(ranks):
    def run():
        rank = dist.get_rank()
        query, key, value = inputs()
        torch.manual_seed(10 + rank)
        with SwappingAttention(dist.group.WORLD):
            ours = F.scaled_dot_product_attention(*(t.chunk(2, -2)[rank] for t in (query, key, value)), dropout_p=0.4)
        heads = []
        for other in range(2):
            torch.manual_seed(10 + other)
            some = (t.chunk(2, -3)[other] for t in (query, key, value))
            heads.append(F.scaled_dot_product_attention(*some, dropout_p=0.4))
        torch.testing.assert_close(ours, torch.cat(heads, -3).chunk(2, -2)[rank])

    ranks.run(run)


def test_what_is_sent(ranks):
    """Swapping: two all-to-alls in forward, two in backward, in autocast's dtype; gathering: two gathers, two reductions."""

    def run():
        parts = [t.float().chunk(2, -2)[dist.get_rank()].requires_grad_() for t in inputs()]

        def attend(kind):
            with kind(dist.group.WORLD), torch.autocast("cpu", torch.bfloat16):
                out = F.scaled_dot_product_attention(*parts)
                assert out.dtype is torch.bfloat16
                out.float().sum().backward()

        assert count_collectives(lambda: attend(SwappingAttention)) == {"all_to_all": 4}
        assert count_collectives(lambda: attend(GatheringAttention)) == {"all_gather": 2, "reduce_scatter": 2}

    ranks.run(run)


def test_what_is_refused(ranks):
    def run():
        group = dist.group.WORLD
        x = torch.randn(1, 3, 4, 8)
        with SwappingAttention(group):
            for tensors, message in (
                ((x, x, x), "2 processes can't share 3 heads"),
                ((x[:, :2], x[:, :2, :2], x[:, :2, :2]), "queries have length 4 and keys 2"),
                ((x[0, 0], x[0, 0], x[0, 0]), "equal dimensions before the heads"),
                ((torch.ones(1, 6, 4, 8), x, x), "6 heads of queries, 3 of keys"),
            ):
                with pytest.raises(UnsupportedError, match=message):
                    F.scaled_dot_product_attention(*tensors)
            with pytest.raises(UnsupportedError, match="neither that of the whole sequence"):
                F.scaled_dot_product_attention(x[:, :2], x[:, :2], x[:, :2], attn_mask=torch.ones(4, 4).bool())
        for kind in BOTH:
            attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            with kind(group):
                for function in (lambda: attention(x[0], x[0], x[0], need_weights=False), lambda: layer(x[0])):
                    with pytest.raises(UnsupportedError, match="scaled_dot_product_attention"):
                        function()
        with pytest.raises(UnsupportedError, match="exclude each other"), GatheringAttention(group):
            F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(4, 8).bool(), is_causal=True)
        uneven = divide_sequences(SwappingAttention(group), [torch.ones(1, 3)], [1], set())
        with pytest.raises(ConfigurationError, match=r"length \[3\] can't be shared by 2"), uneven:
            pass

    ranks.run(run)


def test_sequences_are_divided_one_way():
    with pytest.raises(ConfigurationError, match="both divide sequences"):
        ParallelismConfig(cp_size=2, sp_size=2)
    assert ParallelismConfig(sp_size=2, tp_size=2).non_data_parallel_size == 4
