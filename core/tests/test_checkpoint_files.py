"""Formats, names, retention, weights alone."""

import json
import math
import pickle
import subprocess
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.checkpoint import (
    CheckpointManager,
    FileEntry,
    Keep,
    Manifest,
    ProjectConfiguration,
    _checksum,
    load_model_weights,
    newest_checkpoint,
    read_weights,
    save,
    save_model,
    verify,
)
from drivetrain.checkpoint._checksum import checksum_file
from drivetrain.checkpoint._files import ChecksummedFile
from drivetrain.checkpoint.naming import Found, list_checkpoints, next_number
from drivetrain.checkpoint.safetensors_format import SafetensorsFormat, SafetensorsReader, write_safetensors
from drivetrain.checkpoint.staging import Staging
from drivetrain.checkpoint.tensors import to_bytes
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.interfaces import CheckpointFormat
from drivetrain.specs import CheckpointFormatSpec, ProcessInfo
from drivetrain.testing.sessions import PlainSession

ALL_DTYPES = sorted(
    {
        v
        for v in vars(torch).values()
        if isinstance(v, torch.dtype) and not any(w in str(v) for w in ("quint", "qint", "bits", "torch.int1", "int2"))
    }
    - {getattr(torch, f"uint{n}") for n in range(1, 8)}
    - {getattr(torch, f"int{n}", None) for n in range(1, 8)},
    key=str,
)


def random_tensor(dtype, shape):
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8)
    if dtype is torch.bool:
        data &= 1
    return data.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


# -- the format ------------------------------------------------------------------------------------------------------------


def test_one_element_of_a_column_has_bytes_of_its_own():
    value = torch.arange(6.0).view(2, 3)[:1, 1]
    assert value.stride() == (3,) and value.is_contiguous()
    assert to_bytes(value) == to_bytes(torch.tensor([1.0]))
    staging = Staging()
    copy = staging.copy("w", value)
    staging.finish()
    assert torch.equal(copy, value)


def test_every_dtype_in_one_file_whole_and_in_parts(tmp_path):
    tensors = {
        f"{dtype}{shape}": random_tensor(dtype, shape) for dtype in ALL_DTYPES for shape in [(), (0,), (3,), (2, 3, 2)]
    }
    record = write_safetensors(tmp_path / "t", tensors, {"format": "pt"})
    assert record.size == (tmp_path / "t").stat().st_size
    assert record.checksum == checksum_file(tmp_path / "t")
    with SafetensorsReader(tmp_path / "t") as reader:
        assert set(reader.names()) == set(tensors)
        assert reader.metadata == {"format": "pt"}
        for name, value in tensors.items():
            back = reader.read(name)
            assert (reader.dtype(name), reader.shape(name)) == (value.dtype, tuple(value.shape))
            assert (back.dtype, back.shape) == (value.dtype, value.shape)
            assert to_bytes(back) == to_bytes(value)
            if value.ndim == 3:
                region = (slice(1, 2), slice(0, 2), slice(1, 2))
                assert to_bytes(reader.read(name, region)) == to_bytes(value[region])
                assert reader.read(name, (slice(0, 0), slice(0, 3), slice(0, 2))).shape == (0, 3, 2)


def test_other_tools_read_the_file_and_its_files_are_read(tmp_path):
    tensors = {"a": torch.randn(3, 4).T, "b": torch.arange(5, dtype=torch.int16), "c": torch.tensor(True)}
    write_safetensors(tmp_path / "ours", tensors, {})
    theirs = safetensors.torch.load_file(tmp_path / "ours")
    assert all(torch.equal(theirs[n], t) for n, t in tensors.items())
    extra = {**theirs, "u": torch.arange(3).to(torch.uint32)}
    safetensors.torch.save_file(extra, tmp_path / "theirs", metadata={"x": "y"})
    with SafetensorsReader(tmp_path / "theirs") as reader:
        assert reader.metadata == {"x": "y"}
        assert all(torch.equal(reader.read(n), t) for n, t in extra.items())
        assert reader.dtype("u") is torch.uint32


def test_shared_non_contiguous_and_conjugated_tensors(tmp_path):
    base = torch.randn(4, 6, dtype=torch.complex64)
    tensors = {"a": base, "b": base.T, "c": base.conj(), "d": base[::2], "e": torch.randn(3, requires_grad=True)}
    write_safetensors(tmp_path / "t", tensors, {})
    with SafetensorsReader(tmp_path / "t") as reader:
        for name, value in tensors.items():
            assert torch.equal(reader.read(name), value.detach().resolve_conj())


