"""Starting the processes of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.specs import LauncherSpec

__all__ = ["LaunchRequest", "Launcher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """What is to be started.

    Args:
        command: Script (or module) and its arguments.
        module: ``command[0]`` is a module name (``python -m``).
        plain: ``command[0]`` is an executable and not a Python script.
        num_processes: Number of processes in all, over all machines.
        num_machines: Number of machines; the most, if ``min_machines`` is given.
        min_machines: The fewest machines with which the job may run (it is elastic then); None for exactly ``num_machines``.
        machine_rank: Rank of this machine.
        main_process_ip: Host of the rendezvous; None on one machine.
        main_process_port: Port of the rendezvous; None or 0 for a free one.
        environment: Variables to set in each process, on top of the present ones.
        log_directory: Where each rank's output goes as a file, or None.
        label_output: Prefix each line with its rank.
        max_restarts: How often the group is started again after a failure.
        options: The launcher's own settings.

    Example:
        >>> LaunchRequest(command=["train.py"], num_processes=2).num_machines
        1
    """

    command: Sequence[str]
    module: bool = False
    plain: bool = False
    num_processes: int = 1
    num_machines: int = 1
    min_machines: int | None = None
    machine_rank: int = 0
    main_process_ip: str | None = None
    main_process_port: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    log_directory: Path | None = None
    label_output: bool = True
    max_restarts: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def elastic(self) -> bool:
        """Whether machines may come and go."""
        return self.min_machines is not None


class Launcher:
    """Starts a job and waits for it.

    Args:
        spec: The descriptor.
    """

    def __init__(self, spec: LauncherSpec) -> None:
        self.spec = spec

    def launch(self, request: LaunchRequest) -> int:
        """Run the job to its end and return the exit code to pass on: that of the first process that failed, else 0."""
        raise NotImplementedError

    def describe(self, request: LaunchRequest) -> str:
        """What `launch` would do, as text for a person or a shell (``drivetrain launch --dry-run``). Starts nothing."""
        raise NotImplementedError
