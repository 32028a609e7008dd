"""The notes that a rank keeps where its launcher can read them."""

from __future__ import annotations

import importlib
import mmap
import os
import subprocess
import sys
import time

import pytest

from drivetrain import _marks, _places
from drivetrain._marks import SIZE, SLOTS, Marks, read
from drivetrain.launch import _flight


def kinds(memory):
    return [(mark.what, mark.number, mark.step) for mark in read(bytes(memory)).marks]


def test_a_note_has_time_step_place_and_micro_batch():
    memory = bytearray(SIZE)
    notes = Marks(memory)
    before = time.time_ns()
    notes.mark("backward", 2)
    notes.stepped(7)
    notes.mark("gather")
    here = sys._getframe().f_lineno - 1
    log = read(bytes(memory))
    backward, gather = log.marks
    assert before <= backward.time <= gather.stepped <= gather.time <= time.time_ns()
    assert (backward.file, backward.line, backward.function) == (
        __file__,
        here - 2,
        "test_a_note_has_time_step_place_and_micro_batch",
    )
    assert (backward.micro_batch, gather.micro_batch, gather.line) == (2, None, here)
    assert (backward.step, gather.step, log.step) == (0, 7, 7)
    assert (log.step_at(before - 1), log.step_at(backward.time), log.step_at(gather.stepped)) == (None, 0, 7)


def test_the_ring_keeps_the_latest_and_their_numbers():
    memory = bytearray(SIZE)
    notes = Marks(memory)
    for i in range(3 * SLOTS + 5):
        notes.mark("gather" if i % 2 else "reduce")
    found = kinds(memory)
    assert [number for _, number, _ in found] == list(range(2 * SLOTS + 5, 3 * SLOTS + 5))
    assert all(what == ("gather" if number % 2 else "reduce") for what, number, _ in found)


def test_places_without_room_are_left_out_and_nothing_else():
    memory = bytearray(SIZE)
    notes = Marks(memory)
    code = "\n" * 3 + "def f(notes):\n    notes.mark('gather')\n"
    for i in range(100):  # each file's name is long
        space = {}
        exec(compile(code, f"/{'long' * 500}/{i}.py", "exec"), space)
        space["f"](notes)
    marks = read(bytes(memory)).marks
    assert [mark.number for mark in marks] == list(range(100))
    assert marks[0].line == 5 and marks[0].file.endswith("/0.py")
    assert marks[-1].file == ""


def test_lines_of_libraries_are_passed_over():
    memory = bytearray(SIZE)
    notes = Marks(memory)
    space = {}
    exec(compile("def f(g):\n    g()\ndef h(g):\n    f(g)\n", os.__file__, "exec"), space)
    for repeat in range(3):  # the depth is remembered from the first time
        space["h" if repeat else "f"](lambda: space["f"](lambda: notes.mark("gather")))
        assert read(bytes(memory)).marks[-1].line == sys._getframe().f_lineno - 1


def test_lines_that_call_for_the_same_are_told_apart():
    memory = bytearray(SIZE)
    notes = Marks(memory)
    first = sys._getframe().f_lineno + 2
    for _ in range(2):
        notes.mark("gather")
        notes.mark("gather")
        (lambda: notes.mark("gather"))()
    assert [mark.line - first for mark in read(bytes(memory)).marks] == [0, 1, 2] * 2


def test_a_dead_process_leaves_its_notes(tmp_path):
    file = _marks.marks_file(tmp_path / "rank.json")
    _marks.create(file)
    assert read(file.read_bytes()) == _marks.MarkLog(())
    script = "import os; from drivetrain._marks import marks; marks().mark('gather'); os.kill(os.getpid(), 9)"
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(tmp_path / "rank.json")}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == -9
    assert [mark.what for mark in read(file.read_bytes()).marks] == ["gather"]


def test_nothing_is_noted_without_a_launcher_that_reads(tmp_path, monkeypatch):
    for path in (None, str(tmp_path / "torchruns.json")):
        if path is None:
            monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
        else:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
        assert _marks.marks.__wrapped__() is None
    assert list(tmp_path.iterdir()) == []


def test_the_file_is_memory_of_the_size_that_is_read(tmp_path):
    file = tmp_path / "marks"
    _marks.create(file)
    with file.open("r+b") as opened:
        memory = mmap.mmap(opened.fileno(), SIZE)
    Marks(memory).mark("gather")
    assert kinds(file.read_bytes()) == [("gather", 0, 0)]


@pytest.mark.parametrize(
    ("file", "users"),
    [
        ("/home/me/train.py", True),
        ("/tmp/ipykernel_12/1.py", True),
        ("<string>", True),
        ("<frozen runpy>", False),
        ("/opt/other/lib/python3.11/site-packages/torch/__init__.py", False),
        ("/home/me/drivetrain/plugins/x/src/drivetrain_x/backend.py", False),
        (importlib.__file__, False),
        (_marks.__file__, False),
    ],
)
def test_the_users_code_is_told_from_the_rest(file, users):
    assert _places.is_users(file) is users


def entry(**changes):
    frames = [
        {"name": "all_reduce", "filename": os.__file__, "line": 1},
        {"name": "wrapper", "filename": os.__file__, "line": 2},
        {"name": "metrics", "filename": "/me/train.py", "line": 9},
        {"name": "main", "filename": "/me/train.py", "line": 20},
    ]
    return {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 4,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": "gloo:all_reduce",
        "frames": frames,
        "thread_id": "5",
        "thread_name": "python",
        "time_created_ns": 50,
        "input_sizes": [[2]],
        "input_dtypes": ["Float"],
        "retired": False,
        **changes,
    }


def test_the_recorders_entries_say_what_the_user_called_and_where():
    (found,) = _flight.flight_of({"entries": [entry()]}, {"0": [0, 1]}, 5)["entries"]
    assert (found["name"], found["operation"], found["number"], found["waiting"]) == (
        "all_reduce",
        "all_reduce",
        4,
        True,
    )
    assert found["places"] == [("/me/train.py", 9, "metrics"), ("/me/train.py", 20, "main")]


def test_collectives_of_background_threads_are_left_out_and_those_of_autograd_kept():
    entries = [
        entry(thread_id="6", thread_name="tracker"),
        entry(thread_id="7", thread_name="pt_autograd_0", frames=[]),
    ]
    (found,) = _flight.flight_of({"entries": entries}, {}, 5)["entries"]
    assert (found["places"], found["name"]) == ([], "")


def test_without_a_recorder_there_is_nothing_to_write():
    assert _flight.flight_of({}, {}, 5) == {"groups": {}, "entries": []}
