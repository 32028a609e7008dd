"""What was logged is stored however the process ends. The hub's interval is so long that nothing is stored by the time alone."""

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from drivetrain.tracking import read_run, read_spool

PREAMBLE = """
    import os, signal, sys, threading, time
    from drivetrain._builtin.jsonl import JSONL_SPEC
    from drivetrain.interfaces import Tracker
    from drivetrain.specs import TrackerSpec
    from drivetrain.tracking import TrackerHub, TrackingOptions

    class Hanging(Tracker):
        def log_scalars(self, values, step):
            time.sleep(3600)

    HANGING = TrackerSpec(name="hanging", target="__main__:Hanging")

    def make(*specs, **options):
        options = TrackingOptions(interval=60.0, **options)
        return TrackerHub.from_plan(specs, logging_dir=sys.argv[1], options=options)

    def train(hub, first=0, last=100):
        for i in range(first, last):
            hub.log({"x": i}, step=i)

    hub = make(JSONL_SPEC)
"""


def run(tmp_path, body, *, timeout=30):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(PREAMBLE) + textwrap.dedent(body))
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "logs")], capture_output=True, text=True, timeout=timeout
    )
    return done, time.monotonic() - start


def stored(tmp_path):
    run = read_run(tmp_path / "logs" / "p")
    return [v for _, v in run.series("x")], run.status


def test_a_script_that_never_ends_tracking_loses_nothing(tmp_path):
    done, _ = run(tmp_path, "hub.start('p'); train(hub)")
    assert (done.returncode, done.stderr) == (0, "")
    assert stored(tmp_path) == (list(range(100)), "finished")


def test_an_exit_code_is_kept(tmp_path):
    done, _ = run(tmp_path, "hub.start('p'); train(hub); sys.exit(3)")
    assert done.returncode == 3 and stored(tmp_path) == (list(range(100)), "finished")


def test_an_uncaught_exception_is_shown_and_the_run_has_failed(tmp_path):
    done, _ = run(tmp_path, "hub.start('p'); train(hub); raise RuntimeError('planted')")
    assert done.returncode == 1 and done.stderr.count("RuntimeError: planted") == 1
    assert stored(tmp_path) == (list(range(100)), "failed")


def test_ctrl_c_is_an_exception_too(tmp_path):
    done, _ = run(tmp_path, "hub.start('p'); train(hub); os.kill(os.getpid(), signal.SIGINT); time.sleep(30)")
    assert "KeyboardInterrupt" in done.stderr and stored(tmp_path) == (list(range(100)), "failed")


def test_sigterm_stores_everything_and_still_ends_the_process(tmp_path):
    done, seconds = run(tmp_path, "hub.start('p'); train(hub); os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)")
    assert done.returncode == -signal.SIGTERM and seconds < 15
    assert stored(tmp_path) == (list(range(100)), "killed")


def test_an_earlier_handler_is_called_after_the_flush_and_training_may_go_on(tmp_path):
    done, _ = run(
        tmp_path,
        """
        def handler(number, frame):
            from drivetrain.tracking import read_run
            print("handler saw", len(read_run(sys.argv[1]).rows))
        signal.signal(signal.SIGTERM, handler)
        hub.start("p")
        train(hub, 0, 50)
        os.kill(os.getpid(), signal.SIGTERM)
        train(hub, 50, 100)
        hub.finish()
        assert signal.getsignal(signal.SIGTERM) is handler
        """,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "handler saw 50\n", "")
    assert stored(tmp_path) == (list(range(100)), "finished")


def test_a_handler_set_later_that_passes_on_works_and_stays(tmp_path):
    done, _ = run(
        tmp_path,
        """
        hub.start("p")
        ours = signal.getsignal(signal.SIGTERM)
        def handler(number, frame):
            print("later")
            ours(number, frame)
        signal.signal(signal.SIGTERM, handler)
        train(hub)
        hub.finish()
        assert signal.getsignal(signal.SIGTERM) is handler
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
        """,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "later\n")
    assert stored(tmp_path) == (list(range(100)), "finished")


def test_an_ignored_sigterm_stays_ignored(tmp_path):
    body = "signal.signal(15, signal.SIG_IGN); hub.start('p'); os.kill(os.getpid(), 15); train(hub)"
    done, _ = run(tmp_path, body)
    assert done.returncode == 0 and stored(tmp_path) == (list(range(100)), "finished")


@pytest.mark.parametrize("attempt", range(3))
def test_sigterm_in_the_middle_of_logging_does_not_deadlock(tmp_path, attempt):
    done, seconds = run(
        tmp_path,
        f"""
        hub.start("p")
        threading.Timer(0.1 + 0.03 * {attempt}, os.kill, (os.getpid(), signal.SIGTERM)).start()
        i = 0
        while True:
            hub.log({{"x": i}}, step=i)
            i += 1
        """,
    )
    assert done.returncode == -signal.SIGTERM and seconds < 20
    values, status = stored(tmp_path)
    assert values == list(range(len(values))) and len(values) > 100 and status == "killed"


def test_a_hanging_tracker_delays_the_end_by_no_more_than_its_bound(tmp_path):
    body = "hub = make(HANGING, JSONL_SPEC, finish_timeout=1.0); hub.start('p'); train(hub)"
    done, seconds = run(tmp_path, body)
    assert done.returncode == 0 and seconds < 15 and "doesn't answer in time" in done.stderr
    assert stored(tmp_path) == (list(range(100)), "finished")
    [spool] = (tmp_path / "logs" / "drivetrain-spool").rglob("hanging-*.jsonl")
    assert [r.payload["x"] for r in read_spool(spool)[1]] == list(range(100))


def test_forked_children_log_nothing_and_end_as_they_would(tmp_path):
    done, seconds = run(
        tmp_path,
        """
        hub.start("p")
        train(hub, 0, 50)
        killed, finished = os.fork(), None
        if killed == 0:
            train(hub, 1000, 1010)
            time.sleep(30)
        finished = os.fork()
        if finished == 0:
            train(hub, 2000, 2010)
            sys.exit(7)
        time.sleep(0.3)
        os.kill(killed, signal.SIGTERM)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (killed, finished)]
        print(codes)
        train(hub, 50, 100)
        """,
    )
    assert done.stdout == "[-15, 7]\n" and seconds < 15
    assert stored(tmp_path) == (list(range(100)), "finished")


def test_a_tracker_that_uses_an_executor_still_works_at_the_end(tmp_path):
    done, _ = run(
        tmp_path,
        """
        from concurrent.futures import ThreadPoolExecutor

        class Pooled(Tracker):
            def start(self):
                self.pool = ThreadPoolExecutor(1)
            def log_scalars(self, values, step):
                self.pool.submit(print, step).result()

        hub = make(TrackerSpec(name="pooled", target="__main__:Pooled"))
        hub.start("p")
        train(hub, 0, 3)
        """,
    )
    assert (done.stdout, done.stderr) == ("0\n1\n2\n", "")


def test_a_killed_process_loses_only_what_was_logged_since_the_last_flush(tmp_path):
    body = """
        hub.start("p")
        train(hub, 0, 50)
        assert hub.flush()
        train(hub, 50, 100)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done, _ = run(tmp_path, body)
    assert done.returncode == -signal.SIGKILL and stored(tmp_path) == (list(range(50)), "running")


def test_the_hub_needs_no_torch(tmp_path):
    done, _ = run(tmp_path, "hub.start('p'); train(hub); hub.finish(); assert 'torch' not in sys.modules")
    assert (done.returncode, done.stderr) == (0, "")
