"""LocalLauncher: environment, labels, files, failures and what is left running."""

from __future__ import annotations

import json
import os
import sys

import pytest

from drivetrain.errors import ConfigurationError, LaunchError
from drivetrain.specs import LauncherSpec
from drivetrain.testing.launching import LaunchRunner, marked_processes


@pytest.fixture
def run(tmp_path, capfd):
    return LaunchRunner(tmp_path, capfd, LauncherSpec(name="local", target="drivetrain.launch.local:LocalLauncher"))


def test_each_rank_learns_who_it_is(run):
    result = run(
        "import os, json\n"
        "names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT'.split()\n"
        "print(json.dumps({n: os.environ[n] for n in names}))\n",
        2,
    )
    assert result.code == 0
    for rank in (0, 1):
        (line,) = result.lines(rank)
        seen = json.loads(line)
        assert int(seen.pop("MASTER_PORT")) > 0
        assert seen == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
        }


def test_one_process_has_the_same_variables_and_no_label(run):
    result = run("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], int(os.environ['MASTER_PORT']) > 0)")
    assert (result.code, result.out, result.err) == (0, "0 1 True\n", "")


def test_a_single_process_does_not_inherit_another_launchers_identity(run, monkeypatch):
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    result = run("import os; print(os.environ['RANK'], os.environ.get('TORCHELASTIC_USE_AGENT_STORE'))")
    assert result.out == "0 None\n"


def test_variables_asked_for_arrive_and_the_launchers_own_stay_as_they_were(run, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    script = "import os; print(os.environ['ASKED'], os.environ['OMP_NUM_THREADS'])"
    result = run(script, 2, environment={"ASKED": "for", "RANK": "9"})
    (line,) = result.lines(1)
    asked, threads = line.split()
    assert asked == "for"
    assert 1 <= int(threads) <= os.cpu_count()
    assert dict(os.environ) == before


@pytest.mark.parametrize("given", ["3", "7"])
def test_threads_that_are_set_stay_set(run, monkeypatch, given):
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    result = run("import os; print(os.environ['OMP_NUM_THREADS'])", 2)
    assert result.lines(0) == result.lines(1) == [given]


def test_arguments_pass_through_untouched(run):
    arguments = ("--num-processes", "9", "-m", "--", "a b", "--help")
    result = run("import sys; print(sys.argv[1:])", arguments=arguments)
    assert result.out == f"{list(arguments)}\n"


def test_both_streams_of_every_rank_are_labelled_line_by_line(run):
    script = (
        "import os, sys\n"
        "r = os.environ['RANK']\n"
        "for i in range(50):\n"
        "    print('out', r, i)\n"
        "    print('err', r, i, file=sys.stderr)\n"
    )
    result = run(script, 2)
    for rank in (0, 1):
        assert result.lines(rank) == [f"out {rank} {i}" for i in range(50)]
        assert result.err.count(f"[rank {rank}] err {rank} ") == 50
    assert all(line.startswith("[rank ") for line in (result.out + result.err).splitlines())


def test_labels_can_be_left_out(run):
    result = run("print('plain')", 2, label_output=False)
    assert result.out == "plain\nplain\n"


def test_output_goes_to_one_file_per_rank_and_rank_0_stays_visible(run, tmp_path):
    logs = tmp_path / "deep" / "logs"
    script = "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)"
    result = run(script, 2, log_directory=logs)
    assert (logs / "rank-0.log").read_text() == "out 0\nerr\n"
    assert (logs / "rank-1.log").read_text() == "out 1\nerr\n"
    assert (result.out, result.err) == ("out 0\n", "err\n")


def test_a_traceback_is_shown_once_whole_and_the_others_end_within_seconds(run):
    script = (
        "import os, time\n"
        "def inner():\n"
        "    raise ValueError('planted')\n"
        "if os.environ['RANK'] == '1':\n"
        "    inner()\n"
        "time.sleep(60)\n"
    )
    result = run(script, 3, environment={"MARK": "traceback-test"})
    assert result.code == 1
    assert result.seconds < 10
    assert (result.out + result.err).count("Traceback (most recent call last)") == 1
    assert result.err.count("ValueError: planted") == 1
    assert 'script.py", line 5, in <module>\n    inner()' in result.err
    assert "_worker.py" not in result.err
    assert "rank 1 of 3 failed with exit code 1" in result.err
    assert "Ranks 0, 2 were stopped." in result.err
    assert marked_processes("traceback-test", within=5) == []


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["sys.exit(7)", "os._exit(7)"])
def test_exit_codes_are_passed_on_while_another_rank_waits(run, how, ranks):
    script = f"import os, sys, time\nif int(os.environ['RANK']) == {ranks - 1}:\n    {how}\ntime.sleep(60)\n"
    result = run(script, ranks, environment={"MARK": "exit-test"})
    assert result.code == 7
    assert result.seconds < 5
    assert "exit code 7" in result.err
    assert marked_processes("exit-test", within=5) == []


