"""Fixtures for all tests of the repository, and the time that each package's tests took."""

from __future__ import annotations

import collections
import os
import pathlib
import signal

import hypothesis
import pytest

# Before torch is imported: several ranks share the processors, and a process that has run on several threads can't be forked.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell ignores SIGINT in what it starts in the background, and children inherit that: tests of Ctrl-C need it heard.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Property tests try the same examples in each run, so that a change is judged by what it changes; `nox -s full` tries new ones.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None)
hypothesis.settings.register_profile("new", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")

pytest_plugins = ["drivetrain.testing.pytest_plugin"]

_ROOT = pathlib.Path(__file__).parent
_seconds: dict[str, float] = collections.defaultdict(float)


def _package(path: str) -> str:
    """The package that a test file belongs to: core, plugins/ddp, tests/integration. A kit's tests belong to who runs them."""
    parts = pathlib.PurePath(path).parts
    return "/".join(parts[: 1 if parts[0] == "core" else 2])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the time of setup, call and teardown."""
    _seconds[_package(report.nodeid.split("::")[0])] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write the sums above the usual summary."""
    if len(_seconds) > 1 or terminalreporter.config.option.verbose > 0:
        terminalreporter.section("minutes per package")
        for package, seconds in sorted(_seconds.items()):
            terminalreporter.line(f"{seconds / 60:6.2f}  {package}")
