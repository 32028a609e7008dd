"""One job on this machine: its ranks under torch's elastic agent, and the signals to their launcher."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from drivetrain.config.settings import variable
from drivetrain.errors import LaunchError
from drivetrain.interfaces.launcher import LaunchRequest
from drivetrain.launch._binding import shares_of
from drivetrain.launch._checks import command_line, local_world_size
from drivetrain.launch._environment import base_environment, rank_environment
from drivetrain.launch._failures import RankFailure, report
from drivetrain.launch._output import Sink
from drivetrain.launch._processes import DEFAULT_PREFIX, FAILURE_GRACE, OutputPolicy, RankProcesses
from drivetrain.launch._stacks import SIGNAL, stacks_text
from drivetrain.launch._streams import Destinations
from drivetrain.launch.options import LocalOptions

__all__ = ["Job", "Outcome", "free_port"]


#: Seconds of silence after which ``--debug`` shows where the ranks are.
DEBUG_HANG_TIMEOUT = 300.0


class _Interrupted(BaseException):
    """A signal has come."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    Args:
        signum: The signal that ended it, or None.
        failures: The ranks that didn't succeed.
        seconds: How long its last attempt took.
        world_size: Number of ranks that it had.
        parted: Where its ranks parted, or "".
    """

    signum: int | None
    failures: tuple[RankFailure, ...]
    seconds: float
    world_size: int
    parted: str = ""


class Job:
    """One job on this machine, from start to end.

    Args:
        request: What to start; checked.
        options: The launcher's own settings.
        scratch: A directory for error files.
        stdout, stderr: Where output and messages go.
        prefix: What stands before each line of a rank, see `OutputPolicy`.
    """

    def __init__(
        self,
        request: LaunchRequest,
        options: LocalOptions,
        scratch: Path,
        *,
        stdout: Sink,
        stderr: Sink,
        prefix: str | None = None,
    ) -> None:
        self._request = request
        self._options = options
        self._local = local_world_size(request)
        self._environment = base_environment(os.environ, request.environment, local_world_size=self._local)
        self._grace = options.shutdown_timeout
        self._signum: int | None = None
        self._hurry = threading.Event()
        self._errors = stderr
        self._debug = request.environment.get(variable("debug")) == "true"
        self._hang_timeout = options.hang_timeout or (DEBUG_HANG_TIMEOUT if self._debug else None)
        policy = OutputPolicy(
            label=request.label_output and request.num_processes > 1,
            directory=request.log_directory,
            merged="all.log" if request.num_machines == 1 else f"all-machine-{request.machine_rank}.log",
            stdout=stdout,
            stderr=stderr,
            destinations=Destinations(options.tee, options.redirects),
            watched=self._hang_timeout is not None,
            prefix=DEFAULT_PREFIX if prefix is None else prefix,
            role=options.role,
        )
        self._processes = RankProcesses(policy, scratch, shares=shares_of(options.cpu_binding, self._local))

    def run(self) -> Outcome:
        """Start the ranks and wait for their end; none is left running, whatever happens.

        Raises:
            LaunchError: If they can't be started, or don't meet.
        """
        request = self._request
        alone = request.num_processes == 1 and request.max_restarts == 0 and not request.elastic
        try:
            with _signals(self._on_signal, self._on_question), self._watching():
                try:
                    (self._run_one if alone else self._run_agent)()
                except _Interrupted:
                    pass
                finally:
                    self._stop()
        except OSError as error:
            raise LaunchError(f"{request.command[0]} can't be started: {error.strerror or error}.") from None
        finally:
            self._processes.close()
        ranks = self._processes
        return Outcome(self._signum, tuple(ranks.failures()), ranks.seconds, ranks.world_size, ranks.parted)

    def _run_one(self) -> None:
        """Start the only process and wait for it."""
        identity = rank_environment(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            master_addr="127.0.0.1",
            master_port=self._request.main_process_port or free_port(),
        )
        self._processes.start({0: {**self._environment, **identity}}, command_line(self._request))
        while self._processes.wait(60.0) is None:
            pass

    def _run_agent(self) -> None:
        with _quiet_torch():
            from drivetrain.launch._agent import Agent

            agent = Agent(
                self._request,
                self._options,
                self._environment,
                self._processes,
                interrupt=lambda: self._signum,
                hurry=self._hurry,
                grace=self._grace,
                on_restart=self._on_restart,
            )
            try:
                agent.run()
            except OSError:
                raise
            except Exception as error:  # of rendezvous: torch has many types for it
                raise LaunchError(
                    f"The machines didn't meet at {self._request.main_process_ip}:{self._request.main_process_port}: "
                    f"{type(error).__name__}: {error} Start the same command on each machine, with its own --machine-rank, and see that the others "
                    "can reach that port of machine 0."
                ) from error

    def _stop(self) -> None:
        """Leave nothing running, whatever the reason for coming here."""
        if self._signum is None:
            self._processes.stop(signal.SIGTERM, grace=FAILURE_GRACE, hurry=self._hurry)
        else:
            self._processes.stop(self._signum, grace=self._grace, hurry=self._hurry)

    def _on_signal(self, signum: int) -> None:
        if self._signum is not None:
            self._hurry.set()
            return
        self._signum = signum
        if self._errors.is_terminal and signum == signal.SIGINT:
            self._say("drivetrain: ending all ranks (Ctrl-C again kills them at once)")
        raise _Interrupted

    def _on_restart(self, attempt: int, world_size: int) -> None:
        self._processes.drain()
        failures = [f for f in self._processes.failures() if not f.stopped]
        before = self._processes.world_size
        size = f", {world_size} instead of {before}" if world_size != before else ""
        if failures:
            self._say(
                report(
                    self._processes.failures(),
                    world_size=before,
                    seconds=self._processes.seconds,
                    parted=self._processes.parted,
                )
            )
            size = f"{size} ({attempt} of {self._request.max_restarts} restarts)"
        else:
            self._say("drivetrain: a machine has come or gone.")
        self._say(f"drivetrain: starting all ranks again{size}")

    def _on_question(self) -> None:
        """Somebody wants to know where the ranks are. On a thread: the signal may have come in the middle of anything."""
        threading.Thread(target=self._show_stacks, args=("SIGUSR2",), daemon=True).start()

    def _show_stacks(self, why: str) -> None:
        stacks, silent = self._processes.stacks()
        self._say(stacks_text(stacks, silent, why=why))
        parted = self._processes.parting(stacks)
        if parted:
            self._say(parted)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Show where the ranks are once they have been silent for too long, each time anew."""
        limit = self._hang_timeout
        if limit is None:
            yield
            return
        done = threading.Event()

        def watch() -> None:
            shown = False
            while not done.wait(min(limit / 4, 5.0)):
                silent = self._processes.silent_seconds >= limit
                if silent and not shown:
                    self._show_stacks(f"no output for {limit:g} s")
                shown = silent

        thread = threading.Thread(target=watch, name="drivetrain-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _say(self, text: str) -> None:
        self._errors.write(text.encode() + b"\n")


@contextlib.contextmanager
def _signals(handle: Callable[[int], None], answer: Callable[[], None]) -> Iterator[None]:
    """Handle the signals that end programs, and the one that asks where the ranks are; only Python's main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(signum: int, _: FrameType | None) -> None:
        handle(signum)

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
    numbers = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]  # nohup stays nohup
    before: dict[int, Any] = {n: signal.signal(n, handler) for n in numbers}
    if SIGNAL is not None:
        before[SIGNAL] = signal.signal(SIGNAL, lambda *_: answer())
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Keep the elastic agent's own log lines off the terminal: what they say, we say."""
    import torch.distributed.elastic.agent.server  # noqa: F401  # makes the loggers, each with a level of its own

    names = [name for name in logging.Logger.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def free_port() -> int:
    """A port of this machine that nobody holds at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
