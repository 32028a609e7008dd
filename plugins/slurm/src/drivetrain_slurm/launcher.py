"""Submitting a job, showing its output, and ending it with the launcher."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.errors import ConfigurationError, LaunchError
from drivetrain.interfaces import Launcher, LaunchRequest
from drivetrain_slurm.options import SlurmOptions
from drivetrain_slurm.script import batch_script, output_pattern

__all__ = ["SlurmLauncher"]

#: Seconds between two looks at a job: what the controller of a busy cluster bears.
_POLL = 2.0
_OVER = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED"}
)


class SlurmLauncher(Launcher):
    """Runs a command as a job of SLURM: one task of srun for each rank.

    Args:
        spec: The descriptor.
    """

    def launch(self, request: LaunchRequest) -> int:
        """Submit the job; wait for its end, unless that isn't wanted.

        Returns:
            The job's exit code (128 + n if signal n ended it); 0 after submitting, without waiting.

        Raises:
            LaunchError: If there is no SLURM here, or it refuses the job, in its own words.
        """
        options = _checked(request)
        if shutil.which("sbatch") is None:
            raise LaunchError(
                "There is no sbatch on the PATH: run this on a machine from which jobs of SLURM are submitted."
            )
        if request.log_directory is not None:
            request.log_directory.mkdir(parents=True, exist_ok=True)
        job = _submit(batch_script(request, options))
        pattern = output_pattern(request, options)
        shown = pattern.replace("%j", job).replace("%A", job)
        _say(f"submitted job {job}, output in {shown}")
        if not options.wait:
            return 0
        outputs = [Path(shown)]
        if request.log_directory is not None:
            outputs.append(request.log_directory / "rank-0.log")
        return _Watch(job, outputs, label=request.label_output and request.num_processes > 1).run()

    def describe(self, request: LaunchRequest) -> str:
        """The batch script, for ``sbatch``."""
        return batch_script(request, _checked(request)).rstrip("\n")


def _checked(request: LaunchRequest) -> SlurmOptions:
    options = SlurmOptions.from_mapping(request.options)
    options.validate()
    given = [
        name
        for name, value in (
            ("main_process_ip", request.main_process_ip),
            ("main_process_port", request.main_process_port),
            ("machine_rank", request.machine_rank or None),
            ("min_machines", request.min_machines),
        )
        if value is not None
    ]
    if given:
        raise ConfigurationError(f"{', '.join(given)}: under SLURM the nodes find each other. Leave it out.")
    if options.array is not None and options.wait:
        raise ConfigurationError("slurm.array makes several jobs, which can't be shown as one: add --no-slurm-wait.")
    return options


def _submit(script: str) -> str:
    answer = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise LaunchError(f"SLURM refused the job: {answer.stderr.strip() or answer.stdout.strip()}")
    return answer.stdout.strip().split(";")[0]


class _Watch:
    """A job that is waited for."""

    def __init__(self, job: str, outputs: Sequence[Path], *, label: bool) -> None:
        self._job = job
        self._outputs = dict.fromkeys(outputs, 0)
        self._label = label
        self._signum = 0
        self._first: tuple[str, int] | None = None

    def run(self) -> int:
        before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: Any) -> None:
        if not self._signum:
            _say(f"cancelling job {self._job}")
            subprocess.run(["scancel", self._job], check=False)
        self._signum = number

    def _wait(self) -> int:
        while True:
            state, code = self._state()
            self._show()
            if state in _OVER:
                break
            time.sleep(_POLL / 4 if self._signum else _POLL)
        time.sleep(0.2)
        self._show()
        if self._signum:
            return 128 + self._signum
        if state == "COMPLETED" and not code:
            return 0
        code = code or 1
        if self._first is not None and state == "FAILED":
            rank, code = self._first  # the others were ended for its sake, and their code may be higher
            _say(f"rank {rank} failed first, with exit code {code}.")
        _say(f"job {self._job} ended as {state} with exit code {code}.")
        return code

    def _state(self) -> tuple[str, int]:
        """The job's state and exit code."""
        answer = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", self._job], capture_output=True, text=True, check=False
        )
        state = re.search(r"\bJobState=(\w+)", answer.stdout)
        code = re.search(r"\bExitCode=(\d+):(\d+)", answer.stdout)
        if state is None:
            if "Invalid job id" in answer.stderr:  # over for so long that the controller has forgotten it
                return "COMPLETED", 0
            return "UNKNOWN", 0  # the controller may be restarting
        number, signum = (int(code[1]), int(code[2])) if code is not None else (0, 0)
        return state[1], 128 + signum if signum else number

    def _show(self) -> None:
        """Print whole lines that have come since the last look."""
        for path, seen in self._outputs.items():
            try:
                with path.open("rb") as file:
                    file.seek(seen)
                    data = file.read()
            except OSError:
                continue
            whole = data.rfind(b"\n") + 1
            self._outputs[path] = seen + whole
            text = data[:whole].decode("utf-8", "replace")
            self._note_failures(text)
            if self._label:
                text = re.sub(r"^ *(\d+): ", r"[rank \1] ", text, flags=re.MULTILINE)
            sys.stdout.write(text)
        sys.stdout.flush()

    def _note_failures(self, text: str) -> None:
        """Srun says who failed in the order in which it saw that; each start of the step counts by itself."""
        for match in re.finditer(
            r"^(?:srun: error: \S+ tasks? ([\d,-]+): Exited with exit code (\d+)|(drivetrain: starting))", text, re.M
        ):
            if match[3]:
                self._first = None
            elif self._first is None:
                self._first = (match[1], int(match[2]))


def _say(text: str) -> None:
    sys.stderr.write(f"drivetrain: {text}\n")
    sys.stderr.flush()
