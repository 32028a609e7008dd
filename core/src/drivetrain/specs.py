"""The frozen descriptors with which plugins say what they offer, and their vocabulary.

A descriptor names classes as strings (``"package.module:Name"``), so that a plugin's entry module imports neither torch nor
its vendor's SDK. Nothing here imports torch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

__all__ = [
    "API_VERSION",
    "AnySpec",
    "BackendSpec",
    "Capability",
    "CheckpointFormatSpec",
    "ClusterSpec",
    "CommandSpec",
    "DataShardingSpec",
    "Detection",
    "DeviceSpec",
    "LauncherSpec",
    "PrecisionSpec",
    "ProcessInfo",
    "Request",
    "Score",
    "ShardingPlannerSpec",
    "TrackerSpec",
]

#: The plugin API of this core. Core loads plugins whose ``DRIVETRAIN_API`` is this number or the one before it.
API_VERSION = 1


class Capability(str, enum.Enum):
    """What a backend can do, or takes over from core. What isn't declared is refused, never imitated.

    Example:
        >>> Capability("no-sync") is Capability.NO_SYNC
        True
    """

    #: Runs with more than one process.
    DISTRIBUTED = "distributed"
    #: The vendor's engine runs backward; ``loss.backward()`` by hand is wrong.
    OWNS_BACKWARD = "owns-backward"
    #: The vendor's engine runs the optimizer step (and clipping inside it).
    OWNS_STEP = "owns-step"
    #: The vendor's schedule runs forward and backward of all micro-batches of a window in one call.
    OWNS_SCHEDULE = "owns-schedule"
    #: The vendor's engine owns dtype and loss scale; core's Precision must not convert or scale.
    OWNS_PRECISION = "owns-precision"
    #: Parameters are shards: full tensors need a gather.
    SHARDED_PARAMETERS = "sharded-parameters"
    #: Gradients can be kept local for some micro-batches (no collective before the window's end).
    NO_SYNC = "no-sync"
    #: Ranks may run out of batches at different times.
    UNEVEN_INPUTS = "uneven-inputs"
    #: A checkpoint may be taken inside an accumulation window, with the gradients so far.
    MID_WINDOW_STATE = "mid-window-state"
    #: More than one model may be prepared.
    MULTIPLE_MODELS = "multiple-models"
    #: ``torch.compile`` works on prepared models.
    COMPILE = "compile"
    #: Gradients can be clipped by value.
    CLIP_VALUE = "clip-value"
    #: Item-weighted losses (``backward(loss, weight=n)``) are normalised exactly.
    ITEM_WEIGHTS = "item-weights"
    #: Processes form a mesh of several dimensions (``ParallelismConfig``): replicas, shards, tensor and context parallel.
    DEVICE_MESH = "device-mesh"
    #: Its options may be several, in a dict by name: one counts, until ``accelerator.state.select_<keyword>(name)`` selects another.
    NAMED_OPTIONS = "named-options"

    def __str__(self) -> str:
        return self.value


class Score(enum.IntEnum):
    """How strongly a detection speaks for its candidate. The highest score wins; equal scores are an error.

    Example:
        >>> Score.PREFERRED > Score.POSSIBLE > Score.FALLBACK
        True
    """

    #: Works anywhere; chosen when nothing else applies.
    FALLBACK = 0
    #: Works here.
    POSSIBLE = 100
    #: Made for what was found here.
    PREFERRED = 200
    #: The user's arguments or variables ask for it.
    REQUESTED = 300


class _Record:
    """Equality, hash and text of the descriptors.

    Generated anew for each class, as dataclasses have it, they would take a third of the time that this module takes, in every process and before every command.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Detection(_Record):
    """One plugin's answer to "does this apply here?".

    Args:
        name: The spec that it speaks for.
        score: How strongly, see `Score`; any integer in between is fine.
        reason: One clause a person understands: "WORLD_SIZE=4 and a distributed backend is needed".

    Example:
        >>> Detection("ddp", Score.POSSIBLE, "2 processes").score
        <Score.POSSIBLE: 100>
    """

    name: str
    score: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ProcessInfo(_Record):
    """Who this process is among all processes of the job.

    Args:
        rank: Global rank, 0 to ``world_size - 1``.
        world_size: Number of processes in all.
        local_rank: Rank on this machine.
        local_world_size: Number of processes on this machine.
        node_rank: Rank of this machine.
        cluster: Name of the `ClusterSpec` that said so, "single" for a plain process.
        rendezvous: How to meet: the init method of the process group (``env://``, ``tcp://host:port``).
        reason: Which variables said so.

    Example:
        >>> ProcessInfo().is_distributed
        False
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    cluster: str = "single"
    rendezvous: str = "env://"
    reason: str = "no variables of a launcher or cluster are set"

    @property
    def is_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.world_size > 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Request(_Record):
    """What is known before anything is chosen: the input of detection hooks. Read-only and torch-free.

    Args:
        process: Who this process is.
        device: Name of the chosen `DeviceSpec`.
        device_count: Number of such devices on this machine.
        backend: Backend name asked for, or "auto".
        option_types: Names of the options classes given by the user (for example "DistributedDataParallelKwargs").
        environ: The environment variables.

    Example:
        >>> Request(process=ProcessInfo(world_size=2)).process.is_distributed
        True
    """

    process: ProcessInfo = field(default_factory=ProcessInfo)
    device: str = "cpu"
    device_count: int = 1
    backend: str = "auto"
    option_types: frozenset[str] = frozenset()
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class _Spec(_Record):
    """Common to all specs.

    Args:
        name: Unique among specs of its kind; lower case, digits and hyphens.
        summary: One line for listings.
        target: The class or function that does the work, ``"package.module:Name"``.
        requires: Requirements beyond the distribution's own, as PEP 508 strings (``"some-engine>=0.16"``); a spec whose
            requirement isn't met is listed with that reason and can't be chosen.
        options: The options class of this spec, ``"package.module:Name"``, a dataclass of plain field types derived from
            `drivetrain.config.Options`.
        accepts: Constructor keywords of the Accelerator that take an instance of ``options``.
        exports: Names that ``drivetrain`` and ``drivetrain.utils`` resolve through this spec, each as ``"Name"`` (found in the
            module of ``options``, or else of ``target``) or ``"Name=package.module:Attribute"``.
        report: A function without arguments, ``"package.module:name"``, that gives facts for a bug report: texts by name. ``drivetrain env``
            calls it, and nothing else does.
    """

    name: str
    summary: str = ""
    target: str = ""
    requires: tuple[str, ...] = ()
    options: str | None = None
    accepts: tuple[str, ...] = ()
    exports: tuple[str, ...] = ()
    report: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class BackendSpec(_Spec):
    """How models, optimizers and gradients live across processes. ``target``: a `drivetrain.interfaces.Backend`.

    Args:
        capabilities: What it can do or takes over.
        devices: Names of devices that it runs on; ``("*",)`` for any.
        precisions: Names of precisions that it works with; ``("*",)`` for any.
        exclusive: Its vendor's state is process-wide: a second Accelerator with other settings is refused.
        launch_environment: Variables that the launcher sets in children.
        distributed_type: Accelerate's name for it (a member of ``DistributedType``); empty where that is the device's.
        adopts: A function ``(folder: Path) -> drivetrain.checkpoint.adopting.ForeignState | None``, ``"package.module:name"``, that reads checkpoints in the
            vendor's own format for ``drivetrain checkpoint convert``; None for a folder that isn't one.

    Example:
        >>> BackendSpec(name="toy", target="toy.backend:ToyBackend").devices
        ('*',)
    """

    capabilities: frozenset[Capability] = frozenset()
    devices: tuple[str, ...] = ("*",)
    precisions: tuple[str, ...] = ("*",)
    exclusive: bool = False
    launch_environment: Mapping[str, str] = field(default_factory=dict)
    distributed_type: str = ""
    adopts: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DeviceSpec(_Spec):
    """A kind of accelerator (or the CPU). ``target``: a `drivetrain.interfaces.Device`; the default serves all that follow torch's module protocol.

    Args:
        torch_type: The type part of a ``torch.device``; several specs may share one.
        module: Module to import before torch knows the type (``"torch_npu"``), or None.
        communication_backend: torch.distributed's backend for it ("gloo", "nccl", "xccl", "hccl"); empty if it serves one process alone.
        visible_devices: Variable that limits which devices a process sees (``CUDA_VISIBLE_DEVICES``), or None.
        dtypes: Names of floating-point dtypes that autocast and matmul have on it.
        priority: Of the devices present, the one with the highest priority is chosen; the CPU's is 0.

    Example:
        >>> DeviceSpec(name="toy", torch_type="cpu", communication_backend="gloo").priority
        100
    """

    target: str = "drivetrain.interfaces.device:TorchDevice"
    torch_type: str
    module: str | None = None
    communication_backend: str
    visible_devices: str | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    priority: int = 100


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ClusterSpec(_Spec):
    """Which variables tell a process who it is.

    A table is enough for most; ``target`` may name a function ``(environ: Mapping[str, str]) -> ProcessInfo | None`` for those that
    must compute (node lists).

    Each variable field is a tuple of names, the first one set wins. A spec without any variable and ``target`` applies always
    (the plain process).

    Args:
        marker: Variables of which one must be set for this cluster to apply at all; default: those of ``rank``.
        rank, world_size, local_rank, local_world_size, node_rank: Names of the variables.
        job_id: Variables with a text that is equal in all processes of one job and differs between jobs. Where MASTER_PORT isn't set, the
            rendezvous port is derived from it; a cluster without it needs MASTER_ADDR and MASTER_PORT.
        required: Which of those fields must be set once the marker is, else the environment is half-set and an error.
        machine: A function ``(environ: Mapping[str, str]) -> Mapping[str, Any] | None``, ``"package.module:name"``, for clusters that start one
            program on each machine of a job, and that program is ``drivetrain launch``: what the cluster says of ``num_machines``,
            ``machine_rank``, ``main_process_ip``, ``main_process_port`` and ``per_machine`` (processes on each machine), and a ``reason``.
            None where it says nothing. Asked where a variable of ``marker`` is set; what the user gives stands above that.
        priority: Of several that apply the highest wins: explicit launchers (torchrun) stand above what they run under.

    Example:
        >>> ClusterSpec(name="toy", rank=("TOY_RANK",), world_size=("TOY_SIZE",)).required
        ('rank', 'world_size')
    """

    marker: tuple[str, ...] = ()
    rank: tuple[str, ...] = ()
    world_size: tuple[str, ...] = ()
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    job_id: tuple[str, ...] = ()
    required: tuple[str, ...] = ("rank", "world_size")
    machine: str = ""
    priority: int = 100


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class PrecisionSpec(_Spec):
    """Owns dtype and scaling. ``target``: a `drivetrain.interfaces.Precision`.

    Args:
        aliases: Other names users write ("no" for fp32).
        dtypes: Names of the dtypes that the device must have.

    Example:
        >>> PrecisionSpec(name="fp32", aliases=("no",)).aliases
        ('no',)
    """

    aliases: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class ShardingPlannerSpec(_Spec):
    """Turns a profile of model and hardware into candidate plans. ``target``: a `drivetrain.interfaces.ShardingPlanner`.

    Example:
        >>> ShardingPlannerSpec(name="toy", backend="toy").backend
        'toy'
    """

    backend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class DataShardingSpec(_Spec):
    """Which global sample indices belong to which rank. ``target``: a `drivetrain.interfaces.DataSharding`.

    Example:
        >>> DataShardingSpec(name="interleaved").name
        'interleaved'
    """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class TrackerSpec(_Spec):
    """An experiment tracker. ``target``: a `drivetrain.interfaces.Tracker`.

    Args:
        needs_directory: It writes below a logging directory.
        every_rank: It may also run on other ranks than the main one.
        kinds: What it stores besides scalars: "config", "images", "figure", "table", "histogram", "text", "artifact", "summary".
        aliases: Other names users write, in ``log_with``, ``init_kwargs``, ``get_tracker``.

    Example:
        >>> TrackerSpec(name="toy").every_rank
        False
    """

    needs_directory: bool = False
    every_rank: bool = False
    kinds: frozenset[str] = frozenset()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CheckpointFormatSpec(_Spec):
    """How tensors and plain data are stored in a checkpoint. ``target``: a `drivetrain.interfaces.CheckpointFormat`.

    Example:
        >>> CheckpointFormatSpec(name="safetensors", suffix=".safetensors").suffix
        '.safetensors'
    """

    suffix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class LauncherSpec(_Spec):
    """Starts the processes of a job. ``target``: a `drivetrain.interfaces.Launcher`. Chosen with ``drivetrain launch --on NAME``.

    Args:
        remote: The processes run on machines that this one can't look at, and find each other by themselves: devices aren't looked for here, and
            no address is needed.
        own_files: They see other files than this machine (those of an image), so the script isn't looked for here.

    Example:
        >>> LauncherSpec(name="local").remote
        False
    """

    remote: bool = False
    own_files: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class CommandSpec(_Spec):
    """A subcommand of ``drivetrain``. ``target``: a click command, imported only when it is run.

    Args:
        aliases: Hidden other spellings.
        hidden: Not shown by ``--help``.

    Example:
        >>> CommandSpec(name="plugins", target="drivetrain.cli.plugins:plugins").hidden
        False
    """

    aliases: tuple[str, ...] = ()
    hidden: bool = False


AnySpec = (
    BackendSpec
    | DeviceSpec
    | ClusterSpec
    | PrecisionSpec
    | ShardingPlannerSpec
    | DataShardingSpec
    | TrackerSpec
    | CheckpointFormatSpec
    | LauncherSpec
    | CommandSpec
)
