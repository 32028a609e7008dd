"""``drivetrain tracking``: values that trackers couldn't take."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from drivetrain.errors import DrivetrainError

__all__ = ["tracking"]


@click.group()
def tracking() -> None:
    """Deliver values that were kept on disk because a tracker was down."""


@tracking.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Only list what is there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def sync(ctx: click.Context, run_dir: Path, dry_run: bool, as_json: bool) -> None:
    """Deliver what is kept in RUN_DIR to the trackers that it was logged to.

    RUN_DIR is a project's or logging directory, or one spool file. What is delivered is removed. Exits with 1 if something remains.
    """
    from drivetrain._plugins import get_registry
    from drivetrain.tracking.spool import read_spool
    from drivetrain.tracking.sync import find_spools, sync_spool

    rows, problems = [], []
    for path in find_spools(run_dir):
        try:
            if dry_run:
                header, records = read_spool(path)
                rows.append(
                    {
                        "path": str(path),
                        "tracker": header["tracker"],
                        "run_id": header.get("run_id"),
                        "waiting": len(records),
                    }
                )
            else:
                rows.append({**asdict(sync_spool(path, get_registry())), "path": str(path)})
        except DrivetrainError as error:
            problems.append(str(error))
    if as_json:
        click.echo(json.dumps({"spools": rows, "problems": problems}, indent=2))
    else:
        for row in rows:
            counts = ", ".join(f"{row[k]} {k}" for k in ("waiting", "delivered", "rejected", "remaining") if row.get(k))
            click.echo(
                f"{row['tracker']} (run {row['run_id'] or 'not opened yet'}): {counts or 'nothing'}  {row['path']}"
            )
        for problem in problems:
            click.echo(f"{click.style('not delivered:', fg='red')} {problem}", err=True)
        if not rows and not problems:
            click.echo(f"Nothing is waiting in {run_dir}.")
    if problems or any(row.get("remaining") for row in rows):
        ctx.exit(1)