@pytest.mark.parametrize(
    "content", [b"", b"junk", b"\xff" * 64, pickle.dumps({"a": 1}), (8).to_bytes(8, "little") + b"{}      "]
)
def test_a_file_that_is_none_is_an_error_that_names_it(tmp_path, content):
    (tmp_path / "t").write_bytes(content)
    if content.endswith(b"{}      "):
        with SafetensorsReader(tmp_path / "t") as reader:
            assert reader.names() == []
        return
    with pytest.raises(CheckpointError, match=str(tmp_path / "t")):
        SafetensorsReader(tmp_path / "t")


def test_a_format_that_only_reads_whole_files_works_for_sessions(tmp_path):
    class Npz(CheckpointFormat):
        """A plugin's format: bytes in NumPy's container."""

        def write(self, path, tensors, metadata):
            arrays = {f"t{i}": np.frombuffer(to_bytes(t), np.uint8) for i, t in enumerate(tensors.values())}
            about = [[n, str(t.dtype), list(t.shape)] for n, t in tensors.items()]
            arrays["about"] = np.frombuffer(json.dumps([about, dict(metadata)]).encode(), np.uint8)
            with path.open("wb") as file:
                np.savez(file, **arrays)

        def _load(self, path):
            with np.load(path, allow_pickle=False) as data:
                return json.loads(bytes(data["about"])), {k: data[k] for k in data.files}

        def read(self, path):
            (about, _), data = self._load(path)
            for i, (name, dtype, shape) in enumerate(about):
                flat = torch.from_numpy(data[f"t{i}"].copy())
                yield name, flat.view(getattr(torch, dtype.removeprefix("torch."))).reshape(shape)

        def metadata(self, path):
            return self._load(path)[0][1]

    fmt = Npz(CheckpointFormatSpec(name="npz", suffix=".npz"))
    model = torch.nn.Linear(20, 20).to(torch.bfloat16)
    path = CheckpointManager(PlainSession([model]), format=fmt).save_state(tmp_path / "c")
    assert (path / "model.npz").exists()
    assert verify(path).ok
    for kwargs in ({"format": fmt}, {"find_format": {"npz": fmt}.__getitem__}):
        other = torch.nn.Linear(20, 20).to(torch.bfloat16)
        CheckpointManager(PlainSession([other]), **kwargs).load_state(path)
        assert torch.equal(model.weight, other.weight)
    with pytest.raises(CheckpointError, match="format is 'npz', which isn't installed"):
        CheckpointManager(PlainSession([other])).load_state(path)


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(0, 3))
@settings(max_examples=20, deadline=None)
def test_checksums_while_writing_equal_those_of_the_file(tmp_path_factory, parts, big):
    path = tmp_path_factory.mktemp("c") / "f"
    parts = [*parts, *[bytes([i]) * ((8 << 20) + i) for i in range(big)]]
    with ChecksummedFile(path) as file:
        for part in parts:
            file.write(part)
    assert path.read_bytes() == b"".join(parts)
    assert file.record.checksum == checksum_file(path)
    assert file.record.size == path.stat().st_size


@given(st.binary(max_size=300), st.integers(1, 50), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_checksums_do_not_depend_on_how_a_file_is_cut(tmp_path_factory, data, part, block):
    path = tmp_path_factory.mktemp("c") / "f"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_checksum, "_PART", part)
        patch.setattr(_checksum, "_BLOCK", block)
        assert checksum_file(path) == f"crc32:{zlib.crc32(data):08x}"


@given(st.binary(max_size=100), st.binary(max_size=100), st.integers(0, 1 << 16))
@settings(deadline=None)
def test_checksums_of_two_pieces_combine(first, second, zeros):
    second += bytes(zeros)
    assert _checksum.combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_staging_reuses_its_buffers_and_drops_those_not_used():
    staging = Staging()
    live = {"a": torch.randn(4, 4).T, "b": random_tensor(torch.float8_e4m3fn, (3,)), "c": torch.empty(0, 2)}
    first = {k: staging.copy(k, v) for k, v in live.items()}
    staging.finish()
    assert all(to_bytes(first[k]) == to_bytes(v) and first[k].shape == v.shape for k, v in live.items())
    again = staging.copy("a", live["a"] + 1)
    staging.finish()
    assert again.data_ptr() == first["a"].data_ptr()
    assert staging.nbytes == 64
    staging.copy("a", torch.zeros(2))
    staging.finish()
    assert staging.nbytes == 8


# -- names and retention ---------------------------------------------------------------------------------------------------


