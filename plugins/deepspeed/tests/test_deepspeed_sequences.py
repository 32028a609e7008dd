"""Sequences that processes share, under engines: the same numbers as one process that sees whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from drivetrain import Accelerator, ParallelismConfig
from drivetrain.errors import UnsupportedError
from drivetrain.testing.pytest_plugin import Workers
from drivetrain.testing.training import whole
from drivetrain_deepspeed.checks import check_model
from drivetrain_deepspeed.options import DeepSpeedPlugin

LENGTH, VOCABULARY, WIDTH, HEADS = 8, 13, 16, 4
IDS = torch.randint(0, VOCABULARY, (16, LENGTH + 1), generator=torch.Generator().manual_seed(2))
IGNORED = -100


class Decoder(torch.nn.Module):
    """Attention and an MLP over tokens with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.queries_and_values = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.keys = torch.nn.Linear(WIDTH, WIDTH, bias=False)  # its bias would have no gradient but rounding errors
        self.out, self.head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(positions)
        q, v, k = (
            t.view(*x.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2)
            for t in (*self.queries_and_values(x).chunk(2, -1), self.keys(x))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits: torch.Tensor = self.head(F.gelu(self.out(y.transpose(1, 2).flatten(2))) + x)
        return logits


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(6)
    model = Decoder()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def targets(batch: torch.Tensor) -> torch.Tensor:
    """Parts of a sequence have unequal numbers of tokens that count."""
    labels = batch[:, 1:].clone()
    labels[:, : LENGTH // 2 - 1] = IGNORED
    return labels


def plain(rows_per_step: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms before clipping, and weights."""
    model, optimizer = make()
    losses, norms = [], []
    for batch in IDS.split(rows_per_step):
        logits = model(batch[:, :-1], torch.arange(LENGTH).expand(len(batch), -1))
        loss = F.cross_entropy(logits.flatten(0, 1), targets(batch).flatten())
        loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, dict(model.state_dict())


def train(stage: int, sizes: dict[str, Any], directory: str | None = None) -> dict[str, Any]:
    """On a rank."""
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        parallelism_config=ParallelismConfig(**sizes),
        deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage),
    )
    model, optimizer = make()
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(IDS, batch_size=2))
    losses, norms, seen, sums = [], [], [], torch.zeros(2)
    for batch in loader:
        seen += accelerator.gather_for_metrics(batch[:, 0]).tolist()
        inputs, labels = batch[:, :-1].clone(), targets(batch)
        positions = torch.arange(LENGTH).repeat(len(batch), 1)
        with accelerator.accumulate(model), accelerator.maybe_context_parallel([inputs, labels, positions], [1, 1, 1]):
            total = F.cross_entropy(model(inputs, positions).flatten(0, 1), labels.flatten(), reduction="sum")
            count = (labels != IGNORED).sum()
            accelerator.backward(total, weight=count, reduction="sum")
            sums += torch.stack([total.detach(), count.float()])
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                everyones = sums.clone()
                torch.distributed.all_reduce(everyones)
                losses.append(float(everyones[0] / everyones[1]))
                sums.zero_()
            optimizer.step()
            optimizer.zero_grad()
    weights = whole(accelerator.backend.model_state(model))
    mesh = accelerator.torch_device_mesh
    facts = {"mesh": mesh.mesh_dim_names, "sequence rank": accelerator.sequence_parallel_rank}
    if directory:
        accelerator.save_state(directory)
    accelerator.end_training()
    return {"losses": losses, "norms": norms, "seen": seen, "weights": weights, **facts}


def check(results: list[dict[str, Any]], data: int) -> None:
    losses, norms, weights = plain(2 * 2 * data)
    for found in results:
        assert found["losses"] == pytest.approx(losses, abs=5e-6)
        assert found["norms"] == pytest.approx(norms, abs=5e-6)
        assert found["seen"] == IDS[:, 0].tolist()
        assert found["weights"].keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(found["weights"][name], weight, atol=2e-5, rtol=0, msg=name)


_TWO = [(2, "sp_size"), (3, "sp_size"), (1, "cp_size"), (0, "sp_size"), (1, "sp_size"), (2, "cp_size"), (3, "cp_size")]


@pytest.mark.parametrize(
    ("stage", "size"), [pytest.param(*c, marks=[pytest.mark.full] * (i > 2), id=f"{c}") for i, c in enumerate(_TWO)]
)
def test_two_ranks_share_sequences(workers: Workers, tmp_path: Any, stage: int, size: str) -> None:
    """Tokens counted over both parts, clipping, accumulation; and a checkpoint for one process."""
    results = workers(2).run(train, stage, {size: 2}, str(tmp_path / "checkpoint"))
    check(results, 1)
    assert [r["sequence rank"] for r in results] == ([0, 1] if size == "sp_size" else [0, 0])
    from drivetrain.checkpoint import read_weights

    for name, value in read_weights(str(tmp_path / "checkpoint")).items():
        assert torch.equal(value, results[0]["weights"][name]), name


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_four_ranks_share_rows_and_sequences(workers: Workers, stage: int) -> None:
    """Two by two: rows are divided over the pairs that share sequences."""
    results = workers(4).run(train, stage, {"sp_size": 2})
    check(results, 2)
    assert results[0]["mesh"] == ("dp_shard", "sp")


def test_meshes_that_engines_do_not_form(workers: Workers) -> None:
    def run() -> None:
        for sizes, message in (
            ({"tp_size": 2}, "don't divide layers"),
            ({"dp_replicate_size": 2}, "over all processes"),
        ):
            with pytest.raises(UnsupportedError, match=message):
                Accelerator(cpu=True, backend="deepspeed", parallelism_config=ParallelismConfig(**sizes))

    workers(2).run(run)


def test_models_whose_layers_were_divided_before() -> None:
    """What ``deepspeed.tp_model_init`` leaves on the weights that it has cut."""
    model = torch.nn.Linear(2, 2)
    model.weight.ds_is_replaced_module = True  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="tp_model_init"):
        check_model(model, placement=True, device=torch.device("cpu"))
