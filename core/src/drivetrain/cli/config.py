"""``drivetrain config``: write, show, check and change a configuration file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.cli._settings import Assignments, problems, resolved_rows
from drivetrain.cli._writing import write_changes
from drivetrain.config.files import DEFAULT_FILE, DEFAULT_FILES, ConfigFile, default_file, read_config_file, read_text
from drivetrain.config.settings import variable
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain._engine.collecting import Sections

__all__ = ["config"]

_DASHES = {"token_normalize_func": lambda token: token.replace("_", "-"), "help_option_names": ["-h", "--help"]}


class _Usage(ConfigurationError):
    """A mistake on the command line or in a file."""

    exit_code = 2


def _sections() -> Sections:
    from drivetrain._engine.collecting import Sections
    from drivetrain._plugins import get_registry

    return Sections(get_registry())


@click.group("config", invoke_without_command=True, context_settings=_DASHES)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=Path(DEFAULT_FILE),
    show_default=True,
    help="The file: TOML, or YAML if its name ends so.",
)
@click.option(
    "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="An answer, as in launch.num_processes=4."
)
@click.option("--yes", "-y", is_flag=True, help="Take what is proposed for all that has no answer.")
@click.option("--force", is_flag=True, help="Overwrite a file that is there.")
@click.pass_context
def config(ctx: click.Context, output: Path, assignments: Sequence[str], yes: bool, force: bool) -> None:
    r"""Write a configuration file from a few questions; answers on the command line aren't asked for.

    Examples:
      drivetrain config
      drivetrain config --yes --set mixed_precision=bf16 --set launch.num_processes=4
    """
    if ctx.invoked_subcommand is not None:
        return
    from drivetrain.cli._wizard import ask

    if output.exists() and not force:
        raise _Usage(
            f"{output} is there already: change it with `drivetrain config update`, or overwrite it with --force."
        )
    answers = _parse(assignments)
    if not yes and not sys.stdin.isatty():
        raise _Usage("There is no terminal to ask on: give answers with --set KEY=VALUE, and --yes for all others.")
    complete = ask(answers, propose_only=yes)
    if output.exists():
        output.unlink()
    write_changes(output, complete.values, ())
    click.echo(f"wrote {output}")
    if output.name in DEFAULT_FILES and not output.parent.name:
        click.echo("`drivetrain launch` in this directory takes it by itself; `drivetrain config show` explains it.")
    else:
        click.echo(f"Use it with `drivetrain launch --config-file {output}` or {variable('config_file')}={output}.")


@config.command("show", context_settings=_DASHES)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--all", "everything", is_flag=True, help="Defaults as well.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(file: Path | None, everything: bool, as_json: bool) -> None:
    """Show each setting with its value and where that came from.

    FILE defaults to that of DRIVETRAIN_CONFIG_FILE, or else drivetrain.toml (or .yaml) in this directory.
    """
    found = _file(file)
    sections = _sections()
    rows = [r for r in resolved_rows(sections, found, os.environ) if everything or r["origin"] != "default"]
    notes = list(found.unknown_sections(sections.names()))
    if as_json:
        click.echo(json.dumps({"file": found.path, "settings": rows, "notes": notes}, indent=2))
        return
    width = max((len(row["key"]) for row in rows), default=0)
    for row in rows:
        click.echo(f"{row['key']:<{width}}  {json.dumps(row['value'])}  ({row['origin']})")
    if not rows:
        click.echo("Everything is at its default; --all shows them.")
    for note in notes:
        click.echo(note, err=True)


@config.command("check", context_settings=_DASHES)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.pass_context
def check(ctx: click.Context, file: Path | None) -> None:
    """Find what is wrong with a configuration file: every unknown key and wrong value, with its line.

    Sections of plugins that aren't installed here are named, and no error.
    """
    file = file or _present()
    wrong, notes = problems(file, _sections())
    for note in notes:
        click.echo(f"note: {note}", err=True)
    for problem in wrong:
        click.echo(problem, err=True)
    if wrong:
        ctx.exit(2)
    click.echo(f"{file}: fine")


@config.command("update", context_settings=_DASHES)
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="A new value, as in ddp.bucket_cap_mb=50."
)
@click.option("--unset", "dropped", multiple=True, metavar="KEY", help="A key to take out.")
def update(file: Path | None, assignments: Sequence[str], dropped: Sequence[str]) -> None:
    """Change values of a configuration file; its order and comments stay."""
    file = file or _present()
    if not file.is_file():
        raise _Usage(f"There is no file {file}: `drivetrain config` writes one.")
    if not assignments and not dropped:
        raise _Usage("Nothing to change: give --set KEY=VALUE or --unset KEY.")
    given = _parse(assignments)
    try:
        write_changes(file, given.values, [Assignments.key(name) for name in dropped])
    except ConfigurationError as error:
        raise _Usage(str(error)) from None
    wrong, _ = problems(file, _sections())
    for problem in wrong:
        click.echo(f"still wrong: {problem}", err=True)
    click.echo(f"wrote {file}")


@config.command("convert", context_settings=_DASHES)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("drivetrain.yaml"),
    show_default=True,
    help="The new file.",
)
@click.option("--force", is_flag=True, help="Overwrite a file that is there.")
def convert(file: Path, output: Path, force: bool) -> None:
    """Write the settings of one of Accelerate's configuration files as one of Drivetrain's, and name what has no counterpart."""
    from drivetrain.cli import _converting

    if output.exists() and not force:
        raise _Usage(f"{output} is there already: name another with --output, or overwrite it with --force.")
    try:
        found = _converting.convert(read_text(file, said_by="drivetrain config convert"), file, _sections())
        if output.exists():
            output.unlink()
        write_changes(output, found.values.values, ())
    except ConfigurationError as error:
        raise _Usage(str(error)) from None
    for sentence in found.left:
        click.echo(sentence, err=True)
    click.echo(f"wrote {output}")


def _parse(words: Sequence[str]) -> Assignments:
    try:
        return Assignments.parse(words, _sections())
    except ConfigurationError as error:
        raise _Usage(str(error)) from None


def _present() -> Path:
    """The file of this directory."""
    try:
        return default_file() or Path(DEFAULT_FILE)
    except ConfigurationError as error:
        raise _Usage(str(error)) from None


def _file(path: Path | None, environ: Mapping[str, str] = os.environ) -> ConfigFile:
    """The file that is meant; an empty one stands for none."""
    name: Any = path or environ.get(variable("config_file"), "").strip() or None
    try:
        name = name or default_file()
        return ConfigFile() if name is None else read_config_file(name)
    except ConfigurationError as error:
        raise _Usage(str(error)) from None
