"""``drivetrain verify``: whether a script trains the same on several processes as on one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.errors import ConfigurationError, DrivetrainError

if TYPE_CHECKING:
    from drivetrain.parity.report import Report

__all__ = ["verify"]

_SETTINGS = {
    "ignore_unknown_options": False,
    "allow_interspersed_args": False,  # what follows the script belongs to the script
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 110,
}


class _Usage(ConfigurationError):
    """What was asked for can't be verified."""

    exit_code = 2


@click.command("verify", context_settings=_SETTINGS)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.option("--against", metavar="BACKEND", default="single", show_default=True, help="Backend of the one process.")
@click.option("--backend", metavar="NAME", help="Backend of the several processes; default: what fits best.")
@click.option("--num-processes", "-n", type=click.IntRange(2), default=2, show_default=True, help="How many.")
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Optimizer steps to compare.")
@click.option("--cpu/--no-cpu", default=None, help="Use the CPU even where an accelerator is present.")
@click.option("--mixed-precision", metavar="NAME", help="no, bf16, fp16, or another installed precision.")
@click.option("--config-file", type=click.Path(), help="Configuration file, as for `drivetrain launch`.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of what the script doesn't seed itself.")
@click.option(
    "--timeout",
    type=float,
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="End a process that hangs so long.",
)
@click.option("--keep", type=click.Path(), metavar="DIR", help="Keep the records and the script's output there.")
@click.option("--verbose", "-v", is_flag=True, help="Show the script's output.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_context
def verify(ctx: click.Context, /, command: tuple[str, ...], as_json: bool, keep: str | None, **flags: Any) -> None:
    r"""Prove that a script trains the same on several processes as on one.

    Runs it twice over the same global batches: on several processes, then on one that gets the rows of all of them. Compares samples, the
    output of every module, losses, gradients, learning rates, weights and logged metrics of each step, and names the first step, module and
    tensor where the runs part, with the likely cause. Dropout is switched off; trackers and checkpoints write nothing.

    The exit code is 0 if they agree, 1 if they part, and 2 if they can't be compared.


    Examples:
      drivetrain verify train.py
      drivetrain verify -n 4 --steps 20 train.py --lr 0.1
    """
    if not command:
        raise click.UsageError("Give a script: drivetrain verify train.py", ctx)
    with _folder(keep) as folder:
        report, codes = _compare(folder, command, flags)
    text = json.dumps({**report.to_dict(), "exit_codes": codes}, indent=2) if as_json else report.text()
    click.echo(text)
    failed = [f"the run of {what} ended with exit code {code}" for what, code in codes.items() if code]
    if failed and not as_json:
        click.echo(f"  note: {'; '.join(failed)}; what was recorded until then was compared.")
    if report.parity:
        ctx.exit(2 if failed else 0)
    ctx.exit(1 if report.training.difference is not None or report.metrics else 2)


@contextlib.contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="drivetrain-verify-") as scratch:
            yield Path(scratch)
        return
    folder = Path(keep)
    for part in ("several", "single"):
        shutil.rmtree(folder / part, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def _compare(folder: Path, command: tuple[str, ...], flags: Mapping[str, Any]) -> tuple[Report, dict[str, int]]:
    """Run the script both ways and compare.

    Raises:
        ConfigurationError: For a script that isn't there.
        DrivetrainError: If a run left no record.
    """
    from drivetrain.launch._checks import check_command
    from drivetrain.parity.merging import Run
    from drivetrain.parity.record import read_record
    from drivetrain.parity.report import compare_records

    try:
        check_command(command, module=flags["module"])
    except ConfigurationError as error:
        raise _Usage(str(error)) from error
    codes = {}
    several, single = folder / "several", folder / "single"
    codes["several processes"] = _run(several, command, flags, flags["num_processes"], flags["backend"])
    try:
        run = Run(read_record(several))
    except DrivetrainError as error:
        raise _Usage(
            f"The run of {flags['num_processes']} processes recorded nothing (exit code {codes['several processes']}): it ended before it made an "
            "Accelerator. The script must train with drivetrain.Accelerator."
        ) from error
    if any(event["sharded"] for event in run.first.of("loader")):
        raise _Usage(
            "A data set divides its stream by its own shards, so that each rank reads other rows than one process would: the runs can't be given the same "
            "batches. Verify with DataLoaderConfiguration(dispatch_batches=True)."
        )
    codes["one process"] = _run(single, command, flags, 1, flags["against"], run.layouts)
    try:
        return compare_records(single, several), codes
    except DrivetrainError as error:
        raise _Usage(
            f"The run of one process recorded nothing (exit code {codes['one process']}), while that of several did: {error}"
        ) from error


def _run(
    record: Path,
    command: tuple[str, ...],
    flags: Mapping[str, Any],
    processes: int,
    backend: str | None,
    layouts: list[Mapping[str, Any]] | None = None,
) -> int:
    """Run the script once; the exit code."""
    from drivetrain.cli.launch import run

    order = {
        "directory": str(record),
        "steps": flags["steps"],
        "kind": "module" if flags["module"] else "script",
        "seed": flags["seed"],
        "timeout": flags["timeout"],
        "layouts": layouts,
    }
    runner = str(Path(__file__).parents[1] / "parity" / "_run.py")
    given = {name: flags[name] for name in ("cpu", "mixed_precision", "config_file") if flags[name] is not None}
    given |= {"on": "local", "num_machines": 1, "max_restarts": 0, "num_processes": processes, "quiet": True}
    if backend is not None:
        given["backend"] = backend
    shown = {} if flags["verbose"] else {"log_dir": str(record / "output"), "redirects": "3"}
    click.echo(f"drivetrain: running {command[0]} on {processes} process(es) ...", err=True)
    with _variable("TORCHDYNAMO_DISABLE", "1"):  # hooks on modules would break compiled graphs
        return run({**given, **shown}, (runner, json.dumps(order), *command))


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set a variable for the processes that are started inside, unless it is set."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
