"""Other programs' files become ours, and nothing that stands in them runs."""

import os
import pickle
import random
import zipfile

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from drivetrain import Accelerator
from drivetrain.checkpoint import verify
from drivetrain.checkpoint.foreign import read_foreign_weights
from drivetrain.checkpoint.unpickling import load_plain, load_records
from drivetrain.cli.checkpoint import checkpoint as command
from drivetrain.errors import CheckpointError


def weights(seed=0):
    torch.manual_seed(seed)
    return {"a.weight": torch.randn(4, 3), "a.bias": torch.randn(4).bfloat16(), "count": torch.tensor(7)}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


def run(*arguments):
    return CliRunner().invoke(command, ["convert", *map(str, arguments)])


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    ("wrap", "key", "left_out"),
    [
        (lambda w: w, "", []),
        (lambda w: {"state_dict": w, "epoch": 3}, "", ["epoch"]),
        (lambda w: {"state_dict": w, "ema": weights(1)}, "state_dict", []),
        (lambda w: {"all": {"net": w, "args": {"lr": 0.1}}}, "all.net", []),
        (lambda w: {**w, "note": "text"}, "", ["note"]),
    ],
)
def test_state_dicts_of_torch_save(tmp_path, legacy, wrap, key, left_out):
    torch.save(wrap(weights()), tmp_path / "a.pt", _use_new_zipfile_serialization=not legacy)
    found = read_foreign_weights(tmp_path / "a.pt", key=key)
    assert same(found.weights, weights())
    assert found.left_out == left_out
    result = run(tmp_path / "a.pt", tmp_path / "out", "--key", key)
    assert result.exit_code == 0
    assert same(load_file(tmp_path / "out" / "model.safetensors"), weights())


def test_tied_weights_stay_tied_and_shards_join(tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    shared = torch.randn(3, 3)
    torch.save({"embed": shared, "head": shared}, folder / "pytorch_model-00001-of-00002.bin")
    torch.save({"rest": torch.ones(2)}, folder / "pytorch_model-00002-of-00002.bin")
    table = {"embed": 1, "head": 1, "rest": 2}
    text = ", ".join(f'"{n}": "pytorch_model-0000{i}-of-00002.bin"' for n, i in table.items())
    (folder / "pytorch_model.bin.index.json").write_text(f'{{"weight_map": {{{text}}}}}')
    assert run(folder, tmp_path / "out").exit_code == 0
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"embed", "rest"}
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"x": "../secret.bin"}}')
    with pytest.raises(CheckpointError, match=r"outside of its directory: '../secret.bin'"):
        read_foreign_weights(folder)


