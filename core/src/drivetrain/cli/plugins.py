"""``drivetrain plugins``: what is installed, what it offers and, if it is broken, why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from drivetrain._plugins.process import get_registry
from drivetrain._plugins.record import KINDS
from drivetrain.cli import _plugin_text as text

__all__ = ["plugins"]

_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_kind_option = click.option("--kind", type=click.Choice(list(KINDS)), help="Only plugins that offer this kind.")


@click.group(invoke_without_command=True)
@_json_option
@_kind_option
@click.pass_context
def plugins(ctx: click.Context, as_json: bool, kind: str | None) -> None:
    """List the installed plugins, show one, or check one."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_plugins, as_json=as_json, kind=kind)
    elif as_json or kind:
        raise click.UsageError(f"options come after the subcommand: drivetrain plugins {ctx.invoked_subcommand} ...")


@plugins.command("list")
@_json_option
@_kind_option
def list_plugins(as_json: bool, kind: str | None) -> None:
    """List all plugins with status, version, distribution and what they offer."""
    registry = get_registry()
    records = [record for record in registry.records if kind is None or text.may_offer(record, kind)]
    if as_json:
        text.print_json([text.to_dict(record, kind) for record in records])
        return
    for warning in registry.warnings:
        click.echo(f"{click.style('warning:', fg='yellow')} {warning}", err=True)
    click.echo("\n".join([*text.table(records, kind), *text.available(registry.records, kind)]))


def _named(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("name")(_json_option(command))


@plugins.command()
@_named
def show(name: str, as_json: bool) -> None:
    """Show all that is known about a plugin.

    NAME is the plugin's, its distribution's, or that of anything it offers.
    """
    records = text.find(get_registry(), name)
    if as_json:
        text.print_json([text.to_dict(record) for record in records])
    else:
        click.echo("\n\n".join("\n".join(text.details(record)) for record in records))


@plugins.command()
@_named
@click.pass_context
def check(ctx: click.Context, name: str, as_json: bool) -> None:
    """Load all that a plugin names, and check it.

    Exits with 1 and says why if anything is wrong.
    """
    from drivetrain._plugins.check import check_plugin

    registry = get_registry()
    results = [(record, check_plugin(registry, record)) for record in text.find(registry, name)]
    if as_json:
        text.print_json(
            [
                {"name": record.name, "distribution": record.distribution, "ok": not problems, "problems": problems}
                for record, problems in results
            ]
        )
    else:
        click.echo("\n".join(line for record, problems in results for line in text.verdict(record, problems)))
    if any(problems for _, problems in results):
        ctx.exit(1)
