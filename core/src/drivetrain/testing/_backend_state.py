"""State: canonical names, checkpoints, resuming at the same and at another world size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from drivetrain.errors import UnsupportedError
from drivetrain.interfaces import Shards
from drivetrain.specs import Capability
from drivetrain.testing._backend_base import BackendKit, check_all_close
from drivetrain.testing._backend_windows import Loop
from drivetrain.testing.pytest_plugin import Workers
from drivetrain.testing.training import make_data, make_model, whole

__all__ = ["StateTests"]

#: Enough for a window of four on three ranks before the middle of an epoch, and no multiple of anything.
_ROWS = 101


class NamedModel(torch.nn.Module):
    """Nested modules, tied parameters, a buffer that is saved and one that isn't."""

    body: torch.nn.Module
    head: torch.nn.ModuleDict
    scale: torch.Tensor
    cache: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()
        out, back = torch.nn.Linear(3, 16, bias=False), torch.nn.Linear(3, 16)
        back.weight = out.weight
        with torch.no_grad():
            out.weight.copy_(torch.linspace(-1, 1, 48).view(16, 3))
            back.bias.fill_(0.5)
        self.head = torch.nn.ModuleDict({"out": out, "back": back})
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head: Any = self.head
        y = self.body(x) * self.scale
        out: torch.Tensor = head["out"](y) + head["back"](y)
        return out


def _groups(model: NamedModel) -> list[dict[str, Any]]:
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    return [
        {"params": [p for n, p in model.named_parameters() if not n.endswith("bias")]},
        {"params": biases, "lr": 0.01},
    ]


def _loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).float().pow(2).mean()
    return loss


def _step(accelerator: Any, model: Any, optimizer: Any) -> None:
    """One step on the same sixteen rows, whatever the world size."""
    rows = torch.stack([row["x"] for row in make_data(12)])
    backend = accelerator.backend
    mine = rows.chunk(backend.data_world_size)[backend.data_rank].to(accelerator.device)
    accelerator.backward(_loss(model, mine))
    optimizer.step()
    optimizer.zero_grad()


def plain_named(steps: int) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """Weights and optimizer state by name after some steps in plain PyTorch."""
    model = NamedModel()
    optimizer = torch.optim.AdamW(_groups(model), lr=0.02)
    rows = torch.stack([row["x"] for row in make_data(12)])
    for _ in range(steps):
        _loss(model, rows).backward()
        optimizer.step()
        optimizer.zero_grad()
    names = {id(p): n for n, p in model.named_parameters()}
    return dict(model.state_dict()), {names[id(p)]: dict(state) for p, state in optimizer.state.items()}


