"""``drivetrain rehearse``: a script on many ranks, tried on one CPU without any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from drivetrain.cli._flags import GroupedCommand, SectionFlags, group_option
from drivetrain.errors import ConfigurationError, LaunchError

if TYPE_CHECKING:
    from drivetrain.launch._decide import Decision
    from drivetrain.rehearsal.report import Report

__all__ = ["rehearse"]

_MENTIONED = "drivetrain.cli.rehearse.sections"
_SETTINGS = ("backend", "mixed_precision", "gradient_accumulation_steps", "config_file")


class _RehearseCommand(GroupedCommand):
    """The command, with the flags of the sections that its words speak of."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Find out which sections are spoken of, then parse."""
        ctx.meta[_MENTIONED] = _section_flags().mentioned(args)
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The fixed flags, then those of sections: of all where no words have been seen."""
        sections = _section_flags()
        *rest, helping = super().get_params(ctx)
        return [*rest, *sections.flags(ctx.meta.get(_MENTIONED, sections.names)), helping]


def _section_flags() -> SectionFlags:
    from drivetrain._engine.collecting import Sections
    from drivetrain._plugins import get_registry

    return SectionFlags(Sections(get_registry()), without=("launch", "local"))


#: Bytes of a unit, in lower case and without the final b.
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


class _Bytes(click.ParamType[int]):
    """80GB, 24GiB, 512MB or a number of bytes."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip().lower().removesuffix("b")
        number = text.rstrip("kmgti")
        try:
            return int(float(number) * _UNITS[text[len(number) :].strip()])
        except (KeyError, ValueError):
            self.fail(f"{value}: give a size like 80GB or 24GiB", param, ctx)


