"""The processes of one machine: start them, see how they end, end them."""

from __future__ import annotations

import contextlib
import os
import signal
import string
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from drivetrain.launch import _stacks
from drivetrain.launch._binding import bound_to
from drivetrain.launch._desync import parting_text
from drivetrain.launch._evidence import Evidence, collect, prepare, with_end
from drivetrain.launch._failures import RankFailure, failure
from drivetrain.launch._output import LineWriter, OutputRouter, Sink, Source
from drivetrain.launch._streams import Destinations

__all__ = ["OutputPolicy", "RankProcesses"]

#: Seconds that the other ranks have to end once one has failed: nothing that they could still do together would work.
FAILURE_GRACE = 5.0

#: Seconds after a first Ctrl-C in which a rank may clean up before it is ended with SIGTERM.
INTERRUPT_GRACE = 10.0


#: Seconds in which a rank writes down its collectives; the first time, torch looks up where its own libraries are.
_ANSWER = 4.0

#: Seconds without a collective after which ranks that differ count as parted.
_STANDSTILL = 1.0

#: What stands before each line of a rank.
DEFAULT_PREFIX = "[rank ${rank}] "


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPolicy:
    """Where each rank's output goes.

    Args:
        label: Whether lines get their rank's label. Off, ranks write to the launcher's streams themselves.
        directory: Where each rank's output goes as ``rank-N.log``, and that of all as ``all.log``.
        stdout, stderr: The launcher's streams.
        destinations: With a directory, what is written and what is shown.
        prefix: A rank's label, with ``${rank}``, ``${local_rank}`` and ``${role_name}``.
        role: Role of the ranks.
        merged: Name of the file for all ranks of this machine.
        watched: No rank may write to the launcher's own streams: somebody looks for signs of life.
    """

    label: bool
    directory: Path | None
    stdout: Sink
    stderr: Sink
    destinations: Destinations = field(default_factory=Destinations)
    watched: bool = False
    merged: str = "all.log"
    prefix: str = DEFAULT_PREFIX
    role: str = "default"

    def name(self, *, rank: int, local_rank: int) -> bytes:
        """What stands before a rank's lines."""
        values = {"rank": rank, "local_rank": local_rank, "role_name": self.role}
        return string.Template(self.prefix).safe_substitute(values).encode()

    def log_file(self, rank: int) -> Path | None:
        """The file of one rank, or None."""
        return None if self.directory is None else self.directory / f"rank-{rank}.log"


@dataclass(slots=True)
class _Rank:
    """A started rank."""

    rank: int
    process: subprocess.Popen[bytes]
    error_file: Path
    log: IO[bytes] | None
    ended: float | None = None
    stopped: bool = field(default=False)
    where: str = ""