def _whole_state(state: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    return {
        name: whole({k: v if isinstance(v, Shards) else torch.as_tensor(v) for k, v in values.items()})
        for name, values in state["state"].items()
    }


def _named_training(kit: BackendKit) -> tuple[Any, NamedModel, Any, Any]:
    accelerator = kit.make_accelerator()
    inner = NamedModel()
    model, optimizer = accelerator.prepare(inner, torch.optim.AdamW(_groups(inner), lr=0.02))
    return accelerator, inner, model, optimizer


def named_state(kit: BackendKit) -> dict[str, Any]:
    """On a rank: state by name after two steps."""
    accelerator, inner, model, optimizer = _named_training(kit)
    for _ in range(2):
        _step(accelerator, model, optimizer)
    state = accelerator.backend.optimizer_state(optimizer.optimizer, [model])
    facts = {
        "weights": whole(accelerator.backend.model_state(model)),
        "tied": inner.head["out"].weight is inner.head["back"].weight,
        "optimizer": _whole_state(state),
        "groups": [g["params"] for g in state["param_groups"]],
        "rates": [g["lr"] for g in state["param_groups"]],
    }
    accelerator.end_training()
    return facts


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    if isinstance(value, Shards):
        blocks = iter(value.blocks)
        return value.like(lambda offsets, sizes: next(blocks).values.detach().clone())
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def load_named_state(kit: BackendKit) -> dict[str, Any]:
    """On a rank: state after two steps; changed by a third, loaded, the third again; and what loading says about wrong names."""
    accelerator, inner, model, optimizer = _named_training(kit)
    backend = accelerator.backend
    for _ in range(2):
        _step(accelerator, model, optimizer)
    saved = _copy(dict(backend.model_state(model)))
    saved_optimizer = _copy(backend.optimizer_state(optimizer.optimizer, [model]))
    facts: dict[str, Any] = {"saved": whole(saved)}
    _step(accelerator, model, optimizer)
    facts["third"] = whole(backend.model_state(model))
    facts["names"] = backend.load_model_state(model, saved)
    backend.load_optimizer_state(optimizer.optimizer, [model], saved_optimizer)
    facts["loaded"] = whole(backend.model_state(model))
    facts["tied"] = inner.head["out"].weight is inner.head["back"].weight
    _step(accelerator, model, optimizer)
    facts["third again"] = whole(backend.model_state(model))
    first, *others = saved
    fewer = {n: saved[n] for n in others}
    facts["missing"] = first
    facts["loose"] = backend.load_model_state(model, {**fewer, "unknown": torch.zeros(1)}, strict=False)
    facts["strict"] = _complaint(lambda: backend.load_model_state(model, fewer))
    groups = [{**g, "params": g["params"][:-1]} for g in saved_optimizer["param_groups"]]
    other = {**saved_optimizer, "param_groups": groups}
    facts["groups"] = _complaint(lambda: backend.load_optimizer_state(optimizer.optimizer, [model], other))
    accelerator.end_training()
    return facts


def _complaint(function: Callable[[], Any]) -> tuple[str, str]:
    """Class and message of the error that a call ends in."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _training(kit: BackendKit, steps: int, precision: str) -> tuple[Any, ...]:
    accelerator = kit.make_accelerator(gradient_accumulation_steps=steps, mixed_precision=precision)
    inner: Any = torch.nn.Sequential(make_model(), torch.nn.Dropout(0.2))
    optimizer: Any = torch.optim.AdamW(inner.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    loader: Any = torch.utils.data.DataLoader(make_data(_ROWS), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    return accelerator, *accelerator.prepare(inner, optimizer, scheduler, loader)


def _train(training: tuple[Any, ...], save: Callable[[int], None] | None = None) -> list[float]:
    """Losses of this rank over what is left of two epochs; ``save`` is told the number of each micro-batch after it."""
    accelerator, model, optimizer, scheduler, loader = training
    losses: list[float] = []
    for _ in accelerator.epochs(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = cross_entropy(model(batch["x"]).float(), batch["y"])
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
            if save is not None:
                save(len(losses))
    return losses


def save_and_go_on(kit: BackendKit, directory: str, steps: int, stop_after: int, precision: str) -> dict[str, Any]:
    """On a rank: a training that is saved on the way, and what follows."""
    torch.manual_seed(5)
    training = _training(kit, steps, precision)
    accelerator, model, optimizer, *_ = training
    state: dict[str, Any] = {}

    def save(number: int) -> None:
        if number == stop_after:
            accelerator.save_state(directory)
            state.update(_named_state(accelerator, model, optimizer))

    losses = _train(training, save)
    weights = whole(accelerator.backend.model_state(model))
    accelerator.end_training()
    return {"before": losses[:stop_after], "later": losses[stop_after:], "state": state, "weights": weights}


def load_and_go_on(kit: BackendKit, directory: str, steps: int, precision: str) -> dict[str, Any]:
    """On a rank: another process's training from that checkpoint on."""
    torch.manual_seed(1234)  # the checkpoint's generators count, not these
    training = _training(kit, steps, precision)
    accelerator, model, optimizer, *_ = training
    accelerator.load_state(directory)
    state = _named_state(accelerator, model, optimizer)
    later = _train(training)
    weights = whole(accelerator.backend.model_state(model))
    accelerator.end_training()
    return {"later": later, "state": state, "weights": weights}


def _named_state(accelerator: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    backend = accelerator.backend
    return {
        "weights": whole(backend.model_state(model)),
        "optimizer": _whole_state(backend.optimizer_state(optimizer.optimizer, [model])),
        "precision": dict(backend.precision.state_dict()),
        "step": accelerator.step,
        "rate": optimizer.param_groups[0]["lr"],
    }


def save_named(kit: BackendKit, directory: str) -> None:
    """On a rank: two steps, then a checkpoint."""
    accelerator, _, model, optimizer = _named_training(kit)
    for _ in range(2):
        _step(accelerator, model, optimizer)
    accelerator.save_state(directory)
    accelerator.end_training()


def load_named(kit: BackendKit, directory: str) -> dict[str, Any]:
    """On a rank: the checkpoint, then a third step."""
    accelerator, _, model, optimizer = _named_training(kit)
    _step(accelerator, model, optimizer)  # is overwritten
    accelerator.load_state(directory)
    _step(accelerator, model, optimizer)
    facts = {
        "weights": whole(accelerator.backend.model_state(model)),
        "optimizer": _whole_state(accelerator.backend.optimizer_state(optimizer.optimizer, [model])),
        "steps": accelerator.step,
    }
    accelerator.end_training()
    return facts


def interrupt_window(kit: BackendKit, directory: str) -> dict[str, Any]:
    """On a rank: a window of four; the same saved after two micro-batches and finished; and finished from the checkpoint."""
    whole_window = Loop(kit, gradient_accumulation_steps=4)
    for _ in range(4):
        whole_window.micro_batch()
    facts = {"expected": whole_window.end(whole_window.weights())}
    saving = Loop(kit, gradient_accumulation_steps=4)
    loading = Loop(kit, gradient_accumulation_steps=4)
    for name, loop in (("saved", saving), ("loaded", loading)):
        if loop is saving:
            loop.micro_batch()
            loop.micro_batch()
            loop.accelerator.save_state(directory)
        else:
            loop.accelerator.load_state(directory)
            loop.taken = 2
        loop.micro_batch()
        loop.micro_batch()
        facts[name] = loop.weights()
        facts[f"{name} steps"] = loop.accelerator.step
    saving.end(None)
    loading.end(None)
    return facts


class StateTests(BackendKit):
    """Names, loading, checkpoints."""

    #: Up to this world size a resumed run is bit-identical; above, equal within ``tolerance["fp32"]``.
    bit_identical_up_to = 2

    def test_state_has_the_names_of_the_users_model(self, workers: Workers, world_size: int) -> None:
        """Model and optimizer state by the unwrapped model's names, with whole (or sharded) values.

        Tied parameters stay tied, and have one state, under their first name.
        """
        weights, optimizer = plain_named(2)
        biases = [n for n, _ in NamedModel().named_parameters() if n.endswith("bias")]
        for rank, facts in enumerate(self.run(workers, world_size, named_state)):
            who = f"rank {rank}"
            assert list(facts["weights"]) == list(weights), f"{who}: model_state has the names {list(facts['weights'])}"
            assert facts["tied"], f"{who}: tied parameters aren't tied any more"
            self._check(facts["weights"], weights, f"{who}: model_state")
            assert facts["optimizer"].keys() == optimizer.keys(), (
                f"{who}: optimizer_state has {sorted(map(str, facts['optimizer']))}, not {sorted(optimizer)}"
            )
            for name, values in optimizer.items():
                self._check(facts["optimizer"][name], values, f"{who}: optimizer_state of {name}")
            assert facts["groups"][1] == biases and facts["rates"] == [0.02, 0.01], f"{who}: other parameter groups"

    def test_loading_state(self, workers: Workers, world_size: int) -> None:
        """Loading restores weights and optimizer, says what is missing and unexpected, and refuses other parameter groups."""
        third, _ = plain_named(3)
        for rank, facts in enumerate(self.run(workers, world_size, load_named_state)):
            who = f"rank {rank}"
            self._check(facts["third"], third, f"{who}: weights after a third step")
            assert [list(names) for names in facts["names"]] == [[], []], f"{who}: strict loading returned names"
            for name, weight in facts["loaded"].items():
                assert torch.equal(weight, facts["saved"][name]), f"{who}: loading didn't restore {name}"
            assert facts["tied"], f"{who}: tied parameters aren't tied any more"
            self._check(facts["third again"], third, f"{who}: weights after loading and a third step")
            assert [list(names) for names in facts["loose"]] == [[facts["missing"]], ["unknown"]], (
                f"{who}: strict=False must return missing and unexpected names, not {facts['loose']}"
            )
            assert facts["missing"] in facts["strict"][1], f"{who}: a missing name must be an error that names it"
            assert facts["groups"][0] == UnsupportedError.__name__, (
                f"{who}: other parameter groups weren't refused with UnsupportedError, but answered {facts['groups']}"
            )

    def _check(self, ours: dict[str, Any], theirs: dict[str, Any], what: str) -> None:
        check_all_close(ours, theirs, self.tolerance["fp32"] * 10, what)

    @pytest.mark.parametrize("steps", [1, 4])
    def test_a_resumed_run_is_bit_identical(
        self, workers: Workers, world_size: int, precision: str, steps: int, tmp_path: Path
    ) -> None:
        """Saved inside an epoch, loaded into new objects: state, every later loss (with dropout and shuffling), and final weights."""
        batches = -(-_ROWS // (4 * world_size))
        stop_after = batches // 2 // steps * steps  # where a window ends
        directory = str(tmp_path / "checkpoint")
        saved = self.run(workers, world_size, save_and_go_on, directory, steps, stop_after, precision)
        loaded = self.run(workers, world_size, load_and_go_on, directory, steps, precision)
        for rank, (first, second) in enumerate(zip(saved, loaded, strict=True)):
            who = f"rank {rank} of {world_size}"
            assert first["before"] and first["later"], "the training ended before it was saved"
            _check_equal(second["state"], first["state"], f"{who}: right after loading")
            if world_size <= self.bit_identical_up_to:
                assert second["later"] == first["later"], (
                    f"{who}: losses after loading {second['later'][:4]}, without interruption {first['later'][:4]}"
                )
                _check_equal(second["weights"], first["weights"], f"{who}: at the end")
            else:
                assert second["later"] == pytest.approx(first["later"], abs=self.tolerance[precision]), who

    def test_a_checkpoint_is_read_at_another_world_size(
        self, workers: Workers, world_size: int, tmp_path: Path
    ) -> None:
        """Saved by one number of ranks, loaded by every other: the next step gives what plain PyTorch gives."""
        directory = str(tmp_path / "checkpoint")
        self.run(workers, world_size, save_named, directory)
        weights, optimizer = plain_named(3)
        for size in self.world_sizes:
            if size == world_size:
                continue
            for rank, facts in enumerate(self.run(workers, size, load_named, directory)):
                who = f"{world_size} ranks saved, rank {rank} of {size}"
                self._check(facts["weights"], weights, who)
                assert facts["steps"] == 3, f"{who} counts {facts['steps']} steps, not 3"
                for name, values in optimizer.items():
                    self._check(facts["optimizer"][name], values, f"{who}: optimizer state of {name}")

    def test_a_window_goes_on_where_it_was_saved(self, workers: Workers, world_size: int, tmp_path: Path) -> None:
        """Declared `Capability.MID_WINDOW_STATE`: gradients so far are part of the checkpoint."""
        if not self.has(Capability.MID_WINDOW_STATE):
            return
        for rank, result in enumerate(self.run(workers, world_size, interrupt_window, str(tmp_path / "window"))):
            for name in ("saved", "loaded"):
                who = f"rank {rank}, {name} in the middle of a window"
                assert result[f"{name} steps"] == 1, f"{who}: the window didn't end where it would have"
                _check_equal(result[name], result["expected"], who)


def _check_equal(ours: Any, theirs: Any, what: str) -> None:
    """Equal to the last bit, through dictionaries."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), f"{what}: {sorted(ours)}, not {sorted(theirs)}"
        for key in theirs:
            _check_equal(ours[key], theirs[key], f"{what}: {key}")
    elif isinstance(theirs, torch.Tensor):
        assert torch.equal(ours, theirs), f"{what}: {ours.flatten()[:4].tolist()}, not {theirs.flatten()[:4].tolist()}"
    else:
        assert ours == theirs, f"{what}: {ours}, not {theirs}"