def stepper(folder, **kwargs):
    keep = kwargs.pop("keep", None)
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, **kwargs)
    return CheckpointManager(PlainSession([torch.nn.Linear(1, 1)]), project=project, keep=keep)


def numbers(folder):
    return [f.number for f in list_checkpoints(folder / "checkpoints")]


def test_numbers_go_on_after_the_highest_and_after_a_load(tmp_path):
    first = stepper(tmp_path)
    assert [first.save_state().name for _ in range(2)] == ["checkpoint_0", "checkpoint_1"]
    second = stepper(tmp_path)
    assert second.load_state().name == "checkpoint_1"
    assert second.save_state().name == "checkpoint_2"
    assert stepper(tmp_path, iteration=7).save_state().name == "checkpoint_7"
    assert stepper(tmp_path, iteration=3).save_state().name == "checkpoint_8"
    assert newest_checkpoint(tmp_path / "checkpoints").name == "checkpoint_8"
    assert next_number(tmp_path / "nowhere", at_least=4) == 4


def test_numbers_are_ordered_as_numbers(tmp_path):
    manager = stepper(tmp_path)
    for _ in range(12):
        manager.save_state()
    assert numbers(tmp_path) == list(range(12))
    assert stepper(tmp_path).load_state().name == "checkpoint_11"


def test_total_limit_counts_this_run_and_what_it_goes_on_from(tmp_path):
    first = stepper(tmp_path, total_limit=2)
    for _ in range(4):
        first.save_state()
    assert numbers(tmp_path) == [2, 3]
    stranger = stepper(tmp_path, total_limit=1)
    stranger.save_state()
    stranger.save_state()
    assert numbers(tmp_path) == [2, 3, 5]
    resumed = stepper(tmp_path, total_limit=2)
    resumed.load_state(tmp_path / "checkpoints" / "checkpoint_3")
    resumed.save_state()
    assert numbers(tmp_path) == [3, 5, 6]


def test_keep_rules(tmp_path):
    manager = stepper(tmp_path, keep=Keep(last=2, every=4, best=1, metric="loss"))
    losses = [5.0, 3.0, 1.0, 4.0, 2.0, float("nan"), 6.0, 7.0, 8.0]
    for i, loss in enumerate(losses):
        manager._session.step = i + 1
        manager.save_state(metadata={"loss": np.float32(loss)})
    assert numbers(tmp_path) == [2, 3, 7, 8]  # best; steps 4 and 8; the last two
    for bad in ({"last": 0}, {"best": 1}, {"metric": "x"}, {"last": 1, "best": 1, "metric": "x", "mode": "avg"}):
        with pytest.raises(ConfigurationError, match="Keep"):
            Keep(**bad)


@given(st.lists(st.sampled_from(["me", "you"]), max_size=12), st.integers(1, 4))
def test_what_expires_is_the_oldest_of_the_run(runs, last):
    present = [
        (Found(i, Path(str(i))), Manifest(files={}, format="", world_size=1, run=run)) for i, run in enumerate(runs)
    ]
    mine = [i for i, run in enumerate(runs) if run == "me"]
    assert [f.number for f in Keep(last=last).expired(present[::-1], run="me")] == mine[:-last]


def test_project_configuration_has_the_names_and_behaviour_scripts_rely_on(tmp_path):
    project = ProjectConfiguration(project_dir=tmp_path)
    assert (project.project_dir, project.logging_dir) == (str(tmp_path), str(tmp_path))
    project.set_directories("other")
    assert (project.project_dir, project.logging_dir) == ("other", str(tmp_path))
    assert ProjectConfiguration("a", "b").logging_dir == "b"
    assert ProjectConfiguration(total_limit=None).explicit() == {"total_limit": None}


def test_the_package_and_what_the_configuration_needs_import_no_torch():
    code = "import sys; from drivetrain.checkpoint import ProjectConfiguration; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


names = st.text(st.characters(codec="utf-8", exclude_characters="/\\\0:"), min_size=1).filter(
    lambda s: s not in (".", "..")
)


@given(st.dictionaries(names, st.builds(FileEntry, st.integers(0), st.text(), st.text())), st.integers(0, 500))
@settings(max_examples=50, deadline=None)
def test_manifests_come_back_and_no_flipped_bit_goes_unnoticed(entries, position):
    manifest = Manifest(files=entries, format="x", world_size=2, ranks=(0, 1), counters={"step": 3})
    data = bytearray(manifest.to_bytes())
    assert Manifest.parse(bytes(data)) == manifest
    data[position % len(data)] ^= 4
    with pytest.raises(CheckpointError):
        Manifest.parse(bytes(data))


