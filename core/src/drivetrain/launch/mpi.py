"""Starting ranks with mpirun or mpiexec: of Open MPI, or of MPICH and its relatives."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.config.options import Options
from drivetrain.errors import ConfigurationError, LaunchError
from drivetrain.interfaces.launcher import Launcher, LaunchRequest
from drivetrain.launch._checks import local_world_size
from drivetrain.launch._environment import base_environment
from drivetrain.launch._job import free_port
from drivetrain.launch._output import Sink
from drivetrain.launch._pieces import PATTERN, Pieces
from drivetrain.launch._processes import FAILURE_GRACE

__all__ = ["MPILauncher", "MPIOptions"]

#: Says which rank failed, and how: MPI's own programs differ in that, and some let the others hang.
_WRAPPER = (
    '"$@"; code=$?; [ "$code" -eq 0 ] || '
    'echo "drivetrain: rank ${OMPI_COMM_WORLD_RANK:-$PMI_RANK} failed with exit code $code" >&2; exit "$code"'
)
_FAILED = re.compile(r"drivetrain: rank (\d+) failed with exit code (\d+)")
#: Open MPI's labels. MPICH's stand before each piece of a line that a rank writes: those are put together again.
_LABEL = re.compile(r"^\[\d+,(\d+)\]<std(?:out|err)>: ?")
#: A rank's last line may lack its newline, and another rank's label follow at once.
_BEFORE_LABEL = re.compile(r"(?<!^)(?=\[\d+,\d+\]<std(?:out|err)>: )")


@dataclass(frozen=True)
class MPIOptions(Options):
    """What MPI's own launcher is told: section ``[mpi]``, variables ``DRIVETRAIN_MPI_<FIELD>``, flags ``--mpi-<field>``.

    Args:
        program: Name or path of the program; None for mpirun or mpiexec, whichever is found.
        hostfile: File with the machines, as that program reads it.
        hosts: Names of the machines, in place of a file.
        arguments: Further words for that program.

    Example:
        >>> MPIOptions(hosts=("a", "b")).explicit()
        {'hosts': ('a', 'b')}
    """

    program: str | None = None
    hostfile: str | None = None
    hosts: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


class MPILauncher(Launcher):
    """Runs a command under MPI's own launcher.

    Args:
        spec: The descriptor.
    """

    def launch(self, request: LaunchRequest) -> int:
        """Run the job to its end; the exit code of the rank that failed first, or 128 + n after signal n.

        Raises:
            ConfigurationError: For what MPI's launcher can't be told.
            LaunchError: If there is none.
        """
        words = self._words(request, port=request.main_process_port or free_port())
        stdout, stderr = Sink(sys.stdout), Sink(sys.stderr)
        for attempt in range(request.max_restarts + 1):
            if attempt:
                _say(stderr, f"starting all ranks again ({attempt} of {request.max_restarts} restarts)")
            run = _Run(words, stdout, stderr, label=request.label_output and request.num_processes > 1)
            code = run.finish(attempt)
            if code == 0 or run.signum:
                break
        return code

    def describe(self, request: LaunchRequest) -> str:
        """The command line.

        Example:
            >>> from drivetrain.specs import LauncherSpec
            >>> request = LaunchRequest(command=["./a.out"], plain=True, options={"program": "mpiexec.none"})
            >>> MPILauncher(LauncherSpec(name="mpi")).describe(request)
            Traceback (most recent call last):
            ...
            drivetrain.errors.LaunchError: There is no program mpiexec.none (mpi.program) on the PATH.
        """
        return shlex.join(self._words(request, port=request.main_process_port or 29500))

    def _words(self, request: LaunchRequest, *, port: int) -> list[str]:
        options = MPIOptions.from_mapping(request.options)
        _check(request, options)
        program = _program(options)
        local = local_world_size(request)
        shared = base_environment(os.environ, request.environment, local_world_size=local)
        added = {name: value for name, value in shared.items() if os.environ.get(name) != value}
        added |= {"MASTER_ADDR": _address(request, options), "MASTER_PORT": str(port)}
        several = local if request.num_machines > 1 else None
        open_mpi = "Open MPI" in _version(program)
        words = _open_mpi(options, several, added) if open_mpi else _hydra(options, several, added)
        if request.label_output and request.num_processes > 1:
            words += ["--tag-output"] if open_mpi else ["-prepend-pattern", PATTERN]
        python = [] if request.plain else [sys.executable, "-u", *(["-m"] if request.module else [])]
        command = ["sh", "-c", _WRAPPER, "sh", *python, *request.command]
        return [program, "-n", str(request.num_processes), *words, *options.arguments, *command]


def _open_mpi(options: MPIOptions, per_machine: int | None, added: dict[str, str]) -> list[str]:
    # It binds ranks to single cores unless told otherwise, which leaves their threads one core.
    words = ["--bind-to", "none", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    words += ["--map-by", f"ppr:{per_machine}:node"] if per_machine else []
    words += ["--hostfile", options.hostfile] if options.hostfile else []
    words += ["--host", ",".join(f"{h}:{per_machine or 1}" for h in options.hosts)] if options.hosts else []
    return words + [part for name, value in added.items() for part in ("-x", f"{name}={value}")]


def _hydra(options: MPIOptions, per_machine: int | None, added: dict[str, str]) -> list[str]:
    words = ["-ppn", str(per_machine)] if per_machine else []
    words += ["-f", options.hostfile] if options.hostfile else []
    words += ["-hosts", ",".join(options.hosts)] if options.hosts else []
    return words + [part for name, value in added.items() for part in ("-genv", name, value)]


def _check(request: LaunchRequest, options: MPIOptions) -> None:
    if options.hostfile and options.hosts:
        raise ConfigurationError("mpi.hostfile and mpi.hosts say the same thing. Give one of them.")
    if options.hostfile and not Path(options.hostfile).is_file():
        raise ConfigurationError(f"There is no file {options.hostfile} (mpi.hostfile).")
    refused = {
        "log_dir": request.log_directory,
        "machine_rank": request.machine_rank or None,
        "min_machines": request.min_machines,
    }
    given = [name for name, value in refused.items() if value is not None]
    if given:
        raise ConfigurationError(
            f"{', '.join(given)}: MPI's launcher starts all machines itself, and writes files by options of its own (--mpi-arguments)."
        )


def _program(options: MPIOptions) -> str:
    for name in (options.program,) if options.program else ("mpirun", "mpiexec"):
        found = shutil.which(name)
        if found:
            return found
    if options.program:
        raise LaunchError(f"There is no program {options.program} (mpi.program) on the PATH.")
    raise LaunchError("There is neither mpirun nor mpiexec on the PATH: install Open MPI or MPICH, or load its module.")


def _version(program: str) -> str:
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout


def _address(request: LaunchRequest, options: MPIOptions) -> str:
    """Where ranks meet: on the first machine."""
    if request.main_process_ip:
        return request.main_process_ip
    if options.hosts:
        return options.hosts[0]
    if options.hostfile:
        lines = (line.split("#")[0].split() for line in Path(options.hostfile).read_text(encoding="utf-8").splitlines())
        first = next((words[0].split(":")[0] for words in lines if words), None)
        if first:
            return first
    if request.num_machines == 1:
        return "127.0.0.1"
    raise ConfigurationError(
        f"{request.num_machines} machines: say which, by --mpi-hostfile or --mpi-hosts, or where ranks meet (--main-process-ip)."
    )


class _Run:
    """One start of the program."""

    def __init__(self, words: Sequence[str], stdout: Sink, stderr: Sink, *, label: bool) -> None:
        self._words = words
        self._sinks = (stdout, stderr)
        self._label = label
        self._first: tuple[int, int] | None = None
        self.signum = 0

    def finish(self, attempt: int) -> int:
        """Run it to its end."""
        environ = {**os.environ, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        process = subprocess.Popen(
            self._words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, env=environ
        )
        streams = zip((process.stdout, process.stderr), self._sinks, strict=True)
        readers = [threading.Thread(target=self._read, args=(s, sink, process), daemon=True) for s, sink in streams]
        for reader in readers:
            reader.start()

        def stop(number: int, _: Any) -> None:
            self.signum = number
            process.terminate()  # it ends its ranks

        main = threading.current_thread() is threading.main_thread()
        before = {n: signal.signal(n, stop) for n in (signal.SIGINT, signal.SIGTERM)} if main else {}
        try:
            code = process.wait()
            for reader in readers:
                reader.join(FAILURE_GRACE)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.signum:
            return 128 + self.signum
        return self._first[1] if self._first else (128 - code if code < 0 else code)

    def _read(self, stream: Any, sink: Sink, process: subprocess.Popen[bytes]) -> None:
        pieces = Pieces()
        while data := os.read(stream.fileno(), 65536):
            for rank, line in pieces.feed(data):
                self._show(rank, line, sink, process)
        for rank, line in pieces.end():
            self._show(rank, line, sink, process)

    def _show(self, rank: int | None, line: bytes, sink: Sink, process: subprocess.Popen[bytes]) -> None:
        text = line.decode("utf-8", "replace")
        failed = _FAILED.search(text)
        if failed and self._first is None:
            self._first = (int(failed[1]), int(failed[2]))
            _end_later(process)
        if rank is not None:
            sink.write(f"[rank {rank}] {text}".encode())
        elif self._label:
            lines = "\n".join(_BEFORE_LABEL.split(text)).splitlines(keepends=True)
            sink.write("".join(_LABEL.sub(r"[rank \1] ", one) for one in lines).encode())
        else:
            sink.write(text.encode())


def _end_later(process: subprocess.Popen[bytes]) -> None:
    """What the other ranks could still do together would not work."""

    def end() -> None:
        if process.poll() is None:
            process.terminate()

    timer = threading.Timer(FAILURE_GRACE, end)
    timer.daemon = True
    timer.start()


def _say(sink: Sink, text: str) -> None:
    sink.write(f"drivetrain: {text}\n".encode())
