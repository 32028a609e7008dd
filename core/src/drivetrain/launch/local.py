"""Starting the ranks of this machine and seeing them through to their end."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import tempfile
from pathlib import Path

from drivetrain.config.settings import STOPPED_FILE
from drivetrain.errors import ConfigurationError
from drivetrain.interfaces.launcher import Launcher, LaunchRequest
from drivetrain.launch._binding import as_ranges, shares_of
from drivetrain.launch._checks import await_host, check_request, local_world_size
from drivetrain.launch._environment import base_environment, rank_environment
from drivetrain.launch._failures import exit_code_of, first_of, interrupt_report, report
from drivetrain.launch._job import Job
from drivetrain.launch._output import Sink
from drivetrain.launch._streams import Destinations
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
            signal n to this process; see `LocalOptions` for one of one's own.

        Raises:
            ConfigurationError: For a request that can't work; nothing was started.
            LaunchError: For a port, host or program that can't be used; nothing is left running.
        """
        options = LocalOptions.from_mapping(request.options)
        options.validate()
        if request.num_machines > 1 or request.elastic:
            await_host(request.main_process_ip, options.lookup_timeout)
        check_request(request)
        _check_options(request, options)
        if request.log_directory is not None:
            request.log_directory.mkdir(parents=True, exist_ok=True)
        errors = Sink(sys.stderr)
        for note in _without_effect(request, options):
            errors.write(f"drivetrain: {note}\n".encode())
        with tempfile.TemporaryDirectory(prefix="drivetrain-") as scratch:
            request, stopped_file = _with_note(request, options, Path(scratch))
            job = Job(request, options, Path(scratch), stdout=Sink(sys.stdout), stderr=errors)
            outcome = job.run()
            stopped = stopped_file is not None and stopped_file.exists()
        if stopped_file is not None and not outcome.failures:
            return options.stopped_exit_code if stopped else 0
        if outcome.signum is not None:
            text = interrupt_report(outcome.signum, outcome.failures)
            code = 128 + outcome.signum
        elif outcome.failures:
            text = report(outcome.failures, world_size=outcome.world_size, seconds=outcome.seconds)
            code = exit_code_of(first_of(outcome.failures).returncode)
        else:
            return 0
        errors.write(text.encode() + b"\n")
        return code

    def describe(self, request: LaunchRequest) -> str:
        """One shell command per rank of this machine, with the variables that the launcher adds.

        Example:
            >>> from drivetrain.interfaces import LaunchRequest
            >>> from drivetrain.specs import LauncherSpec
            >>> request = LaunchRequest(command=["./a.out"], plain=True, environment={"A": "b c"}, main_process_port=29500)
            >>> print(LocalLauncher(LauncherSpec(name="local")).describe(request))
            A='b c' RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 ./a.out
        """
        options = LocalOptions.from_mapping(request.options)
        _check_options(request, options)
        local = local_world_size(request)
        shares = shares_of(options.cpu_binding, local)
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
                master_port=request.main_process_port or 29500,  # any free one does
            )
            variables = [f"{name}={shlex.quote(value)}" for name, value in {**added, **identity}.items()]
            binding = [] if shares is None else ["taskset", "-c", as_ranges(shares[local_rank])]
            lines.append(" ".join([*variables, shlex.join([*binding, *_plain_command(request)])]))
        return "\n".join(lines)


def _with_note(request: LaunchRequest, options: LocalOptions, scratch: Path) -> tuple[LaunchRequest, Path | None]:
    """Have ranks note when a signal ends them before their time, where that makes a difference; the file."""
    if not options.stopped_exit_code:
        return request, None
    note = scratch / "stopped"
    return dataclasses.replace(request, environment={**request.environment, STOPPED_FILE: str(note)}), note


def _check_options(request: LaunchRequest, options: LocalOptions) -> None:
    """Refuse options that don't go with the request.

    Raises:
        ConfigurationError: With what to do instead.
    """
    Destinations(options.tee, options.redirects).check(local_world_size(request))
    words = [name for name in ("tee", "redirects") if getattr(options, name) is not None]
    if words and request.log_directory is None:
        raise ConfigurationError(
            f"{' and '.join(words)}: files need a directory, give one with --log-dir DIR. Without files, the output of all ranks is shown "
            "as it is, labelled."
        )


def _without_effect(request: LaunchRequest, options: LocalOptions) -> list[str]:
    """What was given for several machines, and there is one."""
    given: list[str] = [name for name in ("rdzv_backend", "rdzv_conf", "local_addr") if name in options.explicit()]
    if request.main_process_ip is not None:
        given.insert(0, "main_process_ip")
    if request.num_machines > 1 or request.elastic or not given:
        return []
    return [f"{', '.join(given)} changed nothing: there is one machine, whose ranks meet at 127.0.0.1."]


def _plain_command(request: LaunchRequest) -> list[str]:
    """The command of a rank as one would type it: the real one differs in how exceptions are kept."""
    if request.plain:
        return list(request.command)
    return [sys.executable, "-u", *(["-m"] if request.module else []), *request.command]
