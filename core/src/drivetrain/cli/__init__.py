"""The command line. Commands are named by plugins and imported when they are run, so that ``--help`` stays quick.

Importing this package imports neither torch nor rich.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from drivetrain import __version__
from drivetrain.errors import DrivetrainError, PluginError, PluginNotFoundError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

__all__ = ["Commands", "main"]


def _dashes(token: str) -> str:
    """``--num_processes`` and ``--num-processes`` are the same flag."""
    return token.replace("_", "-")


class Commands(click.Group):
    """A group whose commands are those of the installed plugins.

    Example:
        >>> "name_of_no_command" in main.list_commands(click.Context(main))
        False
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands that aren't hidden, sorted."""
        return [name for name, _ in _summaries()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if there is none of that name."""
        try:
            return _load(cmd_name)
        except PluginNotFoundError:
            return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments start with; the error names the closest one."""
        try:
            return args[0], _load(args[0]), args[1:]
        except PluginNotFoundError as error:
            ctx.fail(str(error))

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by their summaries, importing none of them."""
        rows = _summaries()
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of commands, importing none of them."""
        from click.shell_completion import CompletionItem

        names = [CompletionItem(name, help=text) for name, text in _summaries() if name.startswith(incomplete)]
        return names + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; what the user can act upon is printed as one message, without a traceback."""
        try:
            return super().invoke(ctx)
        except DrivetrainError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"{click.style('error:', fg='red', bold=True)} {error}", err=True, color=ctx.color)
            # LaunchError hands on the exit code of the process that failed.
            ctx.exit(int(getattr(error, "exit_code", None) or 1))


def _load(name: str) -> click.Command:
    from drivetrain._plugins.process import get_registry

    registry = get_registry()
    spec = registry.get("command", _dashes(name))
    command = registry.load("command", spec.name)
    if not isinstance(command, click.Command):
        label = registry.provider("command", spec.name).label
        raise PluginError(f"command {spec.name!r} of {label}: {spec.target!r} is not a click command")
    return command


def _summaries() -> list[tuple[str, str]]:
    from drivetrain._plugins.process import get_registry

    specs = get_registry().specs("command")
    return [(name, spec.summary) for name, spec in specs.items() if not spec.hidden]


@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _dashes})
@click.option("--debug", is_flag=True, envvar="DRIVETRAIN_DEBUG", help="Show the traceback of errors.")
@click.version_option(__version__, prog_name="drivetrain")
@click.pass_context
def main(ctx: click.Context, debug: bool) -> None:
    """Connect a PyTorch script to whatever drives it."""
    if os.environ.get("NO_COLOR"):
        ctx.color = False
