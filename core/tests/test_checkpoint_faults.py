"""Whatever happens, a checkpoint is whole or absent, and earlier ones are as they were."""

import contextlib
import errno
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
import zlib
from pathlib import Path

import pytest
import torch

from drivetrain.checkpoint import CheckpointManager, Manifest, ProjectConfiguration, newest_checkpoint, verify
from drivetrain.checkpoint import _files as files
from drivetrain.checkpoint.commit import recover, wait_until_visible
from drivetrain.errors import CheckpointError
from drivetrain.testing.sessions import PlainSession

SIZE = 40_000


def session(step=0):
    torch.manual_seed(0)
    model = torch.nn.Linear(SIZE, 1)
    model.weight.data.fill_(step)
    result = PlainSession([model], [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)])
    result.step = step
    return result


def numbered(folder, step, **kwargs):
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, **kwargs)
    return CheckpointManager(session(step), project=project)


def in_child(function):
    """Run in a forked process; give its exit code, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            warnings.simplefilter("ignore")
            code = function() or 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_at(count):
    """From now on, be killed at the count-th change of the file system."""
    left = [count]

    def tick(*args):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    watched = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "ctypes.dlsym"}
    sys.addaudithook(lambda event, args: tick() if event in watched else None)
    real_write, real_fsync = os.write, os.fsync

    def write(fd, data):
        tick()
        done = real_write(fd, data[: len(data) // 2]) if len(data) > 1 else 0
        tick()  # half of it is there
        return done + real_write(fd, data[done:])

    os.write = write
    os.fsync = lambda fd: (tick(), real_fsync(fd))[1]


@pytest.mark.parametrize("exchange", [True, False])
def test_killed_at_any_moment_of_replacing_a_directory(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(files, "_exchange_at_once", lambda source, target: False)
    path = tmp_path / "c"
    CheckpointManager(session(1)).save_state(path)
    outcomes = []
    for count in range(1, 200):

        def child(count=count):
            manager = CheckpointManager(session(2))
            kill_at(count)
            manager.save_state(path)

        code = in_child(child)
        reader = session(7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            CheckpointManager(reader).load_state(path)
        assert reader.step in (1, 2)
        assert torch.equal(reader.models[0].weight, torch.full((1, SIZE), float(reader.step)))
        outcomes.append(reader.step)
        CheckpointManager(session(1)).save_state(path)  # the next save works and leaves nothing lying around
        assert [p.name for p in tmp_path.iterdir() if ".opening-" not in p.name] == ["c"]
        for leftover in tmp_path.glob(".*.opening-*"):
            assert not any(leftover.iterdir())
            leftover.rmdir()
        if code == 0:
            break
        assert code == -signal.SIGKILL
    else:
        raise AssertionError("the save never ended")
    assert outcomes == sorted(outcomes)  # the old one up to one moment, the new one from then on
    assert outcomes.count(1) > 20
    assert outcomes.count(2) > 2


def test_killed_at_any_moment_of_a_numbered_save_with_a_limit(tmp_path):
    folder = tmp_path / "checkpoints"
    numbered(tmp_path, 1, total_limit=1).save_state()
    steps = []
    for count in range(1, 300):

        def child(count=count):
            manager = numbered(tmp_path, 2, total_limit=1)
            manager.load_state()
            manager._session.step = 2
            kill_at(count)
            manager.save_state()

        code = in_child(child)
        newest = newest_checkpoint(folder)
        assert newest is not None
        assert verify(newest).ok
        steps.append(Manifest.read(newest).counters["step"])
        reader = numbered(tmp_path, 7, total_limit=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reader.load_state()
        reader._session.step = 1
        reader.save_state()
        present = [p for p in folder.iterdir() if ".opening-" not in p.name]
        whole = [p for p in present if (p / "manifest.json").exists()]
        assert len(whole) == 1
        for broken in set(present) - set(whole):  # killed while it removed the old one: no manifest, so nobody reads it
            shutil.rmtree(broken)
        if code == 0:
            break
        assert code == -signal.SIGKILL
    else:
        raise AssertionError("the save never ended")
    assert steps == sorted(steps)
    assert {1, 2} == set(steps)


def test_everything_is_durable_before_the_rename(tmp_path, monkeypatch):
    trace = []
    real_fsync, real_rename = os.fsync, Path.rename
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (trace.append(("fsync", str(Path(f"/proc/self/fd/{fd}").readlink()))), real_fsync(fd))[1],
    )
    monkeypatch.setattr(Path, "rename", lambda a, b: (trace.append(("rename", str(a), str(b))), real_rename(a, b))[1])
    manager = CheckpointManager(session())

    def hook(models, weights, output_dir):
        (Path(output_dir) / "sub").mkdir()
        (Path(output_dir) / "sub" / "extra.txt").write_text("x")

    manager.register_save_state_pre_hook(hook)
    manager.save_state(tmp_path / "new" / "c")
    last = max(i for i, t in enumerate(trace) if t[0] == "rename")
    temporary = trace[last][1]
    before = [t[1] for t in trace[:last] if t[0] == "fsync"]
    for file in (tmp_path / "new" / "c").rglob("*"):
        name = file.relative_to(tmp_path / "new" / "c")
        assert f"{temporary}/{name}" in before
    assert before[-2:] == [f"{temporary}/manifest.json", temporary]
    assert str(tmp_path) in before  # it holds the new folder
    assert ("fsync", str(tmp_path / "new")) in trace[last:]


@contextlib.contextmanager
def small_disk(path):
    """A file system of 300 kB where that may be mounted; else a limit on file sizes."""
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(path)], capture_output=True)
    if done.returncode == 0:
        try:
            yield errno.ENOSPC
        finally:
            subprocess.run(["umount", str(path)], check=True)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("blocking", [True, False])
def test_a_full_disk(tmp_path, blocking):
    with small_disk(tmp_path / "disk") as code:
        folder = tmp_path / "disk"
        small = PlainSession([torch.nn.Linear(10, 1)])
        CheckpointManager(small).save_state(folder / "c")
        before = sorted(p.name for p in folder.iterdir())
        big = PlainSession([torch.nn.Linear(1_000_000, 1)])
        manager = CheckpointManager(big)
        with pytest.raises(CheckpointError) as caught:
            manager.save_state(folder / "c", blocking=blocking)
            manager.wait()
        assert os.strerror(code) in str(caught.value)
        assert "model.safetensors can't be written" in str(caught.value)
        assert "earlier ones are as they were" in str(caught.value)
        assert sorted(p.name for p in folder.iterdir()) == before
        assert verify(folder / "c").ok
        manager.close()


def test_an_error_in_the_background_shows_in_wait_and_in_the_next_save(tmp_path):
    def failing():
        manager = CheckpointManager(session())
        manager.register_save_state_pre_hook(
            lambda models, weights, output_dir: Path(output_dir, "link").symlink_to("/etc/passwd")
        )
        manager.save_state(tmp_path / "c", blocking=False)
        return manager

    manager = failing()
    deadline = time.monotonic() + 30
    with pytest.raises(CheckpointError, match="a hook wrote link"):
        while time.monotonic() < deadline:
            if manager.failed:
                manager.wait()
            time.sleep(0.01)
    assert manager.wait() is None
    manager = failing()
    with pytest.raises(CheckpointError, match="a hook wrote link"):
        manager.save_state(tmp_path / "d")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def read_only(tmp_path, monkeypatch):
    """A file system at ``ro`` that takes nothing; where it may not be mounted, the error that it would give."""
    (tmp_path / "ro").mkdir()
    if (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", tmp_path / "ro"], capture_output=True).returncode
        == 0
    ):
        yield
        subprocess.run(["umount", tmp_path / "ro"], check=True)
        return
    real = Path.mkdir

    def mkdir(self, *args, **kwargs):
        if "opening" in self.name:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    yield


@pytest.mark.parametrize("place", ["file", "parent", "foreign", "readonly"])
def test_places_that_cannot_hold_a_checkpoint(tmp_path, request, place):
    path = tmp_path / "c"
    if place == "file":
        path.write_text("mine")
        words = f"{path} is a file"
    elif place == "parent":
        path.write_text("mine")
        path = path / "below"
        words = "can't hold a checkpoint"
    elif place == "foreign":
        path.mkdir()
        (path / "notes.txt").write_text("mine")
        words = "holds other files and is no checkpoint"
    else:
        request.getfixturevalue("read_only")
        path = tmp_path / "ro" / "c"
        words = "Read-only file system. The file system is read-only: save elsewhere."
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        CheckpointManager(session()).save_state(path)
    assert words in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def two_checkpoints(folder):
    manager = numbered(folder, 1)
    manager.save_state()
    manager._session.step = 2
    manager._session.models[0].weight.data.fill_(2)
    return manager.save_state()


def damages():
    def truncate(path):
        path.write_bytes(path.read_bytes()[:-1])

    def flip(path):
        data = bytearray(path.read_bytes())
        data[random.Random(path.name).randrange(len(data))] ^= 1
        path.write_bytes(data)

    def replace_by_link(path):
        other = path.with_name("elsewhere")
        path.rename(other)
        path.symlink_to(other)

    return {"truncated": truncate, "flipped": flip, "missing": Path.unlink, "link": replace_by_link}


@pytest.mark.parametrize("kind", damages())
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors", "rank_00000.json"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_loaded(tmp_path, kind, name):
    broken = two_checkpoints(tmp_path)
    if (kind, name) == ("link", "manifest.json"):
        (broken / name).unlink()
        (broken / name).symlink_to(broken / "nowhere")
    else:
        damages()[kind](broken / name)
    reader = numbered(tmp_path, 7)
    before = reader._session.models[0].weight.clone()
    with pytest.raises(CheckpointError, match=name):
        reader.load_state(broken)
    assert torch.equal(reader._session.models[0].weight, before)
    assert reader._session.step == 7
    with pytest.warns(UserWarning, match=f"Skipping {broken}.*{name}"):
        assert reader.load_state() == broken.with_name("checkpoint_0")
    assert reader._session.step == 1
    assert reader.save_state().name == "checkpoint_2"


def test_foreign_entries_in_the_folder_are_skipped_with_a_reason(tmp_path):
    whole = two_checkpoints(tmp_path)
    folder = whole.parent
    (folder / "checkpoint_7").mkdir()
    (folder / "checkpoint_8").write_text("not a directory")
    (folder / "checkpoint_9").mkdir()
    (folder / "checkpoint_9" / "model.safetensors").write_bytes(b"")
    (folder / "checkpoint_09").mkdir()
    (folder / "checkpoint_best").mkdir()
    (folder / ".checkpoint_3.saving-elsewhere-0123456789ab").mkdir()
    (folder / "notes.txt").write_text("mine")
    before = sorted(p.name for p in folder.iterdir())
    reader = numbered(tmp_path, 0, total_limit=1)
    with pytest.warns(UserWarning) as caught:
        assert reader.load_state() == whole
    texts = [str(w.message) for w in caught]
    assert len(texts) == 3
    assert any("checkpoint_9" in t and "has no manifest.json" in t for t in texts)
    assert any("checkpoint_8" in t and "not a directory" in t for t in texts)
    assert reader.save_state().name == "checkpoint_10"
    gone = {"checkpoint_0", "checkpoint_1"}
    assert sorted(p.name for p in folder.iterdir()) == sorted({*before, "checkpoint_10"} - gone)


def rewrite(path, change):
    """Change a manifest, and make its checksum fit, as an attacker would."""
    body = json.loads((path / "manifest.json").read_bytes())
    body.pop("manifest_checksum")
    change(body)
    text = json.dumps(body, indent=1)
    body["manifest_checksum"] = f"crc32:{zlib.crc32(text.encode()):08x}"
    (path / "manifest.json").write_text(json.dumps(body, indent=1))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", "C:\\x", "..\\x", "", "sub/secret"])
def test_a_manifest_cannot_reach_outside(tmp_path, name):
    (tmp_path / "secret").write_text("secret")
    path = tmp_path / "c"
    CheckpointManager(session()).save_state(path)
    (path / "sub").symlink_to(tmp_path)
    rewrite(
        path, lambda body: body["files"].update({name: {"size": 6, "checksum": "crc32:00000000", "content": "other"}})
    )
    with pytest.raises(CheckpointError, match=r"outside of the checkpoint|no regular file"):
        CheckpointManager(session()).load_state(path)


def test_a_newer_format_is_refused_with_advice(tmp_path):
    path = tmp_path / "c"
    CheckpointManager(session()).save_state(path)
    rewrite(path, lambda body: body.update(version=99))
    with pytest.raises(CheckpointError, match="format version 99, this drivetrain reads up to 1: install a newer one"):
        CheckpointManager(session()).load_state(path)


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (str(self.marker),))


def test_a_planted_pickle_never_runs(tmp_path):
    marker = tmp_path / "marker"
    payload = pickle.dumps(Payload(marker))
    path = tmp_path / "c"
    CheckpointManager(session(1)).save_state(path)
    for name in ("random_states_0.pkl", "custom_checkpoint_0.pkl", "optimizer.bin", ".metadata", "pytorch_model.bin"):
        (path / name).write_bytes(payload)
    reader = session(5)
    CheckpointManager(reader).load_state(path)  # nobody reads what the manifest doesn't know
    assert reader.step == 1
    assert set(verify(path).foreign) == {
        "random_states_0.pkl", "custom_checkpoint_0.pkl", "optimizer.bin", ".metadata", "pytorch_model.bin",
    }  # fmt: skip

    def claim(name):
        def change(body):
            body["files"][name].update(size=len(payload), checksum=f"crc32:{zlib.crc32(payload):08x}")

        return change

    for name in ("state.json", "rank_00000.json", "model.safetensors"):
        CheckpointManager(session(1)).save_state(path)
        (path / name).write_bytes(payload)
        rewrite(path, claim(name))
        with pytest.raises(CheckpointError, match=name):
            CheckpointManager(session()).load_state(path)
    assert not marker.exists()
    pickle.loads(payload)  # it would have worked
    assert marker.exists()


@pytest.mark.parametrize("explicit", [True, False])
def test_two_runs_that_write_to_one_folder_lose_nothing(tmp_path, explicit):
    def run(which):
        def child():
            manager = numbered(tmp_path, which, total_limit=2)
            for i in range(6):
                manager._session.epoch = i
                manager.save_state(tmp_path / "c" if explicit else None)

        return child

    pids = []
    for which in (1, 2):
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = run(which)() or 0
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(p, 0)[1]) for p in pids] == [0, 0]
    if explicit:
        assert [p.name for p in tmp_path.iterdir()] == ["c"]
        assert verify(tmp_path / "c").ok
        assert Manifest.read(tmp_path / "c").counters["epoch"] == 5
        return
    found = {}
    for path in (tmp_path / "checkpoints").iterdir():
        assert verify(path).ok
        counters = Manifest.read(path).counters
        found.setdefault(counters["step"], set()).add(counters["epoch"])
    assert found == {1: {4, 5}, 2: {4, 5}}


def test_a_replacement_that_was_cut_short_is_undone_on_load(tmp_path):
    path = tmp_path / "c"
    CheckpointManager(session(1)).save_state(path)
    path.rename(tmp_path / ".c.replaced-0123456789ab")
    recover(tmp_path / "other")
    reader = session()
    with pytest.warns(UserWarning, match="the earlier one is put back"):
        CheckpointManager(reader).load_state(path)
    assert reader.step == 1


ENDS_AT_ONCE = """
import sys, torch
from drivetrain import Accelerator
accelerator = Accelerator(cpu=True)
accelerator.prepare(torch.nn.Linear(3_000_000, 1))
if sys.argv[2:]:
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: __import__("os").symlink("/", folder + "/link"))
accelerator.save_state(sys.argv[1], blocking=False)
"""


def test_the_end_of_the_program_waits_for_a_save_in_the_background(tmp_path):
    command = [sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path / "c")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert verify(tmp_path / "c").ok
    assert "failed at" not in ended.stderr
    ended = subprocess.run([*command, "fails"], capture_output=True, text=True, check=True, timeout=120)
    assert "drivetrain-checkpoint failed at the program's end: a hook wrote link" in ended.stderr
    assert verify(tmp_path / "c").ok


def test_what_appears_late_is_waited_for(tmp_path):
    timer = threading.Timer(0.3, (tmp_path / "late").mkdir)
    timer.start()
    wait_until_visible(tmp_path / "late", 30, rank=1)
    assert (tmp_path / "late").is_dir()
    timer.join()
    with pytest.raises(CheckpointError, match=r"rank 1 doesn't see .*never.* isn't shared"):
        wait_until_visible(tmp_path / "never", 0.05, rank=1)


def test_a_folder_of_checkpoints_given_as_one_is_explained(tmp_path):
    newest = two_checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match=f"holds some: load {newest}"):
        CheckpointManager(session()).load_state(newest.parent)
    with pytest.raises(CheckpointError, match="doesn't exist"):
        CheckpointManager(session()).load_state(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="there is no whole checkpoint in"):
        numbered(tmp_path / "empty", 0).load_state()