def test_a_rank_that_hangs_and_ignores_sigterm_is_ended_within_seconds(run):
    # As one does that waits in native code under a signal handler of Python's.
    script = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['RANK'] == '1':\n"
        "    time.sleep(0.3)\n"
        "    os._exit(7)\n"
        "time.sleep(60)\n"
    )
    result = run(script, 2, environment={"MARK": "hang-test"})
    assert result.code == 7
    assert result.seconds < 10
    assert "rank 1 of 2 failed with exit code 7" in result.err
    assert marked_processes("hang-test", within=5) == []


def test_a_message_given_to_sys_exit_is_seen_once(run):
    result = run("import sys; sys.exit('no data here')", 2)
    assert result.code == 1
    assert result.err.count("[rank 0] no data here\n") <= 1
    assert "no data here\n" in result.err
    assert "Traceback" not in result.err


def test_a_rank_killed_by_a_signal_gives_128_and_its_number(run):
    script = "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(60)\n"
    result = run(script, 2)
    assert result.code == 137
    assert "rank 1 of 2 was killed by signal 9 (SIGKILL)" in result.err
    assert "out of memory" in result.err


def test_the_first_failure_is_blamed_and_not_the_one_that_follows_from_it(run):
    # Rank 0 fails a moment later, as ranks do whose peer is gone, and both are over before the launcher looks.
    script = (
        "import os, time\n"
        "from pathlib import Path\n"
        "ready = [Path(__file__).with_name(f'ready{rank}') for rank in '01']\n"
        "ready[int(os.environ['RANK'])].touch()\n"
        "while not all(file.exists() for file in ready):\n"  # one may start long after the other
        "    time.sleep(0.01)\n"
        "if os.environ['RANK'] == '0':\n"
        "    time.sleep(0.4)\n"
        "    raise RuntimeError('connection closed by peer')\n"
        "time.sleep(0.35)\n"
        "raise ValueError('the cause')\n"
    )
    result = run(script, 2)
    assert "rank 1 of 2 failed" in result.err
    assert result.err.count("Traceback") == 1
    assert "ValueError: the cause" in result.err


def test_a_process_left_behind_by_a_failing_rank_is_ended(run):
    script = (
        "import os, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "raise ValueError('planted')\n"
    )
    result = run(script, 1, environment={"MARK": "left-behind"})
    assert result.code == 1
    assert marked_processes("left-behind", within=5) == []


def test_a_rank_whose_exception_is_recorded_ends_although_a_thread_keeps_it(run, tmp_path):
    from pathlib import Path

    from drivetrain.launch import _worker

    impatient = tmp_path / "_worker.py"
    source = Path(_worker.__file__).read_text()
    assert "EXIT_SECONDS = 10.0\n" in source
    impatient.write_text(source.replace("EXIT_SECONDS = 10.0\n", "EXIT_SECONDS = 0.5\n"))
    script = tmp_path / "held.py"
    script.write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nraise ValueError('planted')\n"
    )
    result = run.command([sys.executable, str(impatient), str(os.getpid()), "script", str(script)], plain=True)
    assert result.code == 1
    assert result.seconds < 5
    assert "ValueError: planted" in result.err


def test_a_users_excepthook_is_honoured_and_the_traceback_not_repeated(run):
    script = (
        "import sys\nsys.excepthook = lambda *a: print('hooked', a[1], file=sys.stderr)\nraise ValueError('planted')\n"
    )
    result = run(script, 1)
    assert result.err.count("hooked planted") == 1
    assert "Traceback" not in result.err


def test_torchs_excepthook_is_not_a_users(run):
    # init_process_group puts one around Python's that labels each line; the launcher still shows the traceback, once.
    script = (
        "import sys\n"
        "def make(old_hook):\n"
        "    def hook(*args): old_hook(*args)\n"
        "    hook.__module__ = 'torch.distributed.distributed_c10d'\n"
        "    return hook\n"
        "{first}sys.excepthook = make(sys.excepthook)\n"
        "raise ValueError('planted')\n"
    )
    result = run(script.format(first=""), 1)
    assert result.err.count("Traceback") == 1
    result = run(script.format(first="sys.excepthook = lambda *a: print('hooked', file=sys.stderr)\n"), 1)
    assert result.err.count("hooked") == 1 and "Traceback" not in result.err


def test_a_rank_that_is_stopped_while_it_ends_counts_as_the_failure_that_it_was(run):
    # Both raise at once; the launcher's signal finds the first one still in its exit handlers.
    script = (
        "import atexit, os, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    atexit.register(time.sleep, 2)\n"
        "    raise ValueError('first')\n"
        "time.sleep(0.2)\n"
        "raise ValueError('second')\n"
    )
    result = run(script, 2)
    assert result.code == 1
    assert "ValueError: first" in result.err and "rank 1 of 2 failed with exit code 1" in result.err
    assert "rank 0 failed with exit code 1" in result.err and "ValueError: second" in result.err
    assert "signal" not in result.err


