"""``drivetrain test``: whether this installation trains rightly, as it is configured."""

from __future__ import annotations

from pathlib import Path

import click

__all__ = ["test"]


@click.command(
    "test",
    context_settings={"token_normalize_func": lambda t: t.replace("_", "-"), "help_option_names": ["-h", "--help"]},
)
@click.option("--config-file", type=click.Path(), help="Configuration file, as for `drivetrain launch`.")
@click.option("--num-processes", "-n", type=int, help="Number of processes; default: as `drivetrain launch` chooses.")
@click.option("--cpu/--no-cpu", default=None, help="Use the CPU even where an accelerator is present.")
@click.option("--mixed-precision", metavar="NAME", help="no, bf16, fp16, or another installed precision.")
@click.option("--backend", metavar="NAME", help="How models live across processes.")
@click.pass_context
def test(ctx: click.Context, /, **flags: str | int | bool | None) -> None:
    """Try the installation: do processes reach each other, do they train what one process would, does a checkpoint bring everything back?

    Takes the same configuration as `drivetrain launch`. The exit code is 0 if all is well.
    """
    from drivetrain.cli.launch import run

    given = {name: value for name, value in flags.items() if value is not None}
    script = Path(__file__).parents[1] / "launch" / "_selftest.py"
    code = run({**given, "label": False}, (str(script),))
    if code:
        click.echo(
            "\nNot all is well: the last check above is the one that failed. `drivetrain explain` says what was chosen and why; "
            "`drivetrain env` prints what a bug report needs.",
            err=True,
        )
    ctx.exit(code)
