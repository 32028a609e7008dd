"""The plugin that comes with core: one device, four precisions, and what every installation needs."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain._builtin.clusters import CLUSTERS
from drivetrain._builtin.devices import DEVICES
from drivetrain.hookspecs import hookimpl
from drivetrain.specs import (
    BackendSpec,
    Capability,
    CheckpointFormatSpec,
    ClusterSpec,
    CommandSpec,
    DataShardingSpec,
    Detection,
    DeviceSpec,
    LauncherSpec,
    PrecisionSpec,
    Request,
    Score,
    ShardingPlannerSpec,
    TrackerSpec,
)

DRIVETRAIN_API = 1

_COMMANDS = {
    "plugins": "List, show and check installed plugins.",
    "explain": "Show what would be chosen here, and why.",
    "checkpoint": "List, look into, check, export, compare and convert checkpoints.",
    "config": "Write, show, check and change a configuration file.",
    "env": "Print what a bug report needs.",
    "launch": "Start a training script on one or many processes.",
    "plan": "Predict memory and time of a training, and choose how to divide it.",
    "test": "Try the installation: processes, training, checkpoints.",
    "quickstart": "Write a small training script and run it on two processes.",
    "tracking": "Deliver values that were kept because a tracker was down.",
}
_COMMAND_OPTIONS = {"launch": "drivetrain.launch.options:LaunchOptions"}


@hookimpl
def drivetrain_register_devices() -> Iterable[DeviceSpec]:
    """The CPU and the accelerators that torch knows."""
    return DEVICES


@hookimpl
def drivetrain_register_clusters() -> Iterable[ClusterSpec]:
    """RANK-style variables, MPI flavours, a plain process."""
    return CLUSTERS


@hookimpl
def drivetrain_register_backends() -> Iterable[BackendSpec]:
    """One process on one device."""
    return [
        BackendSpec(
            name="single",
            summary="one process on one device",
            target="drivetrain._builtin.single:SingleBackend",
            capabilities=frozenset(
                {
                    Capability.NO_SYNC,
                    Capability.UNEVEN_INPUTS,
                    Capability.MID_WINDOW_STATE,
                    Capability.MULTIPLE_MODELS,
                    Capability.COMPILE,
                    Capability.CLIP_VALUE,
                    Capability.ITEM_WEIGHTS,
                }
            ),
        )
    ]


@hookimpl
def drivetrain_detect_backend(request: Request) -> Iterable[Detection] | None:
    """The single device, when there is one process and nothing better."""
    if request.process.is_distributed:
        return None
    return [Detection("single", Score.FALLBACK, "one process")]


@hookimpl
def drivetrain_register_precisions() -> Iterable[PrecisionSpec]:
    """Full, bf16, fp16 and pure bf16."""
    home = "drivetrain._builtin.precision"
    return [
        PrecisionSpec(
            name="fp32", summary="full precision", target=f"{home}:FullPrecision", aliases=("no",), dtypes=("float32",)
        ),
        PrecisionSpec(
            name="bf16", summary="bfloat16 autocast", target=f"{home}:BFloat16", dtypes=("float32", "bfloat16")
        ),
        PrecisionSpec(
            name="fp16",
            summary="float16 autocast with loss scaling",
            target=f"{home}:Float16",
            dtypes=("float32", "float16"),
        ),
        PrecisionSpec(
            name="pure-bf16",
            summary="bfloat16 weights and gradients, steps in float32",
            target="drivetrain._builtin.pure_bf16:PureBFloat16",
            options="drivetrain.config.handlers:PureBF16Kwargs",
            exports=("PureBF16Kwargs",),
            dtypes=("float32", "bfloat16"),
        ),
    ]


@hookimpl
def drivetrain_register_trackers() -> Iterable[TrackerSpec]:
    """JSON lines."""
    return [
        TrackerSpec(
            name="jsonl",
            summary="JSON lines and files in the logging directory; needs nothing",
            target="drivetrain._builtin.jsonl:JsonlTracker",
            options="drivetrain._builtin.jsonl:JsonlOptions",
            needs_directory=True,
            kinds=frozenset({"config", "images", "figure", "table", "histogram", "text", "artifact", "summary"}),
        )
    ]


@hookimpl
def drivetrain_register_checkpoint_formats() -> Iterable[CheckpointFormatSpec]:
    """Safetensors files."""
    return [
        CheckpointFormatSpec(
            name="safetensors",
            summary="safetensors files: no code in them, memory-mapped reads",
            target="drivetrain.checkpoint.safetensors_format:SafetensorsFormat",
            suffix=".safetensors",
        )
    ]


@hookimpl
def drivetrain_register_data_shardings() -> Iterable[DataShardingSpec]:
    """Interleaved, contiguous and random shares."""
    home = "drivetrain.data.shardings"
    return [
        DataShardingSpec(
            name="interleaved", summary="batches are dealt to the ranks in turn", target=f"{home}:Interleaved"
        ),
        DataShardingSpec(
            name="contiguous", summary="each rank reads one stretch of the data set", target=f"{home}:Contiguous"
        ),
        DataShardingSpec(
            name="random",
            summary="one shuffle of the whole data set, anew each epoch, dealt to the ranks",
            target=f"{home}:GlobalShuffle",
        ),
    ]


@hookimpl
def drivetrain_register_sharding_planners() -> Iterable[ShardingPlannerSpec]:
    """Plans for one device."""
    return [
        ShardingPlannerSpec(
            name="single", summary="one device", target="drivetrain._builtin.planner:SinglePlanner", backend="single"
        )
    ]


@hookimpl
def drivetrain_register_launchers() -> Iterable[LauncherSpec]:
    """Processes on this machine, and those of MPI."""
    return [
        LauncherSpec(
            name="local",
            summary="processes on this machine",
            target="drivetrain.launch.local:LocalLauncher",
            options="drivetrain.launch.options:LocalOptions",
        ),
        LauncherSpec(
            name="mpi",
            summary="processes of mpirun or mpiexec",
            target="drivetrain.launch.mpi:MPILauncher",
            options="drivetrain.launch.mpi:MPIOptions",
            remote=True,
        ),
    ]


@hookimpl
def drivetrain_register_commands() -> Iterable[CommandSpec]:
    """The subcommands that come with core."""
    return [
        CommandSpec(name=n, summary=s, target=f"drivetrain.cli.{n}:{n}", options=_COMMAND_OPTIONS.get(n))
        for n, s in _COMMANDS.items()
    ] + [
        CommandSpec(
            name="merge-weights",
            summary="Same as checkpoint export.",
            target="drivetrain.cli.checkpoint:export",
            hidden=True,
        ),
        CommandSpec(name="estimate-memory", summary="Same as plan.", target="drivetrain.cli.plan:plan", hidden=True),
    ]