class RankProcesses:
    """The ranks of one attempt on this machine, as one unit: all succeed, or all are ended.

    Args:
        policy: Where output goes.
        scratch: A directory for error files.
        shares: The processors of each local rank; None where the system decides.

    Example:
        >>> import os, sys, tempfile
        >>> from pathlib import Path
        >>> policy = OutputPolicy(label=True, directory=None, stdout=Sink(sys.stdout), stderr=Sink(sys.stderr))
        >>> with tempfile.TemporaryDirectory() as scratch:
        ...     ranks = RankProcesses(policy, Path(scratch))
        ...     ranks.start({0: dict(os.environ), 1: dict(os.environ)}, [sys.executable, "-c", "raise SystemExit(3)"])
        ...     while ranks.wait(1.0) is None:
        ...         pass
        ...     ranks.close()
        ...     sorted(f.returncode for f in ranks.failures() if not f.stopped)[-1]
        3
    """

    def __init__(self, policy: OutputPolicy, scratch: Path, *, shares: Sequence[frozenset[int]] | None = None) -> None:
        self.policy = policy
        self._scratch = scratch
        self._shares = shares
        self._starts = 0
        self.world_size = 0
        self._merged = _merged_file(policy)
        self._ranks: list[_Rank] = []
        #: Where the ranks parted, as noted by `locate`.
        self.parted = ""
        self._router = OutputRouter()
        self._changed = threading.Event()
        self._pollable = True
        self._started = time.monotonic()
        erase = policy.stdout.is_terminal or policy.stderr.is_terminal
        self._stdout_writer = LineWriter(policy.stdout, erase=erase and policy.stdout.is_terminal)
        together = policy.stdout.identity == policy.stderr.identity
        self._stderr_writer = (
            self._stdout_writer if together else LineWriter(policy.stderr, erase=policy.stderr.is_terminal)
        )

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {r.rank: r.process.pid for r in self._ranks}

    @property
    def silent_seconds(self) -> float:
        """Seconds since anything was printed, or the ranks were started; needs a ``watched`` policy to be true for all ranks."""
        return time.monotonic() - max(self._started, self._router.last_read)

    def stacks(self, *, seconds: float = 1.0) -> tuple[dict[int, str], dict[int, str]]:
        """The Python stacks of the ranks that run, and why others have none, by rank."""
        running = [r for r in self._ranks if r.process.poll() is None]
        found = _stacks.ask(
            {r.rank: (r.process.pid, _stacks.stacks_file(r.error_file)) for r in running}, seconds=seconds
        )
        silent = {r.rank: "it has ended" for r in self._ranks if r not in running}
        for r in running:
            if r.rank not in found:
                ready = _stacks.stacks_file(r.error_file).exists()
                silent[r.rank] = "it doesn't answer" if ready else "it isn't a Python script, or is just starting"
        return found, silent

    def locate(self) -> None:
        """Note where the running ranks are, and where ranks parted, for the report of a failure: they are about to be ended."""
        found, _ = self.stacks(seconds=0.5)
        for r in self._ranks:
            r.where = _stacks.where_in(found.get(r.rank, ""))
        self.parted = parting_text(self._evidence(found), world_size=self.world_size)

    def parting(self, stacks: Mapping[int, str]) -> str:
        """Where ranks have parted that stand still, or "": see `drivetrain.launch._desync`. ``stacks`` are theirs."""
        before = self._evidence(stacks)
        if not parting_text(before, world_size=self.world_size):
            return ""
        time.sleep(_STANDSTILL)  # one rank is always a little ahead of another
        now = self._evidence(stacks)
        return (
            parting_text(now, world_size=self.world_size) if [e.last for e in now] == [e.last for e in before] else ""
        )

    def _evidence(self, stacks: Mapping[int, str]) -> list[Evidence]:
        """What the ranks of a job of several have done together."""
        if self.world_size == 1:
            return []
        failures = {f.rank: f for f in self.failures()}
        running = [r.rank for r in self._ranks if r.process.poll() is None]
        found = collect({r.rank: r.error_file for r in self._ranks}, running, seconds=_ANSWER)
        evidence = []
        for r in self._ranks:
            where = _stacks.where_in(stacks.get(r.rank, "")) if r.rank in running else ""
            e = with_end(found[r.rank], failures.get(r.rank) or self._raised(r), where=where)
            evidence.append(replace(e, ended="has ended") if r.process.poll() == 0 else e)
        return evidence

    @property
    def seconds(self) -> float:
        """Seconds since the ranks were started."""
        return time.monotonic() - self._started

    def start(self, environments: Mapping[int, Mapping[str, str]], argv: Sequence[str]) -> None:
        """Start one process per entry of ``environments`` (by global rank). Called again, it starts the next attempt.

        Raises:
            OSError: If the program can't be started; none is left running then.
        """
        self._close_logs()
        self._ranks = []
        self.parted = ""
        self._changed.clear()
        self._started = time.monotonic()
        try:
            for rank, environment in environments.items():
                self.world_size = int(environment.get("WORLD_SIZE", len(environments)))
                self._ranks.append(self._start_one(rank, environment, argv))
        except OSError:
            self.stop(signal.SIGKILL, grace=0)
            raise
        self._starts += 1

    def wait(self, timeout: float) -> bool | None:
        """Wait until a rank ends, at most ``timeout`` seconds.

        Returns:
            True if all have succeeded, False if one has failed, None while neither is the case.
        """
        codes = self._poll()
        if all(code is None or code == 0 for code in codes) and None in codes:
            self._changed.wait(timeout if self._pollable else min(timeout, 0.05))
            self._changed.clear()
            codes = self._poll()
        if any(codes):  # neither None nor 0
            return False
        return None if None in codes else True

    def stop(self, signum: int, *, grace: float, hurry: threading.Event | None = None) -> None:
        """End all that still run: with ``signum``, and with SIGKILL after ``grace`` seconds, or as soon as ``hurry`` is set.

        Once one has ended, the others have `FAILURE_GRACE` seconds: what they wait for will not come.
        """
        running = [r for r in self._ranks if r.process.poll() is None]
        for r in running:
            r.stopped = True
            _signal_group(r.process.pid, signum)
        start = time.monotonic()
        deadline = start + grace
        left = len(running)
        while any(r.process.poll() is None for r in running):
            now = time.monotonic()
            alive = [r for r in running if r.process.poll() is None]
            if len(alive) < left:
                left, deadline = len(alive), min(deadline, now + FAILURE_GRACE)
            if now >= deadline or (hurry is not None and hurry.is_set()):
                break
            if signum == signal.SIGINT and now - start >= INTERRUPT_GRACE:
                signum = signal.SIGTERM
                for r in alive:
                    _signal_group(r.process.pid, signum)
            self._changed.wait(0.05)
            self._changed.clear()
        for r in self._ranks:
            if r in running or r.process.poll():
                _signal_group(r.process.pid, signal.SIGKILL)  # and what a rank has left behind
        for r in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                r.process.wait(10)  # SIGKILL works at once, unless the kernel itself hangs in a driver

    def _raised(self, r: _Rank) -> RankFailure | None:
        """The exception of a rank that is still ending."""
        found = failure(
            rank=r.rank, pid=r.process.pid, returncode=1, ended=time.time(), stopped=False, error_file=r.error_file
        )
        return found if found.traceback else None

    def failures(self) -> list[RankFailure]:
        """How the ranks ended that didn't succeed."""
        found = []
        for r in self._ranks:
            code = r.process.poll()
            if code:
                ended = r.ended or time.time()
                log = self.policy.log_file(r.rank)
                found.append(
                    failure(
                        rank=r.rank,
                        pid=r.process.pid,
                        returncode=code,
                        ended=ended,
                        stopped=r.stopped,
                        error_file=r.error_file,
                        log=log,
                        where=r.where,
                    )
                )
        return found

    def drain(self) -> None:
        """Show all output up to now."""
        self._router.drain()

    def close(self) -> None:
        """Show the rest of the output and let go of everything."""
        self._router.close()
        self._close_logs()
        if self._merged is not None:
            self._merged[1].close()

    def _close_logs(self) -> None:
        for r in self._ranks:
            if r.log is not None:
                r.log.close()

    def _poll(self) -> list[int | None]:
        return [r.process.poll() for r in self._ranks]

    def _start_one(self, rank: int, environment: Mapping[str, str], argv: Sequence[str]) -> _Rank:
        error_file = self._scratch / f"start-{self._starts}-rank-{rank}.json"
        local_rank = int(environment.get("LOCAL_RANK", rank))
        log = self._open_log(rank)
        out, err = (self._source(rank, local_rank, bit, log) for bit in (1, 2))
        if self.world_size > 1:
            prepare(error_file)
        together = out is not None and err is not None and out.writer is err.writer and out.log is err.log
        with bound_to(None if self._shares is None else self._shares[local_rank]):
            process = subprocess.Popen(
                list(argv),
                env={**environment, "TORCHELASTIC_ERROR_FILE": str(error_file)},
                stdin=None if rank == 0 else subprocess.DEVNULL,
                stdout=self.policy.stdout.fd if out is None else subprocess.PIPE,
                stderr=subprocess.STDOUT if together else self.policy.stderr.fd if err is None else subprocess.PIPE,
                start_new_session=True,  # its whole group can be ended, and a terminal's Ctrl-C reaches the launcher alone
            )
        started = _Rank(rank, process, error_file, log)
        for source, stream in ((out, process.stdout), (err, process.stderr)):
            if source is not None and stream is not None:
                self._router.add(os.dup(stream.fileno()), source)
                stream.close()
        self._watch(started)
        return started

    def _open_log(self, rank: int) -> IO[bytes] | None:
        path = self.policy.log_file(rank)
        if path is None:
            return None
        log = path.open("ab" if self._starts else "wb", buffering=0)
        if self._starts:
            log.write(f"--- start {self._starts + 1} ---\n".encode())
        return log

    def _source(self, rank: int, local_rank: int, bit: int, log: IO[bytes] | None) -> Source | None:
        """What becomes of a stream (1 is stdout, 2 is stderr) of a rank; None lets it write to the launcher's own."""
        policy = self.policy
        sink, writer = ((policy.stdout, self._stdout_writer), (policy.stderr, self._stderr_writer))[bit - 1]
        name = policy.name(rank=rank, local_rank=local_rank)
        if log is not None and self._merged is not None:
            written, shown = policy.destinations.of(local_rank=local_rank, rank=rank, bit=bit)
            label = name if policy.label and policy.destinations != Destinations() else b""
            copy = Source(label=name, writer=self._merged[0]) if written else None
            return Source(label=label, writer=writer if shown else None, log=log if written else None, copy=copy)
        label = name if policy.label else b""
        direct = sink.fd is not None and not policy.watched
        if direct and (not label or (rank == 0 and sink.is_terminal)):
            return None
        return Source(label=label, writer=writer)

    def _watch(self, started: _Rank) -> None:
        """Note the moment at which a rank ends: who failed first decides what is reported."""

        def ended() -> None:
            started.ended = time.time()
            self._changed.set()

        open_pidfd: Any = getattr(os, "pidfd_open", None)
        try:
            if open_pidfd is None:
                raise OSError("no pidfd on this system")
            self._router.watch(open_pidfd(started.process.pid), ended)
        except OSError:
            self._pollable = False


def _merged_file(policy: OutputPolicy) -> tuple[LineWriter, IO[bytes]] | None:
    """The file of all ranks' output, with labels."""
    if policy.directory is None:
        return None
    file = (policy.directory / policy.merged).open("wb", buffering=0)
    return LineWriter(Sink(file)), file


def _signal_group(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)