def test_a_failed_group_starts_again_and_can_succeed(run, tmp_path):
    script = (
        "import os\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print('attempt', attempt)\n"
        "if attempt < 2 and os.environ['RANK'] == '1':\n"
        "    raise ValueError(f'planted {attempt}')\n"
    )
    result = run(script, 2, max_restarts=2)
    assert result.code == 0
    assert result.lines(1) == ["attempt 0", "attempt 1", "attempt 2"]
    assert "planted 0" in result.err and "planted 1" in result.err
    assert "1 of 2 restarts" in result.err and "2 of 2 restarts" in result.err


def test_restarts_are_used_up(run):
    result = run("import os; os._exit(5)", 1, max_restarts=1)
    assert result.code == 5
    assert result.err.count("restarts)") == 1


def test_modules_packages_and_programs(run, tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    (package / "part.py").write_text("from . import __name__ as parent; print(__name__, parent, __spec__.name)")
    monkeypatch.chdir(tmp_path)
    assert run.command(["package", "x"], module=True).out == "__main__ package ['x']\n"
    assert run.command(["package.part"], module=True).out == "__main__ package package.part\n"
    assert run.command(["package", "y"]).out == "__main__  ['y']\n"
    program = [sys.executable, "-c", "import os; print(os.environ['LOCAL_RANK'])"]
    assert run.command(program, plain=True, num_processes=2).lines(1) == ["1"]


def test_a_script_sees_itself_as_main(run, tmp_path):
    (tmp_path / "neighbour.py").write_text("value = 3")
    script = (
        "import sys, pickle, neighbour, atexit\n"
        "class Thing: pass\n"
        "assert sys.modules['__main__'].Thing is Thing and __name__ == '__main__' and __spec__ is None\n"
        "assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)\n"
        "atexit.register(lambda: print('at exit', Thing.__name__, neighbour.value))\n"
        "print(sys.argv[0] == __file__, sys.path[0] == __file__.rsplit('/', 1)[0])\n"
    )
    result = run(script)
    assert (result.out, result.err) == ("True True\nat exit Thing 3\n", "")


def test_multiprocessing_spawn_finds_main_again(run):
    script = (
        "import multiprocessing as mp\n"
        "def square(x): return x * x\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(square, [3]))\n"
    )
    assert run(script).out == "[9]\n"


def test_a_syntax_error_looks_as_it_does_in_python(run):
    result = run("print('x'\n")
    assert result.code == 1
    assert "SyntaxError" in result.err and "_worker.py" not in result.err


MISTAKES = [
    ({"command": ["absent.py"]}, r"no script absent\.py"),
    ({"command": ["scrip.py"]}, r"Did you mean script\.py"),
    ({"command": ["absent"]}, r"use -m absent"),
    ({"command": ["."]}, r"without a __main__"),
    ({"command": ["no_such_module"], "module": True}, r"no module 'no_such_module'"),
    ({"command": ["json.no_such"], "module": True}, r"'json\.no_such' in the package json"),
    ({"command": ["script.py"], "module": True}, r"`-m script`"),
    ({"command": ["logging"], "module": True}, r"no __main__"),
    ({"command": ["no-such-program"], "plain": True}, r"no program 'no-such-program'"),
    ({"command": []}, r"nothing to run"),
    ({"command": ["script.py"], "num_processes": 0}, r"at least 1"),
    ({"command": ["script.py"], "num_processes": -2}, r"at least 1"),
    ({"command": ["script.py"], "num_machines": 0}, r"at least 1"),
    ({"command": ["script.py"], "num_processes": 3, "num_machines": 2}, r"spread evenly"),
    ({"command": ["script.py"], "num_processes": 2, "num_machines": 2}, r"where to meet"),
    ({"command": ["script.py"], "machine_rank": 1}, r"between 0 and 0"),
    ({"command": ["script.py"], "max_restarts": -1}, r"at least 0"),
    ({"command": ["script.py"], "main_process_port": 70000}, r"between 0 and 65535"),
]


@pytest.mark.parametrize(("request_", "message"), MISTAKES)
def test_what_can_not_work_is_said_before_anything_starts(run, tmp_path, monkeypatch, request_, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("print('started')")
    with pytest.raises(ConfigurationError, match=message):
        run.command(**request_, environment={"MARK": "mistake-test"})


def test_a_port_that_is_taken(run):
    import socket

    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"Port {port} .* already in use"):
            run("", 2, main_process_port=port)


def test_a_host_that_is_not_known(run):
    with pytest.raises(LaunchError, match=r"no-such-host\.invalid"):
        run("", 2, num_machines=2, machine_rank=1, main_process_ip="no-such-host.invalid", main_process_port=29500)


def test_a_log_directory_that_is_a_file(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="is a file"):
        run("", log_directory=tmp_path / "file")