@click.command(
    "rehearse",
    cls=_RehearseCommand,
    context_settings={
        "allow_interspersed_args": False,  # what follows the script belongs to the script
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "max_content_width": 110,
    },
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
@group_option("What to run", "-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@group_option(
    "What to run", "--steps", type=click.IntRange(min=1), default=2, help="Optimizer steps to make.", show_default=True
)
@group_option(
    "Which job",
    "--world",
    "--num-processes",
    "-n",
    "world",
    type=click.IntRange(min=1),
    required=True,
    help="Number of processes in all.",
)
@group_option("Which job", "--rank", type=click.IntRange(min=0), default=0, help="Which of them.", show_default=True)
@group_option(
    "Which job",
    "--num-machines",
    "--nnodes",
    type=click.IntRange(min=1),
    default=1,
    help="Number of machines.",
    show_default=True,
)
@group_option("Which job", "--device-memory", type=_Bytes(), help="What a device has, as in 80GB: more is a failure.")
@group_option("Training", "--backend", metavar="NAME", help="How models live across processes.")
@group_option("Training", "--mixed-precision", metavar="NAME", help="no, bf16, fp16, or another installed precision.")
@group_option("Training", "--gradient-accumulation-steps", type=int, help="Micro-batches per optimizer step.")
@group_option("Training", "--config-file", type=click.Path(), help="Configuration file (TOML).")
@group_option(
    "Values",
    "--assume",
    type=float,
    metavar="NUMBER",
    help="Take each value that the script reads from the model's tensors to be this, and go on.",
)
@group_option(
    "Output",
    "--json",
    "as_json",
    is_flag=True,
    help="Print JSON, with every message in order; the script's own output goes to stderr.",
)
@click.pass_context
def rehearse(ctx: click.Context, /, **flags: Any) -> None:
    r"""Try a script as one rank of a large job, on this machine's CPU and without the job's memory.

    The script runs as it is, with torch's fake process group and with tensors that have shapes and no values. Printed are the memory that a rank
    needs, what it sends in each step and from which lines, and the first error. Nothing is written: no checkpoint, no tracker, no file.


    Examples:
      drivetrain rehearse --world 64 --device-memory 80GB train.py --batch-size 4
      drivetrain rehearse --world 8 --assume 1.0 --json train.py
    """
    if not flags["command"]:
        raise click.UsageError("Give a script to rehearse: drivetrain rehearse --world 64 train.py", ctx)
    given = {n: v for n, v in flags.items() if ctx.get_parameter_source(n) is ParameterSource.COMMANDLINE}
    decision = _decide(flags, {n: given[n] for n in _SETTINGS if n in given}, SectionFlags.given(given))
    report = _run(decision, flags)
    failures = _verdict(report, flags["device_memory"])
    if flags["as_json"]:
        click.echo(
            json.dumps({**report.to_dict(), "device_memory": flags["device_memory"], "fits": not failures}, indent=2)
        )
    else:
        from drivetrain.cli._rehearsal_tables import print_report

        print_report(report, device_memory=flags["device_memory"])
    for failure in failures:
        click.echo(f"drivetrain: {failure}", err=True)
    ctx.exit(1 if failures else 0)


def _decide(
    flags: Mapping[str, Any], settings: Mapping[str, Any], sections: Mapping[str, Mapping[str, str]]
) -> Decision:
    """The same decision as for a launch of so many processes on the CPU."""
    from drivetrain._engine.availability import detect_devices
    from drivetrain._plugins import get_registry
    from drivetrain.launch._checks import check_command
    from drivetrain.launch._decide import Command, decide
    from drivetrain.launch.options import LaunchOptions

    if flags["rank"] >= flags["world"]:
        raise ConfigurationError(f"--rank {flags['rank']}: ranks go from 0 to {flags['world'] - 1}.")
    if flags["world"] % flags["num_machines"]:
        raise ConfigurationError(
            f"--world {flags['world']} can't be divided over --num-machines {flags['num_machines']}."
        )
    command = Command(words=flags["command"], module=flags["module"])
    check_command(command.words, module=command.module, plain=False)
    registry = get_registry()
    return decide(
        command,
        LaunchOptions(num_processes=flags["world"]),
        {**settings, "cpu": True},
        None,
        sections,
        registry=registry,
        environ=os.environ,
        availability=detect_devices(registry.specs("device").values()),
    )


def _run(decision: Decision, flags: Mapping[str, Any]) -> Report:
    from drivetrain.launch._environment import base_environment, rank_environment
    from drivetrain.rehearsal.report import Report

    world, rank, local = flags["world"], flags["rank"], flags["world"] // flags["num_machines"]
    environment = {
        **base_environment(os.environ, decision.request.environment, local_world_size=1),
        **rank_environment(
            rank=rank,
            world_size=world,
            local_rank=rank % local,
            local_world_size=local,
            master_addr="127.0.0.1",
            master_port=29500,  # nobody is there, and nobody asks
        ),
        "GROUP_RANK": str(rank // local),
    }
    settings = {"rank": rank, "world_size": world, "steps": flags["steps"], "assume": flags["assume"]}
    with tempfile.TemporaryDirectory(prefix="drivetrain-rehearsal-") as folder:
        result = Path(folder) / "report.json"
        words = [str(result), json.dumps(settings), "module" if flags["module"] else "script", *flags["command"]]
        done = subprocess.run(
            [sys.executable, "-u", "-m", "drivetrain.rehearsal._child", *words],
            env=environment,
            stdout=sys.stderr if flags["as_json"] else None,
            check=False,
        )
        if not result.is_file():
            raise LaunchError(
                f"The rehearsal ended with exit code {done.returncode} and without a result; its output is above."
            )
        return Report.from_dict(json.loads(result.read_text(encoding="utf-8")))


def _verdict(report: Report, device_memory: int | None) -> list[str]:
    """Why the job would fail; empty where nothing speaks against it."""
    found = []
    if report.failure is not None:
        where = f" at {report.failure.where}" if report.failure.where else ""
        found.append(f"the script failed{where}: {report.failure.type}: {report.failure.message}")
    if device_memory is not None and report.peak > device_memory:
        found.append(
            f"rank {report.rank} needs {report.peak / 1e9:.2f} GB at its peak, and a device has {device_memory / 1e9:.2f} GB. Shard over more "
            "processes, compute activations again (ActivationCheckpointing), or take smaller batches."
        )
    return found
