import json

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from drivetrain.checkpoint import CheckpointManager, ProjectConfiguration
from drivetrain.cli import main
from drivetrain.testing.sessions import PlainSession


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3, bias=False)
        self.b = torch.nn.Linear(3, 3)
        self.b.weight = self.a.weight


@pytest.fixture
def project(tmp_path):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    session = PlainSession([model, torch.nn.Linear(2, 1)], [(optimizer, [model])])
    manager = CheckpointManager(
        session, project=ProjectConfiguration(tmp_path / "project", automatic_checkpoint_naming=True)
    )
    for _ in range(2):
        model.b(model.a(torch.ones(1, 3))).sum().backward()
        optimizer.step()
        session.step += 1
        manager.save_state(metadata={"loss": 0.5})
    manager._model = model
    return manager, tmp_path / "project" / "checkpoints"


def test_list(project):
    _, folder = project
    (folder / "checkpoint_9").mkdir()
    (folder / "checkpoint_0" / "model.safetensors").unlink()
    for place in (folder, folder.parent):
        lines = run("checkpoint", "list", place).output.splitlines()
        assert lines[0].split() == ["checkpoint", "step", "epoch", "size", "processes", "saved"]
        assert lines[1].split()[:3] == ["checkpoint_0", "1", "0"]
        assert "broken:" in lines[1]
        assert "model.safetensors is missing" in lines[1]
        assert lines[2].split()[:3] == ["checkpoint_1", "2", "0"]
        assert "broken" not in lines[2]
        assert "no manifest.json" in lines[3]
    rows = json.loads(run("checkpoint", "list", folder, "--json").output)
    assert [bool(r["problem"]) for r in rows] == [True, False, True]
    assert run("checkpoint", "list", folder / "checkpoint_1").output.startswith("There are no checkpoints in")


def test_inspect(project):
    _, folder = project
    output = run("checkpoint", "inspect", folder / "checkpoint_1").output
    assert "step 2" in output
    assert "loss 0.5" in output
    assert "torch " in output
    assert "tensors:optimizer" in output
    output = run("checkpoint", "inspect", folder / "checkpoint_1", "--tensors").output
    assert ["model", "a.weight", "float32", "3x3", "36", "B"] in [line.split() for line in output.splitlines()]
    data = json.loads(run("checkpoint", "inspect", folder / "checkpoint_1", "--tensors", "--json").output)
    names = {(t["of"], t["name"]) for t in data["tensors"]}
    assert {("model_1", "bias"), ("optimizer", "optimizer[0].state.a.weight.exp_avg")} <= names
    assert data["files"]["state.json"]["content"] == "state"


def test_verify(project):
    _, folder = project
    path = folder / "checkpoint_1"
    (path / "notes.txt").write_text("mine")
    result = run("checkpoint", "verify", path)
    assert result.exit_code == 0
    assert f"{path} is whole: 5 files" in result.output
    assert "not part of it, and never read: notes.txt" in result.output
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    result = run("checkpoint", "verify", path)
    assert result.exit_code == 1
    assert "model.safetensors is damaged: its checksum" in result.output
    result = run("checkpoint", "verify", folder)
    assert result.exit_code == 1
    assert "is no whole checkpoint" in result.output


def test_export(project, tmp_path):
    manager, folder = project
    model = manager._model
    result = run("checkpoint", "export", folder / "checkpoint_1", tmp_path / "one")
    assert result.exit_code == 0, result.output
    stored = load_file(tmp_path / "one" / "model.safetensors")
    assert set(stored) == {"a.weight", "b.bias"}
    assert torch.equal(stored["a.weight"], model.a.weight)
    result = run("merge-weights", folder / "checkpoint_1", tmp_path / "two", "--max_shard_size", "20")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "two" / "model.safetensors.index.json").exists()
    run("checkpoint", "export", folder / "checkpoint_1", tmp_path / "three", "--unsafe-serialization", "--model", "1")
    assert set(torch.load(tmp_path / "three" / "pytorch_model.bin", weights_only=True)) == {"weight", "bias"}
    result = run("checkpoint", "export", folder / "checkpoint_1", tmp_path / "four", "--model", "2")
    assert result.exit_code == 1
    assert "holds no weights of a model 2; it has 2 models" in result.output
    assert "merge-weights" not in run("--help").output


def test_diff(project):
    manager, folder = project
    a, b = folder / "checkpoint_0", folder / "checkpoint_1"
    result = run("checkpoint", "diff", a, b)
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert any(line.startswith("counters: {'step': 1") for line in lines)
    assert any(line.startswith("model a.weight: 9 of 9 values differ, by up to 0.") for line in lines)
    assert not any(line.startswith("model_1") for line in lines)
    assert run("checkpoint", "diff", a, b, "--tolerance", "100").exit_code == 0
    result = run("checkpoint", "diff", b, b)
    assert (result.exit_code, result.output) == (0, "All tensors are equal.\n")
    manager._session.models[1] = torch.nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    other = manager.save_state(folder / "other")
    rows = json.loads(run("checkpoint", "diff", b, other, "--json").output)["tensors"]
    assert {(r["of"], r["name"], r["difference"].split()[0]) for r in rows} == {
        ("model_1", "weight", "dtype"), ("model_1", "bias", "only"),
    }  # fmt: skip
