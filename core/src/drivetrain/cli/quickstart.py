"""``drivetrain quickstart``."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

import click

from drivetrain.errors import ConfigurationError

__all__ = ["quickstart"]

_NAME = "train.py"


class _Exists(ConfigurationError):
    """There is a file of that name already."""

    exit_code = 2


@click.command("quickstart")
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), default=Path(), help="Where to write it; default: here."
)
@click.option("--num-processes", "-n", type=int, default=2, show_default=True, help="Number of processes.")
@click.option("--force", is_flag=True, help="Overwrite a train.py that is there.")
@click.pass_context
def quickstart(ctx: click.Context, /, directory: Path, num_processes: int, force: bool) -> None:
    """Write a small training script and run it on two processes of the CPU."""
    from drivetrain.cli.launch import run

    script = directory / _NAME
    _write(script, force=force)
    shown = f"drivetrain launch --cpu --num-processes {num_processes} {script}"
    click.echo(f"running: {shown}\n", err=True)
    here = Path.cwd()
    os.chdir(directory)
    try:
        code = run({"cpu": True, "num_processes": num_processes}, (_NAME,))
    finally:
        os.chdir(here)
    if code == 0:
        click.echo(
            f"\nNext: go on with 20 epochs in all ({shown} 20), or change {script} and start afresh: remove {directory / 'run'}.\n"
            "Without --cpu it takes the accelerators of this machine; `drivetrain explain` says what would be chosen and why.",
            err=True,
        )
    ctx.exit(code)


def _write(script: Path, *, force: bool) -> None:
    """Write the template, unless that would destroy something.

    Raises:
        ConfigurationError: If another file stands in the way.
    """
    text = files("drivetrain.cli").joinpath("templates", f"{_NAME}.txt").read_text(encoding="utf-8")
    if script.exists() and not force:
        if script.is_file() and script.read_text(encoding="utf-8", errors="replace") == text:
            click.echo(f"{script} is there already", err=True)
            return
        raise _Exists(f"{script} exists, and quickstart won't overwrite it: give another --dir, or --force.")
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(text, encoding="utf-8")
    click.echo(f"wrote {script} ({len(text.splitlines())} lines)", err=True)
