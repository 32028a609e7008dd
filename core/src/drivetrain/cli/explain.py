"""``drivetrain explain``: what would be chosen here, and why."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from drivetrain.config.settings import CoreSettings
from drivetrain.specs import ProcessInfo

if TYPE_CHECKING:
    from drivetrain._engine.availability import Availability
    from drivetrain._engine.plan import CatalogView, PreparePlan

__all__ = ["explain", "make_plan"]

_HELP = {
    "backend": "Name of a backend, or auto.",
    "device": "Name of a device, or auto.",
    "cpu": "Use the CPU.",
    "mixed_precision": "no, bf16, fp16, or what plugins offer.",
    "gradient_accumulation_steps": "Micro-batches per optimizer step.",
    "log_with": "Trackers, separated by commas.",
    "project_dir": "Directory for checkpoints and logs.",
    "dynamo_backend": "Compiler backend of torch.compile.",
    "config_file": "Configuration file.",
}


def _settings_options(command: Any) -> Any:
    for name in reversed(_HELP):
        flag = f"--{name.replace('_', '-')}"
        if CoreSettings.hints()[name] is bool:
            command = click.option(flag, is_flag=True, default=None, help=_HELP[name])(command)
        else:
            command = click.option(flag, default=None, help=_HELP[name])(command)
    return command


@click.command()
@click.option("--num-processes", type=click.IntRange(min=1), help="As if there were so many processes on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_settings_options
def explain(num_processes: int | None, as_json: bool, **settings: Any) -> None:
    """Show what would be chosen here, what would not, and where each value came from.

    Reads the same variables and configuration file as a script; flags stand for the script's arguments.
    """
    from drivetrain._engine.availability import detect_devices
    from drivetrain._plugins import get_registry

    registry = get_registry()
    availability = detect_devices(registry.specs("device").values())
    plan = make_plan(
        settings, num_processes=num_processes, registry=registry, environ=os.environ, availability=availability
    )
    if as_json:
        click.echo(json.dumps(plan.to_dict(), indent=2))
    elif sys.stdout.isatty():
        _print_tables(plan)
    else:
        from drivetrain._engine.report import plan_text

        click.echo(plan_text(plan))


def make_plan(
    settings: Mapping[str, Any],
    *,
    num_processes: int | None,
    registry: CatalogView,
    environ: Mapping[str, str],
    availability: Availability,
) -> PreparePlan:
    """The plan for settings given as text, in this environment or for so many processes on this machine.

    Args:
        settings: Core settings by name; None where not given.
        num_processes: Number of processes; None for what the environment says.
        registry: What is installed.
        environ: The environment variables.
        availability: Which devices are there.
    """
    from drivetrain._engine.plan import Arguments
    from drivetrain._engine.resolve import resolve

    given = {
        name: CoreSettings.convert(name, value, strict=False) for name, value in settings.items() if value is not None
    }
    process = None
    if num_processes is not None:
        process = ProcessInfo(
            world_size=num_processes,
            local_world_size=num_processes,
            cluster="launch",
            reason=f"--num-processes {num_processes}",
        )
    arguments = Arguments(settings=given, process=process)
    return resolve(arguments, registry=registry, environ=environ, availability=availability)


def _print_tables(plan: PreparePlan) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from drivetrain._engine.report import PARTS, brief_rows

    console = Console()
    rows = list(brief_rows(plan.rows()))
    for part, (title, *columns) in PARTS.items():
        own = [row for row in rows if row.part == part]
        if not own:
            continue
        if not columns:
            console.print(f"[bold]{title}[/bold]")
            grid = Table.grid(padding=(0, 1))
            for row in own:
                grid.add_row("•", escape(row.why))
            console.print(grid)
            continue
        table = Table(*columns, title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
        for row in own:
            cells = (row.name, row.value, row.why) if len(columns) == 3 else (row.name, row.why)
            table.add_row(*(escape(cell) for cell in cells), style="dim" if row.why == "default" else None)
        console.print(table)
        console.print()