def test_what_to_do_is_said_where_it_is_not_clear(tmp_path):
    torch.save({"model": weights(), "ema": weights(1)}, tmp_path / "two.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "broken.pt").write_bytes(b"PK\x03\x04 no")
    (tmp_path / "text.txt").write_text("x")
    (tmp_path / "safe").mkdir()
    save_file(weights(), tmp_path / "safe" / "model.safetensors")
    for name, words in {
        "two.pt": r"several sets of weights \(model, ema\): choose one with --key",
        "list.pt": "holds a list, not weights by name",
        "broken.pt": "broken.pt can't be read|broken.pt holds more",
        "text.txt": "none of the files that are converted",
        "safe": "holds safetensors already",
        "nowhere": "doesn't exist",
    }.items():
        with pytest.raises(CheckpointError, match=words):
            read_foreign_weights(tmp_path / name)
    with pytest.raises(CheckpointError, match="has no entry 'x'; it has model, ema"):
        read_foreign_weights(tmp_path / "two.pt", key="x")
    assert "leave out --step" in str(run(tmp_path / "two.pt", tmp_path / "out", "--step", 3).exception)
    assert not (tmp_path / "out").exists()


def distributed(folder, state):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def test_distributed_checkpoints_of_torch(tmp_path):
    distributed(tmp_path / "d", {"model": weights(), "optimizer": {"lr": 0.1, "m": torch.ones(3)}})
    found = read_foreign_weights(tmp_path / "d")
    assert same(found.weights, weights())
    assert set(found.left_out) == {"optimizer.lr", "optimizer.m"}
    assert same(read_foreign_weights(tmp_path / "d", key="optimizer").weights, {"m": torch.ones(3)})
    result = run(tmp_path / "d", tmp_path / "out")
    assert same(load_file(tmp_path / "out" / "model.safetensors"), weights()), result.output


def sharded(folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    torch.manual_seed(0)
    whole = {"w": torch.randn(7, 3), "v": torch.randn(2, 5)}
    state = {"w": distribute_tensor(whole["w"], mesh, [Shard(0)]), "v": distribute_tensor(whole["v"], mesh, [Shard(1)])}
    dcp.save({"model": state}, checkpoint_id=folder)
    return whole


def test_pieces_of_several_ranks_are_put_together(ranks, tmp_path):
    whole = ranks.run(sharded, tmp_path / "d")[0]
    assert same(read_foreign_weights(tmp_path / "d").weights, whole)
    (tmp_path / "d" / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__1_0.distcp can't be read: No such file"):
        read_foreign_weights(tmp_path / "d")


# -- whole sessions of Accelerate ------------------------------------------------------------------------------------------


class Counter:
    def __init__(self):
        self.value = torch.zeros(3)

    def state_dict(self):
        return {"value": self.value, "name": "c"}

    def load_state_dict(self, state):
        self.value = state["value"]


def parts():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 1)
    )
    # The head first: positions of parameters in the optimizer aren't those in the model.
    groups = [
        {"params": model[3].parameters(), "lr": 0.02},
        {"params": [*model[0].parameters(), *model[1].parameters()]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)


def train(model, optimizer, scheduler, steps, backward=lambda loss: loss.backward()):
    losses = []
    for _ in range(steps):
        loss = model(torch.rand(8, 4)).square().mean()
        backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def as_accelerate_saves(folder, model, optimizer, scheduler, custom):
    """The files of ``save_state`` as version 1.15 writes them."""
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save(scheduler.state_dict(), folder / "scheduler.bin")
    torch.save(custom.state_dict(), folder / "custom_checkpoint_0.pkl")
    states = {
        "step": 5,
        "random_state": random.getstate(),
        "numpy_random_seed": np.random.get_state(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    torch.save(states, folder / "random_states_0.pkl")


def test_a_training_of_accelerate_goes_on_bit_for_bit(tmp_path):
    custom = Counter()
    straight = parts()
    train(*straight, 5)
    custom.value += 3
    as_accelerate_saves(tmp_path / "theirs", *straight, custom)
    expected = train(*straight, 5), np.random.rand(), random.random()

    result = run(tmp_path / "theirs", tmp_path / "ours", "--epoch", 2)
    assert result.exit_code == 0, result.exception
    assert verify(tmp_path / "ours").ok
    accelerator = Accelerator(cpu=True)
    own = Counter()
    accelerator.register_for_checkpointing(own)
    prepared = accelerator.prepare(*parts())
    accelerator.prepare(torch.utils.data.DataLoader([1.0]))  # whose position isn't known, and which starts afresh
    train(*prepared, 2, accelerator.backward)
    accelerator.load_state(tmp_path / "ours")
    assert (accelerator.step, accelerator.epoch) == (5, 2)
    assert torch.equal(own.value, torch.full((3,), 3.0))
    assert (train(*prepared, 5, accelerator.backward), np.random.rand(), random.random()) == expected


# -- payloads --------------------------------------------------------------------------------------------------------------


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (str(self.marker),))


def plant(path, payload, how):
    if how == "bare":
        path.write_bytes(pickle.dumps(payload))
    else:
        torch.save({"a": torch.ones(1), "x": payload}, path, _use_new_zipfile_serialization=how == "zip")


@pytest.mark.parametrize("how", ["zip", "legacy", "bare"])
@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "optimizer.bin",
        "scheduler.bin",
        "scaler.pt",
        "custom_checkpoint_0.pkl",
        "random_states_0.pkl",
        "random_states_1.pkl",
    ],
)
def test_a_payload_in_a_session_never_runs(tmp_path, name, how):
    as_accelerate_saves(tmp_path / "theirs", *parts(), Counter())
    if name == "pytorch_model.bin":
        (tmp_path / "theirs" / "model.safetensors").unlink()
    plant(tmp_path / "theirs" / name, Payload(tmp_path / "marker"), how)
    result = run(tmp_path / "theirs", tmp_path / "ours")
    assert isinstance(result.exception, CheckpointError)
    assert name in str(result.exception)
    assert not (tmp_path / "marker").exists()
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("how", ["zip", "legacy", "bare"])
def test_a_payload_in_a_state_dict_never_runs_whatever_others_allow_in_the_process(tmp_path, how):
    plant(tmp_path / "a.bin", Payload(tmp_path / "marker"), how)
    with torch.serialization.safe_globals([os.mkdir]):
        with pytest.raises(CheckpointError, match=r"a\.bin (mentions \w+\.mkdir|holds more|can't be read)"):
            load_plain(tmp_path / "a.bin")
        assert os.mkdir in torch.serialization.get_safe_globals()
    assert not (tmp_path / "marker").exists()


def test_a_payload_in_a_table_of_contents_never_runs_nor_reaches_outside(tmp_path):
    marker = tmp_path / "marker"
    folder = tmp_path / "d"
    distributed(folder, {"model": weights()})
    records = load_records(folder / ".metadata")
    whole = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(marker)))
    with pytest.raises(CheckpointError, match=r"\.metadata mentions \w+\.mkdir, which doesn't belong there"):
        read_foreign_weights(folder)
    records.planner_data = Payload(marker)
    (folder / ".metadata").write_bytes(pickle.dumps(records))
    with pytest.raises(CheckpointError, match="mkdir"):
        read_foreign_weights(folder)
    records.planner_data = None
    for info in records.storage_data.values():
        info.relative_path = "../secret"
    (folder / ".metadata").write_bytes(pickle.dumps(records))
    with pytest.raises(CheckpointError, match=r"outside of its directory: '\.\./secret'"):
        read_foreign_weights(folder)
    (folder / ".metadata").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="can't be read"):
        read_foreign_weights(folder)
    (folder / ".metadata").write_bytes(whole)
    (data,) = folder.glob("*.distcp")
    plant(folder / "evil", Payload(marker), "zip")
    data.write_bytes((folder / "evil").read_bytes() * 3)
    with pytest.raises(CheckpointError):
        read_foreign_weights(folder)
    assert not marker.exists()


def test_every_member_of_an_archive_is_data(tmp_path):
    """Code that some readers import from archives stays where it is."""
    torch.save(weights(), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt", "a") as archive:
        archive.writestr("a/code/evil.py", "raise SystemExit")
    assert same(read_foreign_weights(tmp_path / "a.pt").weights, weights())
