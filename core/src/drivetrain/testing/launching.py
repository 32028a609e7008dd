"""For tests of launchers: run a script's ranks, capture what they print, and look for what is left running."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from drivetrain._lazy import load_target
from drivetrain.interfaces.launcher import LaunchRequest
from drivetrain.specs import LauncherSpec

__all__ = ["LaunchResult", "LaunchRunner", "marked_processes"]


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """What came of a launch.

    Args:
        code: The exit code.
        out, err: What was printed on both streams.
        seconds: How long it took.
    """

    code: int
    out: str
    err: str
    seconds: float

    def lines(self, rank: int) -> list[str]:
        r"""The lines of stdout that bear a rank's label.

        Example:
            >>> LaunchResult(0, "[rank 0] a\n[rank 1] b\n", "", 0.1).lines(1)
            ['b']
        """
        return re.findall(rf"^\[rank {rank}\] (.*)$", self.out, re.MULTILINE)


class LaunchRunner:
    """Launches scripts in this process.

    Args:
        directory: Where scripts are written.
        capture: pytest's ``capfd``.
        spec: The launcher.
    """

    def __init__(self, directory: Path, capture: pytest.CaptureFixture[str], spec: LauncherSpec) -> None:
        self.directory = directory
        self._capture = capture
        self._launcher = load_target(spec.target)(spec)

    def __call__(self, script: str, ranks: int = 1, arguments: tuple[str, ...] = (), **request: Any) -> LaunchResult:
        """Write ``script`` and run it on so many ranks; further keywords are fields of the `LaunchRequest`."""
        path = self.directory / "script.py"
        path.write_text(script)
        return self.command([str(path), *arguments], num_processes=ranks, **request)

    def command(self, command: list[str], **request: Any) -> LaunchResult:
        """Run a command as it stands."""
        self._capture.readouterr()
        start = time.monotonic()
        code = self._launcher.launch(LaunchRequest(command=command, **request))
        seconds = time.monotonic() - start
        captured = self._capture.readouterr()
        return LaunchResult(code, captured.out, captured.err, seconds)


def marked_processes(mark: str, *, within: float = 0.0) -> list[int]:
    """Pids of live processes that have ``mark`` as the value of an environment variable.

    Args:
        mark: The value.
        within: Seconds to wait for them to end: a process that was killed lives on until the system gets to it.

    Example:
        >>> marked_processes("a value that no process has")
        []
    """
    deadline = time.monotonic() + within
    while True:
        found = [process.pid for process in psutil.process_iter() if _has_mark(process, mark)]
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.05)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        zombie = process.status() == psutil.STATUS_ZOMBIE
        return process.pid != os.getpid() and not zombie and mark in process.environ().values()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False
