"""What one switch (``TrackingOptions(run_facts=True)``) logs besides the user's values: configuration, environment, code, plan, memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.tracking.redaction import Redactor

if TYPE_CHECKING:
    from drivetrain.accelerator import Accelerator

__all__ = ["git_facts", "log_run_facts", "memory_facts"]


def log_run_facts(accelerator: Accelerator) -> None:
    """Log what the run is: settings and versions as configuration below ``drivetrain/``, the plan and the environment as texts."""
    from drivetrain._engine.availability import detect_devices
    from drivetrain.cli.env import as_text, describe_environment

    registry, plan, hub = accelerator._parts.registry, accelerator.plan, accelerator._hub
    settings = {name: fact["value"] for name, fact in plan.to_dict()["settings"].items()}
    chosen = {choice.kind: choice.name for choice in plan.choices}
    environment = describe_environment(
        environ=os.environ,
        plugins=registry.records,
        clusters=registry.specs("cluster").values(),
        availability=detect_devices(registry.specs("device").values()),
        config_file=plan.settings.config_file,
    )
    facts: dict[str, Any] = {"settings": settings, "chosen": chosen, "num_processes": plan.process.world_size}
    hub.log_config({"drivetrain": {**facts, "packages": environment["packages"], "git": git_facts()}})
    hub.log_text("drivetrain/explain", accelerator.explain())
    hub.log_text("drivetrain/environment", as_text(environment))


def memory_facts(accelerator: Accelerator) -> dict[str, int]:
    """Bytes that this process holds in main memory, and on its device where that can be known.

    Example:
        >>> from drivetrain import Accelerator
        >>> memory_facts(Accelerator(cpu=True))["memory/process_rss"] > 0
        True
    """
    import psutil

    device = {f"memory/device_{name}": value for name, value in accelerator._parts.device.memory_stats().items()}
    return {"memory/process_rss": psutil.Process().memory_info().rss, **device}


def git_facts(directory: Path | None = None) -> dict[str, Any]:
    """Commit, branch, address and whether there are changes, of the repository that the script is in; empty without git or a repository.

    Example:
        >>> git_facts(Path("/"))
        {}
    """
    if directory is None:
        script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path("here")
        directory = script.absolute().parent if script.is_file() else Path.cwd()

    def ask(*arguments: str) -> str | None:
        try:
            answer = subprocess.run(
                ["git", *arguments], cwd=directory, capture_output=True, text=True, timeout=5, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    if not commit:
        return {}
    changes = ask("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": commit,
        "branch": ask("rev-parse", "--abbrev-ref", "HEAD"),
        "remote": Redactor().text(ask("remote", "get-url", "origin") or "") or None,
        "changed": None if changes is None else bool(changes),
    }
