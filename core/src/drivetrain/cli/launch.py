"""``drivetrain launch``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.launch._decide import Decision

__all__ = ["launch", "run"]

F = TypeVar("F", bound=Callable[..., Any])

#: Flags by what they are: fields of `LaunchOptions`, core settings, settings of the local launcher.
_LAUNCH = (
    "on",
    "num_processes",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "max_restarts",
    "log_dir",
    "label",
    "num_cpu_threads_per_process",
    "gpu_ids",
)
_CORE = (
    "cpu",
    "mixed_precision",
    "gradient_accumulation_steps",
    "backend",
    "dynamo_backend",
    "config_file",
    "debug",
)
_LOCAL = ("rdzv_backend", "rdzv_id", "rdzv_conf", "local_addr", "role", "shutdown_timeout")


class _Usage(ConfigurationError):
    """A mistake in the command line or in what it refers to."""

    exit_code = 2


class _Option(click.Option):
    """An option under a heading of ``--help``."""

    def __init__(self, *args: Any, group: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


class _GroupedCommand(click.Command):
    """A command whose help lists its options under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, those without a heading last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                groups.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        groups["Other"] = groups.pop("Other", [])
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)


class _Machines(click.ParamType[int]):
    """A number of machines; torchrun's MIN:MAX is named for what it is."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, str) and ":" in value:
            low, _, high = value.partition(":")
            if low != high:
                self.fail(f"{value}: a range of machines (elastic) can't be launched yet; give one number", param, ctx)
            value = low
        return int(click.INT.convert(value, param, ctx))


def _pairs(ctx: click.Context, param: click.Parameter, value: str | None) -> Mapping[str, Any] | None:
    """``timeout=60,read_timeout=5`` as a mapping."""
    if not value:
        return None
    pairs = {}
    for part in value.split(","):
        key, equals, text = part.partition("=")
        if not equals:
            raise click.BadParameter(f"{part!r} isn't KEY=VALUE", ctx, param)
        pairs[key.strip()] = int(text) if text.strip().lstrip("-").isdigit() else text.strip()
    return pairs


def _option(group: str, *names: str, **kwargs: Any) -> Callable[[F], F]:
    return click.option(*names, cls=_Option, group=group, **kwargs)


_SETTINGS = {
    "ignore_unknown_options": False,
    "allow_interspersed_args": False,  # what follows the script belongs to the script
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 110,
}


@click.command("launch", cls=_GroupedCommand, context_settings=_SETTINGS)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
@_option("What to run", "-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@_option("What to run", "--no-python", is_flag=True, help="SCRIPT is a program and not a Python script.")
@_option("How many", "--num-processes", "-n", type=int, help="Number of processes in all, over all machines.")
@_option("How many", "--nproc-per-node", metavar="N|auto|gpu|cpu", help="Number of processes per machine (torchrun's).")
@_option(
    "How many", "--num-cpu-threads-per-process", type=int, help="OMP_NUM_THREADS; default: an even share of the cores."
)
@_option("How many", "--gpu-ids", metavar="IDS|all", help="Which accelerators to use, as in 0,1.")
@_option("Training", "--cpu/--no-cpu", default=None, help="Use the CPU even where an accelerator is present.")
@_option("Training", "--mixed-precision", metavar="NAME", help="no, bf16, fp16, or another installed precision.")
@_option("Training", "--gradient-accumulation-steps", type=int, help="Micro-batches per optimizer step.")
@_option("Training", "--backend", metavar="NAME", help="How models live across processes; default: what fits best.")
@_option("Training", "--dynamo-backend", metavar="NAME", help="Compiler backend of torch.compile.")
@_option("Training", "--config-file", type=click.Path(), help="Configuration file (TOML).")
@_option("Several machines", "--num-machines", "--nnodes", type=_Machines(), help="Number of machines.")
@_option("Several machines", "--machine-rank", "--node-rank", type=int, help="Rank of this machine.")
@_option("Several machines", "--main-process-ip", "--master-addr", metavar="HOST", help="Address of machine 0.")
@_option(
    "Several machines", "--main-process-port", "--master-port", type=int, help="Port there; on one machine: a free one."
)
@_option("Several machines", "--rdzv-backend", metavar="NAME", help="How machines meet: static or c10d.")
@_option("Several machines", "--rdzv-endpoint", metavar="HOST[:PORT]", help="Address and port of machine 0 in one.")
@_option("Several machines", "--rdzv-id", metavar="NAME", help="Name of the run, the same on all machines.")
@_option(
    "Several machines", "--rdzv-conf", metavar="KEY=VALUE,...", callback=_pairs, help="Settings of the rendezvous."
)
@_option("Several machines", "--local-addr", metavar="HOST", help="The address of this machine that others should use.")
@_option("Several machines", "--role", metavar="NAME", help="Role of the ranks (torchrun's).")
@_option(
    "Several machines", "--standalone", is_flag=True, help="One machine and a free port (torchrun's; the default)."
)
@_option(
    "Output", "--log-dir", type=click.Path(), help="Write each rank's output to DIR/rank-N.log; rank 0 stays visible."
)
@_option(
    "Output",
    "--label/--no-label",
    default=None,
    help="Prefix each line with its rank; default: where there are several.",
)
@_option("Output", "--quiet", "-q", is_flag=True, help="Don't say what was detected.")
@_option("Failures", "--max-restarts", type=int, help="How often to start all processes again after a failure.")
@_option(
    "Failures", "--shutdown-timeout", type=float, metavar="SECONDS", help="Time that ranks have to end after a signal."
)
@_option(
    "Failures", "--debug/--no-debug", default=None, help="Have torch compare every collective of every rank: slow."
)
@_option("Launcher", "--on", metavar="NAME", help="Who starts the processes; default: local.")
@_option("Launcher", "--dry-run", is_flag=True, help="Print what would be run, and run nothing.")
@click.pass_context
def launch(ctx: click.Context, /, **flags: Any) -> None:
    r"""Start a training script on one or many processes.

    Options stand before SCRIPT; what follows it goes to the script untouched. A hyphen and an underscore are the same. The default
    number of processes is one for each accelerator found, or one on the CPU.

    
    Examples:
      drivetrain launch train.py --lr 0.1
      drivetrain launch --cpu --num-processes 2 train.py
      drivetrain launch --num-processes 16 --num-machines 2 --machine-rank 0 \
          --main-process-ip 10.0.0.7 --main-process-port 29500 train.py
    """
    if not flags["command"]:
        raise click.UsageError("Give a script to run: drivetrain launch train.py", ctx)
    given = {
        name: value for name, value in flags.items() if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    code = run(given, tuple(flags["command"]))
    ctx.exit(code)


def run(given: Mapping[str, Any], words: tuple[str, ...]) -> int:
    """Launch with flags by name, as if they stood on the command line; the exit code.

    Raises:
        DrivetrainError: For what can't be started.
    """
    from drivetrain._plugins import get_registry

    decision = _decide(given, words)
    quiet = given.get("quiet", False)
    if not quiet:
        for reason in decision.reasons:
            click.echo(f"drivetrain: {reason}", err=True)
    launcher = get_registry().load("launcher", decision.launcher.name)(decision.launcher)
    if given.get("dry_run"):
        click.echo(launcher.describe(decision.request))
        return 0
    try:
        return int(launcher.launch(decision.request))
    except ConfigurationError as error:
        raise _Usage(str(error)) from error


def _decide(given: Mapping[str, Any], words: tuple[str, ...]) -> Decision:
    from drivetrain._engine.availability import detect_devices
    from drivetrain._plugins import get_registry
    from drivetrain.launch._checks import check_command
    from drivetrain.launch._decide import Command, decide
    from drivetrain.launch.options import LaunchOptions

    registry = get_registry()
    try:
        flags = {**given, **_endpoint(given)}
        command = Command(
            words=words,
            module=flags.get("module", False),
            plain=flags.get("no_python", False),
            per_machine=flags.get("nproc_per_node"),
        )
        check_command(command.words, module=command.module, plain=command.plain)
        return decide(
            command,
            LaunchOptions.from_mapping(_part(flags, _LAUNCH)),
            _part(flags, _CORE),
            _part(flags, _LOCAL),
            registry=registry,
            environ=os.environ,
            availability=detect_devices(registry.specs("device").values()),
        )
    except ConfigurationError as error:
        raise _Usage(str(error)) from error


def _part(flags: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: flags[name] for name in names if flags.get(name) is not None}


def _endpoint(given: Mapping[str, Any]) -> dict[str, Any]:
    """What ``--rdzv-endpoint`` and ``--standalone`` stand for.

    Raises:
        ConfigurationError: If they contradict other flags.
    """
    several = given.get("num_machines", 1) > 1
    if given.get("standalone"):
        if several or "rdzv_endpoint" in given or "main_process_ip" in given:
            raise ConfigurationError("--standalone means one machine; leave it out to launch on several.")
        return {}
    endpoint = given.get("rdzv_endpoint")
    if endpoint is None:
        return {}
    for other, flag in (("main_process_ip", "--main-process-ip"), ("main_process_port", "--main-process-port")):
        if other in given:
            raise ConfigurationError(f"--rdzv-endpoint and {flag} say the same thing. Give one of them.")
    host, colon, port = endpoint.rpartition(":")
    if colon and not port.isdigit():
        raise ConfigurationError(f"--rdzv-endpoint {endpoint}: give HOST:PORT.")
    found: dict[str, Any] = {"main_process_ip": host if colon else endpoint}
    if colon:
        found["main_process_port"] = int(port)
    return found