# -- weights alone ---------------------------------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(100, 8)
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        self.head = torch.nn.Linear(8, 100, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(("limit", "files"), [("10GB", 1), (1000, 2), ("0.3KB", 3), (1, 5)])
def test_save_model_in_shards_that_transformers_style_tools_read(tmp_path, limit, files):
    model = Tied()
    written = save_model(model.state_dict(), tmp_path, max_shard_size=limit)
    shards = [p for p in written if p.suffix == ".safetensors"]
    assert len(shards) == files
    assert sorted(written) == sorted(tmp_path.iterdir())
    stored = {}
    for path in shards:
        stored.update(safetensors.torch.load_file(path))
    assert set(stored) == set(model.state_dict()) - {"head.weight"}
    if files > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
        assert set(index["weight_map"]) == set(stored)
        for name, file in index["weight_map"].items():
            assert name in safetensors.torch.load_file(tmp_path / file)
    for strict in (True, False):
        fresh = Tied()
        assert load_model_weights(fresh, tmp_path, strict=strict) == ([], [])
        assert all(
            torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), model.state_dict().values(), strict=True)
        )
        assert fresh.head.weight is fresh.embed.weight


def test_saving_again_leaves_no_file_of_the_earlier_save(tmp_path):
    save_model(Tied().state_dict(), tmp_path, max_shard_size=100)
    (tmp_path / "config.json").write_text("{}")
    save_model(Tied().state_dict(), tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_pickles_are_written_on_request_and_never_read(tmp_path):
    model = Tied()
    save_model(model.state_dict(), tmp_path, safe_serialization=False)
    loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert set(loaded) == set(model.state_dict())
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(CheckpointError, match="is a pickle, which could run code"):
            read_weights(path)


def test_weights_that_do_not_fit_are_named(tmp_path):
    save_model(torch.nn.Linear(2, 3).state_dict(), tmp_path)
    with pytest.raises(CheckpointError, match=r"weight has shape \[3, 2\] in the file and \[3, 4\] in the model"):
        load_model_weights(torch.nn.Linear(4, 3), tmp_path, strict=False)
    with pytest.raises(CheckpointError, match=r"missing: 0\.weight, 0\.bias; unexpected: bias, weight"):
        load_model_weights(torch.nn.Sequential(torch.nn.Linear(2, 3)), tmp_path)
    found = load_model_weights(torch.nn.Linear(2, 3, bias=False), tmp_path, strict=False)
    assert found == ([], ["bias"])
    with pytest.raises(CheckpointError, match="x is no dense tensor"):
        save_model({"x": 3}, tmp_path)


@pytest.mark.parametrize("file", ["../x.safetensors", "/x", "..", "a/b"])
def test_an_index_cannot_reach_outside(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match="outside of its directory"):
        read_weights(tmp_path)


def test_weights_of_a_checkpoint_are_read_like_any_others(tmp_path):
    model = Tied()
    path = CheckpointManager(PlainSession([model])).save_state(tmp_path / "c")
    fresh = Tied()
    assert load_model_weights(fresh, path) == ([], [])
    assert torch.equal(fresh.head.weight, model.head.weight)
    with pytest.raises(CheckpointError, match="has neither"):
        read_weights(tmp_path)


def test_save_writes_on_the_main_process_and_whole_files(tmp_path):
    for i, (rank, local, each, there) in enumerate(
        [(0, 0, False, True), (1, 0, False, False), (1, 0, True, True), (1, 1, True, False)]
    ):
        who = ProcessInfo(rank=rank, world_size=4, local_rank=local, local_world_size=2)
        save({"a": torch.ones(2)}, tmp_path / str(i), process=who, save_on_each_node=each)
        assert (tmp_path / str(i)).exists() == there
    assert torch.load(tmp_path / "0", weights_only=True)["a"].sum() == 2
    with pytest.raises(AttributeError):
        save({"a": lambda: 0}, tmp_path / "0")
    assert torch.load(tmp_path / "0", weights_only=True)["a"].sum() == 2
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(CheckpointError, match="can't be saved"):
        save({}, tmp_path / "nowhere" / "f")


def test_a_warning_about_a_broken_checkpoint_comes_once_per_load(tmp_path):
    manager = stepper(tmp_path)
    manager.save_state()
    (manager.save_state() / "manifest.json").unlink()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        manager.load_state()
    assert len(caught) == 1
    assert SafetensorsFormat.__name__ in str(type(manager._format))
