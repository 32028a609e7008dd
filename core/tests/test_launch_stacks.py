"""Where ranks are: on SIGUSR2, after a long silence, and when another one has failed."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from drivetrain.launch import _stacks
from drivetrain.specs import LauncherSpec
from drivetrain.testing.launching import LaunchRunner

pytestmark = pytest.mark.skipif(_stacks.SIGNAL is None, reason="this system has no SIGUSR2")


@pytest.fixture
def run(tmp_path, capfd):
    return LaunchRunner(tmp_path, capfd, LauncherSpec(name="local", target="drivetrain.launch.local:LocalLauncher"))


#: Ranks wait in functions of their own: rank 1 in Python, rank 0 in native code that holds no lock and never returns by itself.
WAIT = """
import os, pathlib, time

def gather():
    while not stop.exists():
        time.sleep(0.05)

def backward():
    import select
    while not stop.exists():
        select.select([], [], [], 0.05)

here = pathlib.Path(__file__).parent
stop = here / "stop"
(here / f"ready-{os.environ['RANK']}").touch()
(backward if os.environ["RANK"] == "0" else gather)()
"""


def when_ready(folder, ranks, then):
    """Do something once all ranks have started, on a thread."""

    def wait():
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not all((folder / f"ready-{r}").exists() for r in range(ranks)):
            time.sleep(0.02)
        then()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_signal_shows_where_all_ranks_are_and_changes_nothing(run, tmp_path):
    def ask():
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(1.0)
        (tmp_path / "stop").touch()

    thread = when_ready(tmp_path, 2, ask)
    result = run(WAIT, 2)
    thread.join()
    assert result.code == 0
    assert "drivetrain: where the ranks are (SIGUSR2)" in result.err
    assert re.search(r"^rank 0:$.*?script\.py\", line \d+ in backward$", result.err, re.DOTALL | re.MULTILINE)
    assert re.search(r"^rank 1:$.*?script\.py\", line \d+ in gather$", result.err, re.DOTALL | re.MULTILINE)


def test_a_long_silence_shows_them_once(run, tmp_path):
    def wait():
        time.sleep(1.5)
        (tmp_path / "stop").touch()

    thread = when_ready(tmp_path, 2, wait)
    result = run(WAIT, 2, options={"hang_timeout": 0.5})
    thread.join()
    assert result.code == 0
    assert result.err.count("where the ranks are (no output for 0.5 s)") == 1
    assert "in gather" in result.err and "in backward" in result.err


#: Rank 0 gathers and waits, or goes on gathering; rank 1 never does.
GATHER = """
import os, pathlib, sys, time
from drivetrain._marks import marks

here = pathlib.Path(__file__).parent

def gather():
    marks().mark("gather")

if os.environ["RANK"] == "0":
    gather()
(here / f"ready-{os.environ['RANK']}").touch()
while not (here / "stop").exists():
    time.sleep(0.05)
    if os.environ["RANK"] == "0" and sys.argv[1] == "on":
        gather()
"""


@pytest.mark.parametrize("goes", ["on", "nowhere"])
def test_ranks_that_have_parted_and_stand_still_are_told_of(run, tmp_path, goes):
    def ask():
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(2.5)
        (tmp_path / "stop").touch()

    thread = when_ready(tmp_path, 2, ask)
    result = run(GATHER, 2, (goes,))
    thread.join()
    assert result.code == 0
    if goes == "on":
        assert "the ranks parted" not in result.err
    else:
        assert "drivetrain: the ranks parted at step 0:" in result.err
        assert re.search(r"^  rank 0 waits at \S+script\.py:8 gather$", result.err, re.MULTILINE)
        assert re.search(
            r"^  rank 1 is at \S+script\.py:14 \(<module>\); it has done no collective$", result.err, re.MULTILINE
        )


def test_a_failure_says_where_the_others_were(run):
    script = (
        "import os, time\n"
        "def gather():\n"
        "    time.sleep(60)\n"
        "if os.environ['RANK'] == '1':\n"
        "    time.sleep(0.5)\n"
        "    os._exit(7)\n"
        "gather()\n"
    )
    result = run(script, 2)
    assert result.code == 7
    assert re.search(r"^  rank 0 was at \S+script\.py:3 \(gather\)$", result.err, re.MULTILINE)


def test_a_plain_program_is_left_alone(run, tmp_path):
    def ask():
        time.sleep(0.2)  # the program may run before its launcher knows that it has started it
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.3)
        (tmp_path / "stop").touch()

    thread = when_ready(tmp_path, 1, ask)
    loop = f"touch {tmp_path}/ready-0; while [ ! -e {tmp_path}/stop ]; do sleep 0.02; done; exit 5"
    result = run.command(["sh", "-c", loop], plain=True)
    thread.join()
    assert result.code == 5
    assert "rank 0: no stack, it isn't a Python script" in result.err


def test_a_script_keeps_its_own_handler(run, tmp_path):
    script = (
        "import os, pathlib, signal, time\n"
        "here = pathlib.Path(__file__).parent\n"
        "signal.signal(signal.SIGUSR2, lambda *_: (here / 'stop').touch())\n"
        "(here / 'ready-0').touch()\n"
        "while not (here / 'stop').exists():\n"
        "    time.sleep(0.02)\n"
    )
    thread = when_ready(tmp_path, 1, lambda: os.kill(os.getpid(), signal.SIGUSR2))
    result = run(script)
    thread.join()
    assert result.code == 0


def test_the_users_line_is_preferred_over_a_librarys():
    library = os.path.dirname(os.__file__)  # noqa: PTH120
    text = (
        "Thread 0x1 (most recent call first):\n"
        '  File "/home/me/other.py", line 1 in helper\n\n'
        "Current thread 0x2 (most recent call first):\n"
        f'  File "{library}/threading.py", line 3 in wait\n'
        '  File "/home/me/train.py", line 9 in step\n'
        '  File "/home/me/train.py", line 20 in main\n'
    )
    assert _stacks.where_in(text) == "/home/me/train.py:9 (step)"
    assert _stacks.where_in("") == ""


@pytest.mark.parametrize("starter", ["_worker.py", "_function_rank.py"])
def test_what_starts_a_rank_is_no_place(starter):
    file = Path(_stacks.__file__).with_name(starter)
    text = f'Current thread 0x1 (most recent call first):\n  File "{file}", line 9 in <module>\n'
    assert _stacks.where_in(text) == ""
