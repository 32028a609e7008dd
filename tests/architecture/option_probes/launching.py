"""Settings of launching, through the real command and launcher. What is started are shells that write down their variables."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from unittest import mock

from drivetrain.cli.launch import run
from drivetrain.errors import DrivetrainError
from drivetrain.parallel.process_group import find_free_port

from . import effect
from .scene import files, soon, third_party

ENV = 'env > "$0/rank-$RANK"'


def launch(folder, script=ENV, **flags):
    """The exit code of a launch, whose output goes to a file."""
    flags = {"cpu": True, "no_python": True, "quiet": True, **flags}
    with (folder / "out").open("w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        return run(flags, ("sh", "-c", script, str(folder)))


def variables(folder, rank=0):
    """The variables of a rank that has written them down."""
    lines = (folder / f"rank-{rank}").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def variable(name, folder, **flags):
    assert launch(folder, **flags) == 0
    return variables(folder).get(name)


def two_machines(folder, late=0.0, **flags):
    """Variables of the one process of this machine, of two that run here at once."""
    here, there = folder / "here", folder / "there"
    meeting = {"main_process_ip": "127.0.0.1", "main_process_port": find_free_port()}
    common = {"num_processes": 2, "num_machines": 2, **meeting, **flags}
    rank = common.pop("machine_rank", 0)

    def other():
        soon(lambda: False, late)
        with contextlib.suppress(DrivetrainError):
            launch(there, machine_rank=1 - rank, **common)

    here.mkdir()
    there.mkdir()
    thread = threading.Thread(target=other)
    thread.start()
    try:
        assert launch(here, machine_rank=rank, **common) == 0
    finally:
        thread.join(60)
    (mine,) = [f for f in files(here) if f.startswith("rank-")]  # with c10d, machines are numbered as they come
    return variables(here, mine.removeprefix("rank-"))


@effect("LaunchOptions.on", ("local", 0), ("seven", 7))
def on(value, folder):
    with third_party(folder):
        return launch(folder, on=value)


@effect("LaunchOptions.num_processes", (1, 1), (2, 2))
def num_processes(value, folder):
    launch(folder, num_processes=value)
    return sum(f.startswith("rank-") for f in files(folder))


@effect("LaunchOptions.num_machines", (1, "1"), (2, "2"))
def num_machines(value, folder):
    if value == 1:
        return variable("GROUP_WORLD_SIZE", folder, num_machines=value, num_processes=2)
    return two_machines(folder, num_machines=value)["GROUP_WORLD_SIZE"]


@effect("LaunchOptions.min_machines", (None, "LaunchError"), (1, "1"))
def min_machines(value, folder):
    """The other of two machines never comes."""
    meeting = {"main_process_ip": "127.0.0.1", "main_process_port": find_free_port()}
    conf = {"last_call_timeout": 1, "join_timeout": 4, "read_timeout": 5}
    kind = {"rdzv_backend": "c10d", "rdzv_conf": conf}
    return variable("WORLD_SIZE", folder, num_processes=2, num_machines=2, min_machines=value, **meeting, **kind)


@effect("LaunchOptions.machine_rank", (0, "0"), (1, "1"))
def machine_rank(value, folder):
    return two_machines(folder, machine_rank=value)["RANK"]


@effect("LaunchOptions.main_process_ip", ("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"))
def main_process_ip(value, folder):
    return two_machines(folder, main_process_ip=value)["MASTER_ADDR"]


@effect("LaunchOptions.main_process_port", ("given", True), (None, False))
def main_process_port(value, folder):
    port = find_free_port()
    flags = {"main_process_port": port} if value else {}
    return variable("MASTER_PORT", folder, num_processes=2, **flags) == str(port)


@effect("LaunchOptions.max_restarts", (0, 3), (1, 0))
def max_restarts(value, folder):
    """A program that fails the first time."""
    return launch(folder, 'test -e "$0/again" || { touch "$0/again"; exit 3; }', max_restarts=value)


@effect("LaunchOptions.log_dir", ("a", {"a"}), ("b", {"b"}))
def log_dir(value, folder):
    launch(folder, "echo hello", num_processes=2, log_dir=str(folder / value))
    return {f.split("/")[0] for f in files(folder) if f.endswith(".log")}


@effect("LaunchOptions.label", (True, {"[rank 0] hello", "[rank 1] hello"}), (False, {"hello"}))
def label(value, folder):
    launch(folder, "echo hello", num_processes=2, label=value)
    return set((folder / "out").read_text().splitlines())


@effect("LaunchOptions.num_cpu_threads_per_process", (3, "3"), (5, "5"))
def num_cpu_threads_per_process(value, folder):
    return variable("OMP_NUM_THREADS", folder, num_cpu_threads_per_process=value)


@effect("LaunchOptions.gpu_ids", ("0", "0"), ("1", "1"))
def gpu_ids(value, folder):
    with third_party(folder):
        return variable("CHIP_VISIBLE", folder, gpu_ids=value, cpu=False)


# -- the local launcher's own ----------------------------------------------------------------------------------------------


@effect("LocalOptions.rdzv_id", ("a", "a"), ("b", "b"))
def rdzv_id(value, folder):
    return variable("TORCHELASTIC_RUN_ID", folder, num_processes=2, rdzv_id=value)


@effect("LocalOptions.role", ("a", "a"), ("b", "b"))
def role(value, folder):
    return variable("ROLE_NAME", folder, num_processes=2, role=value)


@effect("LocalOptions.rdzv_backend", ("static", "127.0.0.1"), ("nosuch", "_Usage"))
def rdzv_backend(value, folder):
    return two_machines(folder, rdzv_backend=value)["MASTER_ADDR"]


@effect("LocalOptions.rdzv_conf", ({}, "met"), ({"join_timeout": 1, "read_timeout": 3}, "LaunchError"))
def rdzv_conf(value, folder):
    """The other machine comes late."""
    two_machines(folder, late=8.0, rdzv_backend="c10d", rdzv_conf=value)
    return "met"


@effect("LocalOptions.local_addr", ("127.0.0.1", "127.0.0.1"), ("localhost", "localhost"))
def local_addr(value, folder):
    return two_machines(folder, rdzv_backend="c10d", local_addr=value)["MASTER_ADDR"]


def shown(folder, **flags):
    """What is shown of two ranks, with a directory for files."""
    launch(folder, "echo hello $RANK", num_processes=2, log_dir=str(folder / "logs"), **flags)
    return (folder / "out").read_text().splitlines()


@effect("LocalOptions.tee", ("0:3", ["[rank 0] hello 0"]), ("1:3", ["[rank 1] hello 1"]))
def tee(value, folder):
    return shown(folder, tee=value, redirects="3")


@effect("LocalOptions.redirects", ("0:3", ["[rank 1] hello 1"]), ("1:3", ["[rank 0] hello 0"]))
def redirects(value, folder):
    return shown(folder, redirects=value)


@effect("LocalOptions.cpu_binding", ("none", True), ("cores", False))
def cpu_binding(value, folder):
    """Whether ranks share processors."""
    launch(folder, 'grep Cpus_allowed_list /proc/self/status > "$0/rank-$RANK"', num_processes=2, cpu_binding=value)
    return (folder / "rank-0").read_text() == (folder / "rank-1").read_text()


@effect("LocalOptions.hang_timeout", (None, False), (0.2, True))
def hang_timeout(value, folder):
    launch(folder, "sleep 1", num_processes=1, **({"hang_timeout": value} if value else {}))
    return "where the ranks are" in (folder / "out").read_text()


@effect("LocalOptions.shutdown_timeout", (30.0, True), (0.1, False))
def shutdown_timeout(value, folder):
    """Whether a rank that needs half a second after SIGTERM gets it."""
    script = 'trap "sleep 0.5; touch $0/saved; exit 0" TERM; touch "$0/started"; while true; do sleep 0.05; done'

    def interrupt():
        if soon(lambda: (folder / "started").exists(), 20.0):
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    launch(folder, script, shutdown_timeout=value)
    thread.join()
    return (folder / "saved").exists()


@effect("LocalOptions.lookup_timeout", (0.0, False), (0.3, True))
def lookup_timeout(value, folder):
    """Whether an unknown name is looked up again."""
    unknown = mock.Mock(side_effect=socket.gaierror("unknown"))
    with mock.patch.object(socket, "getaddrinfo", unknown), contextlib.suppress(DrivetrainError):
        launch(folder, num_processes=2, num_machines=2, main_process_ip="m0", main_process_port=1, lookup_timeout=value)
    return unknown.call_count > 1


@effect("LocalOptions.stopped_exit_code", (0, 0), (75, 75))
def stopped_exit_code(value, folder):
    """What the launcher says of a rank that notes that it was stopped."""
    return launch(folder, 'touch "${DRIVETRAIN_STOPPED_FILE:-$0/none}"', stopped_exit_code=value)
