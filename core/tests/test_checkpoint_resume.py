"""A resumed session goes on exactly as the uninterrupted one would have; one process."""

import copy
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from drivetrain.checkpoint import CheckpointManager, Manifest, ProjectConfiguration, verify
from drivetrain.errors import CheckpointError, UnsupportedError
from drivetrain.testing.sessions import PlainSession, plain_backend

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw-capturable-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.dropout(self.norm(self.inner(x)).relu(), 0.5, self.training))


class Loader:
    """Draws its batches from a generator of its own."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)
        self.taken = 0

    def next(self):
        self.taken += 1
        return torch.randn(4, 6, generator=self.generator)

    def state_dict(self):
        return {"generator": self.generator.get_state(), "taken": self.taken}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.taken = state["taken"]


class Average:
    """A custom object with a tensor and odd plain data."""

    def __init__(self):
        self.value = torch.zeros(3)
        self.history = {}

    def update(self, loss):
        self.value = 0.9 * self.value + loss
        self.history[len(self.history), "loss"] = loss

    def state_dict(self):
        return {"value": self.value, "history": self.history}

    def load_state_dict(self, state):
        self.value, self.history = state["value"], state["history"]


def seed(n):
    torch.manual_seed(n)
    random.seed(n)
    np.random.seed(n)


def build(kind="adam", start=0):
    seed(start)
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda e: 0.95**e)
    return PlainSession([model], [optimizer], [scheduler], loaders=[Loader()], custom_objects=[Average()])


def train(session, steps):
    losses = []
    (model,), ((optimizer, _),), (scheduler,) = session.models, session.optimizers, session.schedulers
    for _ in range(steps):
        loss = (model(session.loaders[0].next()) * (1 + random.random() + np.random.rand())).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        session.step += 1
        session.custom_objects[0].update(loss.item())
        losses.append(loss.item())
    return losses


def weights(session):
    return [p.detach().clone() for m in session.models for p in m.state_dict().values()]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("blocking", [True, False])
def test_twenty_steps_equal_ten_a_save_and_ten_bit_for_bit(tmp_path, kind, blocking):
    straight = build(kind)
    losses = train(straight, 20)

    first = build(kind)
    assert train(first, 10) == losses[:10]
    manager = CheckpointManager(first)
    path = manager.save_state(tmp_path / "ckpt", blocking=blocking)
    train(first, 3)  # a save in the background holds the state of its call
    assert manager.wait() == (None if blocking else path)

    second = build(kind, start=99)
    train(second, 4)
    manager = CheckpointManager(second)
    assert manager.load_state(tmp_path / "ckpt") == path
    assert second.step == 10
    assert train(second, 10) == losses[10:]
    for a, b in zip(weights(straight), weights(second), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(straight.custom_objects[0].value, second.custom_objects[0].value)
    assert straight.custom_objects[0].history == second.custom_objects[0].history


def test_saving_changes_nothing(tmp_path):
    expected = train(build(), 8)
    saving = build()
    manager = CheckpointManager(saving)
    losses = []
    for i in range(4):
        losses += train(saving, 2)
        manager.save_state(tmp_path / str(i), blocking=bool(i % 2))
    manager.close()
    assert losses == expected


def test_the_directory_holds_what_other_tools_read_and_nothing_else(tmp_path):
    session = build()
    train(session, 2)
    path = CheckpointManager(session).save_state(
        tmp_path / "ckpt", metadata={"loss": torch.tensor(0.5), "note": ("a", 1)}
    )
    names = {p.name for p in path.iterdir()}
    assert names == {
        "manifest.json", "state.json", "model.safetensors", "optimizer.safetensors", "rank_00000.json",
    }  # fmt: skip
    assert {p.name for p in tmp_path.iterdir()} == {"ckpt"}
    for name, value in session.models[0].state_dict().items():
        assert torch.equal(load_file(path / "model.safetensors")[name], value)
    moments = load_file(path / "optimizer.safetensors")
    exp_avg = session.optimizers[0][0].state[session.models[0].inner.weight]["exp_avg"]
    assert torch.equal(moments["optimizer[0].state.inner.weight.exp_avg"], exp_avg)
    manifest = Manifest.read(path)
    assert manifest.counters == {"step": 2, "epoch": 0}
    assert manifest.world_size == 1
    assert manifest.metadata["loss"] == 0.5
    assert manifest.facts["torch"] == torch.__version__
    assert verify(path).ok
    json.loads((path / "state.json").read_text())


def test_nothing_is_a_pickle(tmp_path, monkeypatch):
    import pickle

    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    session = build()
    train(session, 2)
    CheckpointManager(session).save_state(tmp_path / "ckpt")
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    CheckpointManager(build()).load_state(tmp_path / "ckpt")


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(12.0).reshape(3, 4).T)
        self.register_buffer("row", self.table[0])

    def forward(self, x):
        return self.head(self.embed(x))


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    seed(0)
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.tensor([1, 2])).square().mean().backward()
        optimizer.step()
    path = CheckpointManager(PlainSession([model], [optimizer])).save_state(tmp_path / "ckpt")
    stored = load_file(path / "model.safetensors")
    assert set(stored) == {"embed.weight", "table", "row"}
    seed(1)
    fresh = Tied()
    other = torch.optim.Adam(fresh.parameters(), lr=0.1)
    CheckpointManager(PlainSession([fresh], [other])).load_state(path)
    assert fresh.head.weight is fresh.embed.weight
    for name, value in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)
    untied = Tied()
    untied.head.weight = torch.nn.Parameter(torch.zeros(5, 3))
    CheckpointManager(PlainSession([untied])).load_state(path, strict=False)
    assert torch.equal(untied.head.weight, model.head.weight)


def gan():
    seed(3)
    a, b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    b.bias.requires_grad_(False)
    groups = [{"params": [a.weight], "lr": 0.1}, {"params": [a.bias], "lr": 0.2, "weight_decay": 0.1}]
    one = torch.optim.AdamW(groups, lr=0.3)
    two = torch.optim.SGD([b.weight], lr=0.1, momentum=0.9)
    three = torch.optim.Adam([a.weight, b.weight], lr=0.01)
    return PlainSession([a, b], [(one, [a]), (two, [b]), (three, [a, b])])


def gan_step(session):
    a, b = session.models
    loss = b(a(torch.ones(2, 3))).square().mean()
    loss.backward()
    for optimizer, _ in session.optimizers:
        optimizer.step()
    a.zero_grad(), b.zero_grad()
    return loss.item()


def test_several_models_and_optimizers_with_groups_frozen_and_shared_parameters(tmp_path):
    straight = gan()
    losses = [gan_step(straight) for _ in range(6)]
    first, second = gan(), gan()
    for _ in range(3):
        gan_step(first)
    path = CheckpointManager(first).save_state(tmp_path / "ckpt")
    assert {"model.safetensors", "model_1.safetensors", "optimizer_2.safetensors"} <= {p.name for p in path.iterdir()}
    CheckpointManager(second).load_state(path)
    assert [gan_step(second) for _ in range(3)] == losses[3:]


def test_a_compiled_model_has_the_names_of_the_plain_one(tmp_path):
    def session(compiled):
        seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        if compiled:
            model = torch.compile(model, backend="eager")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        return PlainSession([model], [optimizer])

    def step(s):
        loss = s.models[0](torch.ones(3, 2)).square().mean()
        loss.backward()
        s.optimizers[0][0].step()
        s.optimizers[0][0].zero_grad()
        return loss.item()

    straight = session(False)
    losses = [step(straight) for _ in range(4)]
    for before, after in [(True, False), (False, True), (True, True)]:
        a, b = session(before), session(after)
        step(a), step(a)
        path = CheckpointManager(a).save_state(tmp_path / f"{before}{after}")
        assert set(load_file(path / "model.safetensors")) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        CheckpointManager(b).load_state(path)
        assert [step(b), step(b)] == losses[2:]


def test_extra_state_of_modules(tmp_path):
    class Counting(torch.nn.Linear):
        seen = ()

        def get_extra_state(self):
            return {"seen": self.seen, "table": torch.arange(40)}

        def set_extra_state(self, state):
            self.seen = state["seen"]
            assert torch.equal(state["table"], torch.arange(40))

    a, b = Counting(2, 2), Counting(2, 2)
    a.seen = (1, "two")
    path = CheckpointManager(PlainSession([a])).save_state(tmp_path / "ckpt")
    CheckpointManager(PlainSession([b])).load_state(path)
    assert b.seen == (1, "two")
    assert torch.equal(a.weight, b.weight)


def test_strict_loading_names_every_difference_and_changes_nothing(tmp_path):
    a = torch.nn.ModuleDict({"x": torch.nn.Linear(2, 2), "y": torch.nn.Linear(2, 2), "z": torch.nn.Linear(3, 2)})
    b = torch.nn.ModuleDict({"x": torch.nn.Linear(2, 2), "w": torch.nn.Linear(2, 2), "z": torch.nn.Linear(2, 2)})
    path = CheckpointManager(PlainSession([a])).save_state(tmp_path / "ckpt")
    before = copy.deepcopy(b.state_dict())
    with pytest.raises(CheckpointError) as caught:
        CheckpointManager(PlainSession([b])).load_state(path)
    for text in (
        "model 0 (ModuleDict)",
        "missing in the checkpoint: w.weight, w.bias",
        "unexpected in the checkpoint: y.bias, y.weight",
        "z.weight has shape [2, 3] in the checkpoint and [2, 2] here",
    ):
        assert text in str(caught.value)
    assert all(torch.equal(v, before[k]) for k, v in b.state_dict().items())
    b["z"] = torch.nn.Linear(3, 2)
    manager = CheckpointManager(PlainSession([b]))
    with pytest.warns(UserWarning, match="in the checkpoint"):
        manager.load_state(path, strict=False)
    assert manager.last_load.missing == ["w.weight", "w.bias"]
    assert manager.last_load.unexpected == ["y.bias", "y.weight"]
    assert torch.equal(b["z"].weight, a["z"].weight)


def test_different_numbers_of_objects_are_an_error_that_says_which(tmp_path):
    path = CheckpointManager(gan()).save_state(tmp_path / "ckpt")
    session = gan()
    del session.optimizers[1:]
    with pytest.raises(CheckpointError, match=r"3 optimizers \(AdamW, SGD, Adam\), this session 1 \(AdamW\)"):
        CheckpointManager(session).load_state(path)
    session = gan()
    session.custom_objects.append(Average())
    with pytest.raises(CheckpointError, match=r"0 custom objects \(none\), this session 1 \(Average\)"):
        CheckpointManager(session).load_state(path)
    manager = CheckpointManager(session)
    manager.load_state(path, strict=False)
    assert "custom objects" in manager.last_load.notes[0]


def test_an_optimizer_of_other_parameters_is_refused(tmp_path):
    a = torch.nn.Linear(2, 2)
    path = CheckpointManager(PlainSession([a], [torch.optim.SGD(a.parameters(), lr=0.1)])).save_state(tmp_path / "c")
    session = PlainSession([a], [torch.optim.SGD([a.weight], lr=0.1)])
    with pytest.raises(UnsupportedError, match="bias"):
        CheckpointManager(session).load_state(path)


def test_state_that_is_not_plain_is_refused_by_its_path_and_leaves_nothing(tmp_path):
    session = build()
    session.custom_objects[0].history["callback"] = lambda: None
    with pytest.raises(CheckpointError, match=r"custom_object\[0\]\.history\.callback: a lambda"):
        CheckpointManager(session).save_state(tmp_path / "ckpt")
    assert list(tmp_path.iterdir()) == []


def accumulate(session, micro_batches, window=3):
    """Losses of micro-batches; the optimizer steps after every third."""
    model, optimizer = session.models[0], session.optimizers[0][0]
    losses = []
    for _ in range(micro_batches):
        loss = model(session.loaders[0].next()).square().mean()
        loss.backward()
        losses.append(loss.item())
        session.window["items"] = session.window.get("items", 0) + 4
        session.epoch += 1  # counts micro-batches here
        session.mid_window = session.epoch % window != 0
        if not session.mid_window:
            assert session.window == {"items": 12}
            optimizer.step()
            optimizer.zero_grad()
            session.window = {}
    return losses


@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_save_inside_a_window_keeps_the_gradients_so_far(tmp_path, at):
    straight = build()
    losses = accumulate(straight, 9)
    first = build()
    accumulate(first, at)
    path = CheckpointManager(first).save_state(tmp_path / "ckpt")
    second = build(start=7)
    accumulate(second, 1)
    CheckpointManager(second).load_state(path)
    second.mid_window = second.epoch % 3 != 0
    assert accumulate(second, 9 - at) == losses[at:]
    assert all(torch.equal(a, b) for a, b in zip(weights(straight), weights(second), strict=True))


def test_a_backend_without_mid_window_state_refuses_the_save(tmp_path):
    import dataclasses

    backend = plain_backend()
    backend.spec = dataclasses.replace(backend.spec, capabilities=frozenset())
    session = PlainSession([torch.nn.Linear(1, 1)], backend=backend)
    session.mid_window = True
    with pytest.raises(UnsupportedError, match="mid-window-state"):
        CheckpointManager(session).save_state(tmp_path / "ckpt")


def test_hooks_write_their_own_files_and_keep_models_out(tmp_path):
    session = gan()
    manager = CheckpointManager(session)

    def save(models, weights, output_dir):
        assert models == session.models
        for model in models[::-1]:
            (Path(output_dir) / "sub").mkdir(exist_ok=True)
            torch.save(model.state_dict(), f"{output_dir}/sub/{model.out_features}.bin")
            weights.pop()

    def load(models, input_dir):
        while models:
            model = models.pop()
            model.load_state_dict(torch.load(f"{input_dir}/sub/{model.out_features}.bin", weights_only=True))

    handle = manager.register_save_state_pre_hook(save)
    path = manager.save_state(tmp_path / "ckpt")
    assert not list(path.glob("model*.safetensors"))
    assert Manifest.read(path).files["sub/3.bin"].content == "other"
    other = gan()
    gan_step(other)
    reader = CheckpointManager(other)
    with pytest.raises(CheckpointError, match="a save hook kept them out"):
        reader.load_state(path)
    with reader.register_load_state_pre_hook(load):
        reader.load_state(path)
    assert all(torch.equal(a, b) for a, b in zip(weights(session), weights(other), strict=True))
    handle.remove()
    manager.save_state(tmp_path / "ckpt")
    assert (path / "model_1.safetensors").exists()
    assert not (path / "sub").exists()


def test_a_hook_may_drop_single_weights(tmp_path):
    manager = CheckpointManager(gan())
    manager.register_save_state_pre_hook(lambda models, weights, output_dir: weights[0].pop("bias"))
    path = manager.save_state(tmp_path / "ckpt")
    assert set(load_file(path / "model.safetensors")) == {"weight"}


def test_events_and_records(tmp_path):
    events = []
    manager = CheckpointManager(gan(), notify=lambda event, path: events.append((event, path.name)))
    manager.save_state(tmp_path / "a", metadata={"loss": 1.5})
    assert manager.last_save.metadata == {"loss": 1.5}
    assert manager.last_save.nbytes == Manifest.read(tmp_path / "a").size > 0
    manager.save_state(tmp_path / "b", blocking=False)
    assert events[-1] == ("before_save", "b")
    manager.load_state(tmp_path / "a")
    assert [e for e, _ in events] == ["before_save", "after_save"] * 2 + ["before_load", "after_load"]
    assert manager.last_save.path == tmp_path / "b"


def test_without_a_directory_or_naming_the_call_says_what_to_give(tmp_path):
    manager = CheckpointManager(gan(), project=ProjectConfiguration(project_dir=str(tmp_path)))
    for call in (manager.save_state, manager.load_state):
        with pytest.raises(CheckpointError, match="automatic_checkpoint_naming=True"):
            call()
