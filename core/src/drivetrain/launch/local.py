"""Starting the ranks of this machine and seeing them through to their end."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from drivetrain.errors import LaunchError
from drivetrain.interfaces.launcher import Launcher, LaunchRequest
from drivetrain.launch._checks import check_request, command_line, local_world_size
from drivetrain.launch._environment import base_environment, rank_environment
from drivetrain.launch._failures import exit_code_of, first_of, interrupt_report, report
from drivetrain.launch._output import Sink
from drivetrain.launch._processes import FAILURE_GRACE, OutputPolicy, RankProcesses
from drivetrain.launch.options import LocalOptions

__all__ = ["LocalLauncher"]


class LocalLauncher(Launcher):
    """Starts this machine's ranks, one process each, under torch's elastic agent.

    A single process without restarts has nobody to meet: it is started without the agent, which spares an import of torch.

    `LaunchRequest.options` has the fields of `drivetrain.launch.options.LocalOptions`.

    Args:
        spec: The descriptor.

    Example:
        >>> import sys
        >>> from drivetrain.interfaces import LaunchRequest
        >>> from drivetrain.specs import LauncherSpec
        >>> LocalLauncher(LauncherSpec(name="local")).launch(
        ...     LaunchRequest(command=[sys.executable, "-c", "raise SystemExit(0)"], plain=True)
        ... )
        0
    """

    def launch(self, request: LaunchRequest) -> int:
        """Run the job to its end.

        Returns:
            The exit code to pass on: 0, or that of the rank that failed first (128 + n if signal n killed it), or 128 + n after
            signal n to this process.

        Raises:
            ConfigurationError: For a request that can't work; nothing was started.
            LaunchError: For a port, host or program that can't be used; nothing is left running.
        """
        check_request(request)
        options = LocalOptions.from_mapping(request.options)
        if request.log_directory is not None:
            request.log_directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="drivetrain-") as scratch:
            return _Run(request, options, Path(scratch)).run()

    def describe(self, request: LaunchRequest) -> str:
        """One shell command per rank of this machine, with the variables that the launcher adds.

        Example:
            >>> from drivetrain.interfaces import LaunchRequest
            >>> from drivetrain.specs import LauncherSpec
            >>> request = LaunchRequest(command=["./a.out"], plain=True, environment={"A": "b c"}, main_process_port=29500)
            >>> print(LocalLauncher(LauncherSpec(name="local")).describe(request))
            A='b c' RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ./a.out
        """
        local = local_world_size(request)
        shared = base_environment(os.environ, request.environment, local_world_size=local)
        added = {name: value for name, value in shared.items() if os.environ.get(name) != value}
        lines = []
        for local_rank in range(local):
            identity = rank_environment(
                rank=request.machine_rank * local + local_rank,
                world_size=request.num_processes,
                local_rank=local_rank,
                local_world_size=local,
                master_addr=request.main_process_ip or "127.0.0.1",
                master_port=request.main_process_port or 0,
            )
            variables = [f"{name}={shlex.quote(value)}" for name, value in {**added, **identity}.items()]
            lines.append(" ".join([*variables, shlex.join(_plain_command(request))]))
        return "\n".join(lines)


class _Interrupted(BaseException):
    """A signal has come."""


class _Run:
    """One job on this machine, from start to end."""

    def __init__(self, request: LaunchRequest, options: LocalOptions, scratch: Path) -> None:
        self._request = request
        self._options = options
        self._local = local_world_size(request)
        self._environment = base_environment(os.environ, request.environment, local_world_size=self._local)
        self._grace = options.shutdown_timeout
        self._signum: int | None = None
        self._hurry = threading.Event()
        self._errors = Sink(sys.stderr)
        label = request.label_output and request.num_processes > 1
        policy = OutputPolicy(
            label=label, directory=request.log_directory, stdout=Sink(sys.stdout), stderr=self._errors
        )
        self._processes = RankProcesses(policy, scratch)

    def run(self) -> int:
        request = self._request
        alone = request.num_processes == 1 and request.max_restarts == 0
        try:
            with _signals(self._on_signal):
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
        return self._conclude()

    def _run_one(self) -> None:
        """Start the only process and wait for it."""
        identity = rank_environment(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            master_addr="127.0.0.1",
            master_port=self._request.main_process_port or _free_port(),
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
                    f"{type(error).__name__}: {error}"
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

    def _on_restart(self, attempt: int) -> None:
        self._processes.drain()
        failures = self._processes.failures()
        if failures:
            self._say(report(failures, world_size=self._request.num_processes, seconds=self._processes.seconds))
        self._say(f"drivetrain: starting all ranks again ({attempt} of {self._request.max_restarts} restarts)")

    def _conclude(self) -> int:
        failures = self._processes.failures()
        if self._signum is not None:
            self._say(interrupt_report(self._signum, failures))
            return 128 + self._signum
        if not failures:
            return 0
        self._say(report(failures, world_size=self._request.num_processes, seconds=self._processes.seconds))
        return exit_code_of(first_of(failures).returncode)

    def _say(self, text: str) -> None:
        self._errors.write(text.encode() + b"\n")


@contextlib.contextmanager
def _signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Handle the signals that end programs; only Python's main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(signum: int, _: FrameType | None) -> None:
        handle(signum)

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
    numbers = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]  # nohup stays nohup
    before: dict[int, Any] = {n: signal.signal(n, handler) for n in numbers}
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


def _plain_command(request: LaunchRequest) -> list[str]:
    """The command of a rank as one would type it: the real one differs in how exceptions are kept."""
    if request.plain:
        return list(request.command)
    return [sys.executable, "-u", *(["-m"] if request.module else []), *request.command]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
