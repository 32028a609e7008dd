"""notebook_launcher and debug_launcher: values, closures, failures, interrupts, and nothing left running."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from drivetrain.errors import ConfigurationError, LaunchError
from drivetrain.launch import debug_launcher, notebook_launcher
from drivetrain.testing.launching import marked_processes


def test_one_rank_runs_here_and_sees_the_precision_only_meanwhile():
    value = notebook_launcher(
        lambda x: (x, os.getpid(), os.environ["DRIVETRAIN_MIXED_PRECISION"]),
        (3,),
        num_processes=1,
        mixed_precision="bf16",
    )
    assert value == (3, os.getpid(), "bf16")
    assert "DRIVETRAIN_MIXED_PRECISION" not in os.environ


def test_ranks_run_closures_and_the_first_ranks_value_comes_back(capsys):
    offset = 10

    def work(x):
        import os

        rank = int(os.environ["RANK"])
        print("hello from", rank)
        return {"rank": rank, "value": x + offset, "precision": os.environ["DRIVETRAIN_MIXED_PRECISION"]}

    for _ in range(2):  # twice in a row
        value = notebook_launcher(work, (1,), num_processes=2, mixed_precision="fp16")
        assert value == {"rank": 0, "value": 11, "precision": "fp16"}
        out = capsys.readouterr().out
        assert sorted(out.splitlines()) == ["[rank 0] hello from 0", "[rank 1] hello from 1"]


def test_a_failing_ranks_traceback_is_raised_here():
    def fail():
        import os
        import time

        if os.environ["RANK"] == "1":
            raise ValueError("planted")
        time.sleep(60)

    begin = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        debug_launcher(fail, num_processes=2)
    assert time.monotonic() - begin < 10
    text = str(caught.value)
    assert "rank 1 of 2 failed with exit code 1" in text
    assert 'raise ValueError("planted")' in text
    assert "_function_rank.py" not in text and "_worker.py" not in text
    assert caught.value.exit_code == 1


def test_ranks_form_a_process_group():
    def total(x):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        value = torch.tensor([x + dist.get_rank()])
        dist.all_reduce(value)
        dist.destroy_process_group()
        return value

    assert debug_launcher(total, (5,), num_processes=2).tolist() == [11]


def test_debug_launcher_forces_the_cpu():
    assert debug_launcher(lambda: os.environ["DRIVETRAIN_CPU"], num_processes=2) == "true"


def test_what_can_not_travel_is_said_before_anything_starts():
    lock = threading.Lock()
    with pytest.raises(LaunchError, match=r"can't be sent to other processes.*inside of the function"):
        notebook_launcher(lambda: lock, num_processes=2)


def test_a_value_that_can_not_travel_back():
    def value():
        import threading

        return threading.Lock()

    with pytest.raises(LaunchError, match=r"the function returned a lock, which can't be sent back"):
        notebook_launcher(value, num_processes=2)


@pytest.mark.parametrize("ranks", [0, -1])
def test_a_number_of_ranks_that_makes_no_sense(ranks):
    with pytest.raises(ConfigurationError, match="at least 1"):
        notebook_launcher(print, num_processes=ranks)


def test_an_interrupt_ends_the_ranks_and_reaches_the_cell(monkeypatch):
    monkeypatch.setenv("MARK", "notebook-interrupt")

    def wait():
        import time

        time.sleep(60)

    def interrupt():
        while len(marked_processes("notebook-interrupt")) < 2:
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        notebook_launcher(wait, num_processes=2)
    thread.join()
    assert time.monotonic() - begin < 15
    assert marked_processes("notebook-interrupt", within=5) == []


def test_a_function_of_an_imported_module_is_found(tmp_path, monkeypatch):
    (tmp_path / "a_module_of_mine.py").write_text("import os\ndef rank(): return int(os.environ['RANK'])\n")
    monkeypatch.syspath_prepend(tmp_path)
    import a_module_of_mine

    assert notebook_launcher(a_module_of_mine.rank, num_processes=2) == 0
