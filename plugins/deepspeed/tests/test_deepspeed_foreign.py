"""What plain DeepSpeed saved becomes a checkpoint of ours: losses go on as DeepSpeed's own do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from drivetrain import Accelerator
from drivetrain.cli.checkpoint import checkpoint as command
from drivetrain.errors import CheckpointError
from drivetrain.testing.pytest_plugin import Workers
from drivetrain_deepspeed.foreign import read_checkpoint
from drivetrain_deepspeed.options import DeepSpeedPlugin

STEPS, SAVED_AT = 6, 3


def build() -> tuple[Any, Any, Any]:
    """A model with buffers and sizes that two processes don't share equally, two groups, a schedule that counts."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(7, 13),
        torch.nn.Tanh(),
        torch.nn.Linear(13, 5, bias=False),
        torch.nn.BatchNorm1d(5),
        torch.nn.Linear(5, 1),
    ).eval()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(8, 7, generator=generator) for _ in range(STEPS)]
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def plain(folder: str, stage: int, *, resume: bool = False) -> list[float]:
    """On a rank: a loop of DeepSpeed's, without Drivetrain. Losses after the save, or after what is there was loaded."""
    import deepspeed
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer, scheduler = build()
    configuration = {
        "train_micro_batch_size_per_gpu": 8 // size,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,  # by itself it clips to 1.0
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=configuration, dist_init_required=False
    )
    model.eval()
    if resume:
        assert engine.load_checkpoint(folder, load_lr_scheduler_states=False)[0] is not None
        for _ in range(SAVED_AT):  # schedulers aren't in what an engine of ours saves
            scheduler.step()
    losses = []
    for i, (x, y) in enumerate(batches()):
        if resume and i < SAVED_AT:
            continue
        if i == SAVED_AT and not resume:
            engine.save_checkpoint(folder)
        mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
        loss = (engine(x[mine]) - y[mine]).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append((i, float(mean) / size))
    engine.destroy()
    return [loss for i, loss in losses if i >= SAVED_AT]


def go_on(path: str, stage: int | None) -> list[float]:
    """Losses from the checkpoint on; with one process, or as a rank of several."""
    settings: dict[str, Any] = {} if stage is None else {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=stage)}
    accelerator = Accelerator(cpu=True, **settings)
    model, optimizer, scheduler = accelerator.prepare(*build())
    accelerator.load_state(path)
    assert accelerator.step == SAVED_AT
    model.eval()
    losses = []
    for x, y in batches()[SAVED_AT:]:
        size = 8 // accelerator.num_processes
        mine = slice(accelerator.process_index * size, (accelerator.process_index + 1) * size)
        loss = (model(x[mine]) - y[mine]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    accelerator.end_training()
    return losses


def write_theirs(path: str, folder: str, stage: int) -> None:
    """On a rank: load a checkpoint of ours, save it through the engine."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    model, _, _ = accelerator.prepare(*build())
    accelerator.load_state(path)
    model.save_checkpoint(folder)
    accelerator.end_training()


def convert(source: Path, output: Path) -> Any:
    return CliRunner().invoke(command, ["convert", str(source), str(output)])


@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=pytest.mark.full), 3])
def test_losses_go_on_as_those_of_deepspeed(workers: Workers, tmp_path, stage):
    expected = workers(2).run(plain, str(tmp_path / "theirs"), stage)[0]
    result = convert(tmp_path / "theirs", tmp_path / "ours")
    assert result.exit_code == 0, result.output
    assert go_on(str(tmp_path / "ours"), None) == pytest.approx(expected, abs=1e-6)
    if stage:  # another stage, two processes
        for losses in workers(2).run(go_on, str(tmp_path / "ours"), 3 if stage < 3 else 1):
            assert losses == pytest.approx(expected, abs=1e-6)
    # And back: DeepSpeed goes on from what an engine of ours saved.
    workers(2).run(write_theirs, str(tmp_path / "ours"), str(tmp_path / "back"), stage)
    for losses in workers(2).run(lambda: plain(str(tmp_path / "back"), stage, resume=True)):
        assert losses == pytest.approx(expected, abs=1e-6)
    _faults(tmp_path, stage)


def _faults(tmp_path: Path, stage: int) -> None:
    """What is missing, cut short or unknown is said."""
    theirs = tmp_path / "theirs"
    with pytest.raises(CheckpointError, match="drivetrain checkpoint convert"):
        go_on(str(theirs), None)
    tag = (theirs / "latest").read_text()
    files = sorted((theirs / tag).glob("*_optim_states.pt"))
    if stage:
        assert len(files) == 2
        kept = files[1].read_bytes()
        files[1].write_bytes(kept[: len(kept) // 2])
        with pytest.raises(CheckpointError, match=f"{files[1].name} can't be read"):
            read_checkpoint(theirs)
        files[1].unlink()
        with pytest.raises(CheckpointError, match="written by 2 processes"):
            read_checkpoint(theirs / tag)
        files[1].write_bytes(kept)
        content = torch.load(files[0], weights_only=False)
        content["optimizer_state_dict"]["zero_stage"] = 7
        torch.save(content, files[0])
        with pytest.raises(CheckpointError, match="stage 7, which isn't known: 1, 2 and 3 are"):
            read_checkpoint(theirs)
    (theirs / "latest").write_text("global_step99")
    with pytest.raises(CheckpointError, match=f"names 'global_step99', which isn't there.*{tag}"):
        read_checkpoint(theirs)
    shutil.rmtree(theirs)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("ran",)


def test_nothing_that_stands_in_a_file_runs(tmp_path, capsys):
    (tmp_path / "global_step1").mkdir()
    (tmp_path / "latest").write_text("global_step1")
    torch.save({"module": {}, "client": Evil()}, tmp_path / "global_step1" / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"mentions (builtins\.)?print, which is no plain data: it was not read"):
        read_checkpoint(tmp_path)
    assert "ran" not in capsys.readouterr().out


def test_divided_models_are_refused(tmp_path):
    torch.save({"module": {}}, tmp_path / "mp_rank_00_model_states.pt")
    torch.save({"module": {}}, tmp_path / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="divided by tensors, which isn't read here"):
        read_checkpoint(tmp_path)
