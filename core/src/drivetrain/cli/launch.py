"""``drivetrain launch``."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from drivetrain.cli._flags import GroupedCommand, GroupedOption, SectionFlags, group_option, setting_flags
from drivetrain.config.files import default_file
from drivetrain.config.settings import CoreSettings, variable
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.launch._decide import Decision

__all__ = ["launch", "run"]

#: Flags by what they are: fields of `LaunchOptions`, core settings, settings of the local launcher.
_LAUNCH = (
    "on",
    "num_processes",
    "num_machines",
    "min_machines",
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
_LOCAL = (
    "rdzv_backend",
    "rdzv_id",
    "rdzv_conf",
    "local_addr",
    "role",
    "shutdown_timeout",
    "tee",
    "redirects",
    "cpu_binding",
    "hang_timeout",
    "lookup_timeout",
    "stopped_exit_code",
)


class _Usage(ConfigurationError):
    """A mistake in the command line or in what it refers to."""

    exit_code = 2


class _LaunchCommand(GroupedCommand):
    """The command, with the flags of the sections that its words speak of."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Find out which sections are spoken of, then parse."""
        ctx.meta[_MENTIONED] = _section_flags().mentioned(args)
        return super().parse_args(ctx, args)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The fixed flags, then those of sections: of all where no words have been seen."""
        sections = _section_flags()
        mentioned = ctx.meta.get(_MENTIONED, sections.names)
        *rest, helping = super().get_params(ctx)
        return [*rest, *_core_flags(), *_use_flags(), *sections.flags(mentioned), helping]


_MENTIONED = "drivetrain.cli.launch.sections"
_USE = "backend_by_use_"


@functools.cache
def _core_flags() -> list[GroupedOption]:
    """Flags of core settings that have no handwritten one."""
    names = [name for name in CoreSettings.hints() if name not in _CORE]
    return setting_flags(CoreSettings, names=names, group="Training")


def _use_flags() -> list[GroupedOption]:
    """Accelerate's ``--use-NAME`` of each backend that there is or could be: ``--backend NAME``. Not shown by ``--help``."""
    from drivetrain._plugins import get_registry
    from drivetrain._plugins.known import known_plugins

    known = {name for plugin in known_plugins().values() for name in plugin.specs.get("backend", ())}
    names = sorted({*get_registry().specs("backend"), *known})
    return [
        GroupedOption([f"--use-{n}", f"{_USE}{n.replace('-', '_')}"], is_flag=True, hidden=True, group="Training")
        for n in names
    ]


def _section_flags() -> SectionFlags:
    from drivetrain._engine.collecting import Sections
    from drivetrain._plugins import get_registry

    return SectionFlags(Sections(get_registry()), without=("launch", "local"))


class _Machines(click.ParamType[Any]):
    """A number of machines, or MIN:MAX."""

    name = "N|MIN:MAX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int | None, int]:
        if isinstance(value, tuple):
            return value
        low, colon, high = str(value).partition(":")
        numbers: list[Any] = [click.INT(n, param, ctx) for n in ((low, high) if colon else (low,))]
        if len(numbers) == 2 and not 1 <= numbers[0] <= numbers[1]:
            self.fail(f"{value}: give MIN:MAX with 1 <= MIN <= MAX", param, ctx)
        return (numbers[0], numbers[1]) if colon else (None, numbers[0])


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


_SETTINGS = {
    "ignore_unknown_options": False,
    "allow_interspersed_args": False,  # what follows the script belongs to the script
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "max_content_width": 110,
}


