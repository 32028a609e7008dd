"""Where ranks parted, from what is known of each, and the likely cause from the source."""

from __future__ import annotations

import json
import re

import pytest

from drivetrain import _marks
from drivetrain.launch._desync import parting, parting_text
from drivetrain.launch._evidence import Entry, Evidence, collect, prepare, with_end
from drivetrain.launch._failures import RankFailure
from drivetrain.launch._source import around

SCRIPT = """\
for x in loader:
    loss = model(x)
    accelerator.backward(loss)
    if accelerator.is_main_process:
        accelerator.gather(loss)
    if loss > 3:
        accelerator.reduce(loss)
    if rank == 1:
        continue
    dist.all_reduce(loss)
accelerator.wait_for_everyone()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def op(number, line, name, *, time, operation="all_reduce", step=4, file="train.py", **more):
    return Entry(
        group="0",
        number=number,
        operation=operation,
        time=time,
        name=name,
        places=((file, line, "main"),),
        step=step,
        **more,
    )


def history(script, *more):
    """Two backwards that all ranks did, and what came then."""
    common = [op(n, 3, "backward", time=n, step=n, file=script) for n in (1, 2)]
    return (*common, *more)


def text_of(*evidence, world_size=None):
    return parting_text(evidence, world_size=world_size or len(evidence))


def test_ranks_at_the_same_place_have_not_parted(script):
    same = history(script, op(3, 3, "backward", time=3, file=script, waiting=True))
    assert text_of(Evidence(rank=0, recorded=same), Evidence(rank=1, recorded=same)) == ""


def test_a_gather_on_the_main_process_alone(script):
    gather = op(3, 5, "gather", time=30, operation="_all_gather_base", file=script, waiting=True)
    backward = op(3, 3, "backward", time=40, file=script, waiting=True)
    text = text_of(
        Evidence(rank=0, recorded=history(script, gather)),
        Evidence(rank=1, recorded=history(script, backward)),
        Evidence(rank=2, recorded=history(script, backward)),
    )
    assert text.splitlines() == [
        "drivetrain: the ranks parted at step 4:",
        "  rank 0 waits at train.py:5 gather",
        "  ranks 1, 2 wait at train.py:3 backward",
        "  the last that they did together: train.py:3 backward, at step 2",
        "  likely cause: train.py:5 stands under `if accelerator.is_main_process:` (line 4), which depends on the rank.",
    ]


def test_a_loop_that_one_rank_has_left(script):
    text = text_of(
        Evidence(rank=0, recorded=history(script, op(3, 3, "backward", time=30, file=script))),
        Evidence(
            rank=1, recorded=history(script, op(3, 11, "wait_for_everyone", time=20, operation="barrier", file=script))
        ),
    )
    assert "likely cause: rank 1 has left the loop `for x in loader` (line 1), and rank 0 hasn't" in text


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (7, "train.py:7 stands under `if loss > 3:` (line 6), which isn't the same on all ranks."),
        (10, "train.py:10 stands after the exit in `if rank == 1:` (line 8), which depends on the rank."),
    ],
)
def test_a_branch_that_one_rank_takes(script, line, cause):
    text = text_of(
        Evidence(rank=0, recorded=history(script, op(3, line, "reduce", time=20, operation="x", file=script))),
        Evidence(rank=1, recorded=history(script, op(3, 3, "backward", time=30, file=script))),
    )
    assert f"likely cause: {cause}" in text


def test_tensors_that_differ(script):
    sizes = [op(3, 10, "all_reduce", time=20, file=script, size=size) for size in ("[3] float", "[4] float")]
    text = text_of(*(Evidence(rank=r, recorded=history(script, e)) for r, e in enumerate(sizes)))
    assert "  rank 0 waits at train.py:10 all_reduce (all_reduce of [3] float)\n" in text
    assert "likely cause: the tensors differ in shape or dtype between ranks" in text


def test_gradients_that_differ(script):
    sizes = [op(3, 3, "backward", time=20, file=script, size=size) for size in ("[3] float", "[4] float")]
    text = text_of(*(Evidence(rank=r, recorded=history(script, e)) for r, e in enumerate(sizes)))
    assert "a parameter or a layer is used, or frozen, on some ranks only" in text


def test_a_step_without_a_collective_shows_where_the_steps_differ(script):
    """Gradients of one step are averaged with those of the next, until the loop ends on one rank."""
    late = [op(n, 3, "backward", time=10 * n, step=n, file=script) for n in (1, 2, 3, 4)]
    early = [op(n, 3, "backward", time=10 * n, step=n + (n > 2), file=script) for n in (1, 2, 3)]
    early.append(op(4, 11, "wait_for_everyone", time=40, step=5, operation="barrier", file=script))
    text = text_of(Evidence(rank=0, recorded=tuple(late)), Evidence(rank=1, recorded=tuple(early)))
    assert text.splitlines() == [
        "drivetrain: the ranks parted at step 3:",
        "  rank 0 did train.py:3 backward, at step 3, and stands at train.py:3 backward",
        "  rank 1 did train.py:3 backward, at step 4, and stands at train.py:11 wait_for_everyone",
        "  the last that they did together: train.py:3 backward, at step 2",
        "  likely cause: rank 1 left out a collective that the others did at step 3, and was ahead of them from then on.",
    ]


def test_a_condition_under_which_both_have_been_is_not_about_the_rank(script):
    gather = op(2, 5, "gather", time=20, operation="x", file=script)
    first = op(1, 5, "gather", time=10, operation="x", file=script)
    end = op(2, 11, "wait_for_everyone", time=20, operation="barrier", file=script)
    text = text_of(Evidence(rank=0, recorded=(first, gather)), Evidence(rank=1, recorded=(first, end)))
    assert "likely cause: rank 1 has left the loop" in text


def test_a_rank_that_raised_while_others_wait(script):
    waiting = Evidence(rank=0, recorded=history(script, op(3, 3, "backward", time=30, file=script, waiting=True)))
    failure = RankFailure(rank=1, returncode=1, time=0.0, message="ValueError: no data", where=f"{script}:2 (main)")
    raised = with_end(Evidence(rank=1, recorded=history(script)), failure, where="")
    text = text_of(waiting, raised)
    assert (
        "  rank 1 raised ValueError: no data at train.py:2 (main); its last collective was train.py:3 backward, at step 2\n"
        in text
    )
    assert "likely cause: rank 1 failed by itself, and the others waited for it." in text


@pytest.mark.parametrize(
    "message",
    [
        "DistributedOperationError: backward failed on rank 1",
        "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer",
        "DistBackendError: NCCL error in: ...",
    ],
)
def test_an_error_of_communication_is_a_consequence(message):
    found = with_end(Evidence(rank=1), RankFailure(rank=1, returncode=1, time=0.0, message=message), where="")
    assert found.consequence and not found.failed


def test_a_rank_that_is_busy_elsewhere(script):
    waiting = Evidence(rank=0, recorded=history(script, op(3, 3, "backward", time=30, file=script, waiting=True)))
    text = text_of(waiting, Evidence(rank=1, recorded=history(script), where=f"{script}:2 (main)"))
    assert "  rank 1 is at train.py:2 (main); its last collective was train.py:3 backward, at step 2" in text
    assert "likely cause: rank 1 was still busy at train.py:2 (main), longer than the others could wait." in text


def noted(*pairs, step=4):
    return tuple(
        Entry(group="", number=n, operation=what, time=n, name=what, places=(("t.py", n, "f"),), step=step)
        for n, what in pairs
    )


def test_a_killed_rank_is_compared_by_its_notes():
    alive = Evidence(
        rank=0,
        noted=noted((1, "backward"), (2, "gather"), (3, "backward")),
        recorded=(op(9, 3, "backward", time=4, file="t.py"),),
    )
    killed = with_end(
        Evidence(rank=1, noted=noted((1, "backward"), (2, "gather"))),
        RankFailure(rank=1, returncode=-9, time=0.0),
        where="",
    )
    text = text_of(alive, killed)
    assert "  rank 0 waits at t.py:3 backward\n" in text
    assert "  rank 1 was killed by signal 9 (SIGKILL); its last collective was t.py:2 gather, at step 4\n" in text


def test_a_rank_of_which_nothing_is_known_but_its_end():
    waiting = Evidence(rank=0, recorded=(op(9, 3, "all_reduce", time=4, file="t.py", step=None, waiting=True),))
    gone = Evidence(rank=1, ended="has ended")
    text = text_of(waiting, gone)
    assert text.splitlines()[:3] == [
        "drivetrain: the ranks parted at collective 9:",
        "  rank 0 waits at t.py:3 all_reduce",
        "  rank 1 has ended; it has done no collective",
    ]
    assert "rank 1 had no more to do" in text


def test_native_code_that_ended_a_rank():
    waiting = Evidence(rank=0, recorded=(op(9, 3, "all_reduce", time=4, file="t.py", size="[3] float", waiting=True),))
    aborted = with_end(Evidence(rank=1), RankFailure(rank=1, returncode=-6, time=0.0), where="")
    assert "shapes and dtypes are equal on all ranks in all_reduce (of [3] float on rank 0)" in text_of(
        waiting, aborted
    )


def test_native_code_that_ended_a_rank_for_the_sake_of_another_collective(script):
    gather = op(3, 5, "gather", time=30, operation="_all_gather_base", file=script, waiting=True)
    aborted = with_end(Evidence(rank=1), RankFailure(rank=1, returncode=-6, time=0.0), where="")
    text = text_of(Evidence(rank=0, recorded=history(script, gather)), aborted)
    assert "train.py:5 stands under `if accelerator.is_main_process:` (line 4), which depends on the rank." in text


def test_groups_are_compared_among_their_own_ranks():
    groups = {"0": (0, 1, 2), "half": (0, 1)}
    half = Entry(group="half", number=1, operation="all_reduce", time=5, name="all_reduce", places=())
    both = [Evidence(rank=r, recorded=(op(1, 3, "backward", time=1), half), groups=groups) for r in (0, 1)]
    other = Evidence(rank=2, recorded=(op(1, 3, "backward", time=1),), groups={"0": (0, 1, 2)})
    assert parting([*both, other]) is None


def test_of_several_differences_the_earliest_counts():
    first = Entry(
        group="side", number=1, operation="all_gather", time=10, name="next batch", places=(), description="side"
    )
    late = op(2, 3, "backward", time=20)
    groups = {"0": (0, 1), "side": (0, 1)}
    ahead = Evidence(rank=0, recorded=(op(1, 3, "backward", time=1), first, late), groups=groups)
    behind = Evidence(rank=1, recorded=(op(1, 3, "backward", time=1),), groups=groups)
    found = parting([ahead, behind])
    assert found is not None and found.first is first


def test_the_rings_first_entries_may_be_gone_on_one_rank():
    long = tuple(op(n, 3, "backward", time=n) for n in range(1, 50))
    assert parting([Evidence(rank=0, recorded=long), Evidence(rank=1, recorded=long[30:])]) is None


def test_ranks_elsewhere_are_mentioned(script):
    ahead = history(script, op(3, 3, "backward", time=3, file=script))
    text = text_of(Evidence(rank=0, recorded=ahead), Evidence(rank=1, recorded=history(script)), world_size=4)
    assert "  seen here: 2 of 4 ranks; the launchers on other machines report theirs" in text


def test_what_ranks_left_is_read_back(tmp_path):
    error_file = tmp_path / "start-0-rank-1.json"
    prepare(error_file)
    with _marks.marks_file(error_file).open("r+b") as file:
        memory = bytearray(_marks.SIZE)
        notes = _marks.Marks(memory)
        notes.mark("backward", 1)
        notes.stepped(3)
        file.write(memory)
    later = notes.when + 1
    recorded = {
        "group": "0",
        "number": 7,
        "operation": "all_reduce",
        "time": later,
        "name": "",
        "places": [],
        "sizes": [[2, 3]],
    }
    recorded |= {"dtypes": ["Float"], "waiting": True, "description": "default_pg", "p2p": False}
    (tmp_path / "start-0-rank-1.json.flight").write_text(
        json.dumps({"groups": {"0": [0, 1]}, "entries": [recorded], "step": [notes.step, notes.when]})
    )
    evidence = collect({1: error_file}, [1], seconds=0.1)[1]
    (entry,) = evidence.recorded
    assert (entry.step, entry.size, entry.waiting) == (3, "[2, 3] float", True)
    assert (entry.name, entry.places[0][0]) == (
        "backward",
        __file__,
    )  # native code has no Python frames: the note before has
    assert evidence.step == 3 and evidence.noted[0].micro_batch == 1 and evidence.groups == {"0": (0, 1)}


@pytest.mark.parametrize(
    ("source", "line", "expected"),
    [
        ("if a:\n    f()\nelse:\n    g()\n", 4, ["else"]),
        ("x = f() if is_main else g()\n", 1, ["if"]),
        ("def f():\n    if a:\n        return\n    g()\nif b:\n    f()\n", 4, ["exit"]),
        ("while a:\n    try:\n        f()\n    except E:\n        g()\n", 5, ["loop", "except"]),
        ("async def f():\n    async for x in y:\n        g()\n", 3, ["loop"]),
        ("not python (\n", 1, []),
    ],
)
def test_what_stands_around_a_line(tmp_path, source, line, expected):
    path = tmp_path / "a.py"
    path.write_text(source)
    assert [part.kind for part in around(str(path), line)] == expected


def test_a_long_condition_is_cut(tmp_path):
    path = tmp_path / "a.py"
    path.write_text(f"if {' and '.join(['condition'] * 30)}:\n    f()\n")
    assert re.search(r"\.\.\.:` \(line 1\)$", str(around(str(path), 2)[0]))