@click.command("launch", cls=_LaunchCommand, context_settings=_SETTINGS)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
@group_option("What to run", "-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@group_option("What to run", "--no-python", is_flag=True, help="SCRIPT is a program and not a Python script.")
@group_option("How many", "--num-processes", "-n", type=int, help="Number of processes in all, over all machines.")
@group_option(
    "How many", "--nproc-per-node", metavar="N|auto|gpu|cpu", help="Number of processes per machine (torchrun's)."
)
@group_option(
    "How many", "--num-cpu-threads-per-process", type=int, help="OMP_NUM_THREADS; default: an even share of the cores."
)
@group_option("How many", "--gpu-ids", metavar="IDS|all", help="Which accelerators to use, as in 0,1.")
@group_option(
    "How many", "--multi-gpu", is_flag=True, help="One process per accelerator; an error where there is none."
)
@group_option(
    "How many",
    "--cpu-binding",
    type=click.Choice(["none", "cores", "numa"]),
    help="Give each rank cores of its own, or those of a NUMA node.",
)
@group_option("How many", "--enable-cpu-affinity", is_flag=True, help="As --cpu-binding numa (Accelerate's).")
@group_option("Training", "--cpu/--no-cpu", default=None, help="Use the CPU even where an accelerator is present.")
@group_option("Training", "--mixed-precision", metavar="NAME", help="no, bf16, fp16, or another installed precision.")
@group_option("Training", "--gradient-accumulation-steps", type=int, help="Micro-batches per optimizer step.")
@group_option(
    "Training", "--backend", metavar="NAME", help="How models live across processes; default: what fits best."
)
@group_option("Training", "--dynamo-backend", metavar="NAME", help="Compiler backend of torch.compile.")
@group_option("Training", "--config-file", type=click.Path(), help="Configuration file (TOML or YAML).")
@group_option(
    "Several machines",
    "--num-machines",
    "--nnodes",
    type=_Machines(),
    help="Number of machines; a range makes the job elastic.",
)
@group_option(
    "Several machines", "--min-machines", type=int, help="Start and go on with so many, as in --nnodes MIN:MAX."
)
@group_option("Several machines", "--machine-rank", "--node-rank", type=int, help="Rank of this machine.")
@group_option("Several machines", "--main-process-ip", "--master-addr", metavar="HOST", help="Address of machine 0.")
@group_option(
    "Several machines", "--main-process-port", "--master-port", type=int, help="Port there; on one machine: a free one."
)
@group_option("Several machines", "--rdzv-backend", metavar="NAME", help="How machines meet: static or c10d.")
@group_option(
    "Several machines", "--rdzv-endpoint", metavar="HOST[:PORT]", help="Address and port of machine 0 in one."
)
@group_option("Several machines", "--rdzv-id", metavar="NAME", help="Name of the run, the same on all machines.")
@group_option(
    "Several machines", "--rdzv-conf", metavar="KEY=VALUE,...", callback=_pairs, help="Settings of the rendezvous."
)
@group_option(
    "Several machines", "--local-addr", metavar="HOST", help="The address of this machine that others should use."
)
@group_option(
    "Several machines",
    "--lookup-timeout",
    type=float,
    metavar="SECONDS",
    help="How long machine 0's name may stay unknown.",
)
@group_option("Several machines", "--role", metavar="NAME", help="Role of the ranks (torchrun's).")
@group_option(
    "Several machines", "--standalone", is_flag=True, help="One machine and a free port (torchrun's; the default)."
)
@group_option(
    "Output",
    "--log-dir",
    type=click.Path(),
    help="Write each rank's output to DIR/rank-N.log, and all to DIR/all.log; rank 0 stays visible.",
)
@group_option(
    "Output",
    "--tee",
    "-t",
    metavar="STREAMS",
    help="Which streams are shown as well as written: 0 to 3, or as 0:3,1:2.",
)
@group_option("Output", "--redirects", "-r", metavar="STREAMS", help="Which streams are written and not shown.")
@group_option(
    "Output",
    "--label/--no-label",
    default=None,
    help="Prefix each line with its rank; default: where there are several.",
)
@group_option("Output", "--quiet", "-q", is_flag=True, help="Don't say what was detected.")
@group_option("Failures", "--max-restarts", type=int, help="How often to start all processes again after a failure.")
@group_option(
    "Failures", "--shutdown-timeout", type=float, metavar="SECONDS", help="Time that ranks have to end after a signal."
)
@group_option(
    "Failures",
    "--debug/--no-debug",
    default=None,
    help="Compare every collective of every rank, and show stacks after 300 s of silence: slow.",
)
@group_option(
    "Failures",
    "--hang-timeout",
    type=float,
    metavar="SECONDS",
    help="Show all ranks' stacks after so long without any output.",
)
@group_option(
    "Failures",
    "--stopped-exit-code",
    type=int,
    metavar="CODE",
    help="Exit code when a signal had the ranks save and end early.",
)
@group_option("Launcher", "--on", metavar="NAME", help="Who starts the processes; default: local.")
@group_option("Launcher", "--dry-run", is_flag=True, help="Print what would be run, and run nothing.")
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
    code = run({**given, "sections": SectionFlags.given(given)}, tuple(flags["command"]))
    ctx.exit(code)


def run(given: Mapping[str, Any], words: tuple[str, ...]) -> int:
    """Launch with flags by name, as if they stood on the command line; the exit code.

    Raises:
        DrivetrainError: For what can't be started.
    """
    from drivetrain._plugins import get_registry

    try:
        flags = _plain_flags(given)
        decision = _decide(flags, words)
    except ConfigurationError as error:
        raise _Usage(str(error)) from error
    quiet = given.get("quiet", False)
    if not quiet:
        for reason in [*flags.get("notes", ()), *decision.reasons]:
            click.echo(f"drivetrain: {reason}", err=True)
    launcher = get_registry().load("launcher", decision.launcher.name)(decision.launcher)
    if given.get("dry_run"):
        click.echo(launcher.describe(decision.request))
        return 0
    try:
        return int(launcher.launch(decision.request))
    except ConfigurationError as error:
        raise _Usage(str(error)) from error


def _decide(flags: Mapping[str, Any], words: tuple[str, ...]) -> Decision:
    from drivetrain._engine.availability import detect_devices
    from drivetrain._plugins import get_registry
    from drivetrain.launch._checks import check_command
    from drivetrain.launch._decide import Command, decide
    from drivetrain.launch.options import LaunchOptions

    registry = get_registry()
    command = Command(
        words=words,
        module=flags.get("module", False),
        plain=flags.get("no_python", False),
        per_machine=flags.get("nproc_per_node"),
    )
    decision = decide(
        command,
        LaunchOptions.from_mapping(_part(flags, _LAUNCH)),
        _part(flags, tuple(CoreSettings.hints())),
        _part(flags, _LOCAL),
        flags.get("sections", {}),
        registry=registry,
        environ=os.environ,
        availability=detect_devices(registry.specs("device").values()),
    )
    elsewhere = decision.launcher.own_files
    check_command(command.words, module=command.module, plain=command.plain, elsewhere=elsewhere)
    return decision


def _part(flags: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: flags[name] for name in names if flags.get(name) is not None}


def _plain_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """The flags in Drivetrain's own words alone.

    Raises:
        ConfigurationError: If they contradict each other.
    """
    flags = {**given, **_endpoint(given)}
    machines = flags.get("num_machines")
    if isinstance(machines, tuple):
        low, flags["num_machines"] = machines
        if low is not None:
            flags["min_machines"] = _once(flags, "min_machines", low, "--nnodes MIN:MAX")
    for name in [n for n in flags if n.startswith(_USE) and flags[n]]:
        backend = name.removeprefix(_USE).replace("_", "-")
        flags["backend"] = _once(flags, "backend", backend, f"--use-{backend}")
    if flags.get("enable_cpu_affinity"):
        flags["cpu_binding"] = _once(flags, "cpu_binding", "numa", "--enable-cpu-affinity")
    if flags.get("multi_gpu") and flags.get("num_processes") is None:
        flags["nproc_per_node"] = _once(flags, "nproc_per_node", "gpu", "--multi-gpu")
    if "config_file" not in flags and not os.environ.get(variable("config_file"), "").strip():
        found = default_file()
        if found is not None:
            flags["config_file"] = str(found)
            flags["notes"] = [f"settings of {found} in this directory count (--config-file names another)."]
    return flags


def _once(flags: Mapping[str, Any], name: str, value: Any, said_by: str) -> Any:
    other = flags.get(name)
    if other is not None and other != value:
        raise ConfigurationError(
            f"{said_by} and --{name.replace('_', '-')} {other} contradict each other. Give one of them."
        )
    return value


def _endpoint(given: Mapping[str, Any]) -> dict[str, Any]:
    """What ``--rdzv-endpoint`` and ``--standalone`` stand for.

    Raises:
        ConfigurationError: If they contradict other flags.
    """
    machines = given.get("num_machines", 1)
    several = (machines[1] if isinstance(machines, tuple) else machines) > 1
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
