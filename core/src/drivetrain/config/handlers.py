"""Options classes of core itself, under the names and fields that scripts already use. Nothing here imports torch before it is needed."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec

from drivetrain.config.options import Options, nearest, seconds
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

__all__ = [
    "CORE_OPTIONS",
    "OTHER_SECTIONS",
    "AutocastKwargs",
    "CoreOption",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "PrecisionKwargs",
    "ProfileKwargs",
    "PureBF16Kwargs",
    "TorchDynamoPlugin",
]

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


@dataclass
class AutocastKwargs(Options):
    """How `torch.autocast` behaves inside models and ``accelerator.autocast()``.

    Args:
        enabled: Whether operators change dtype at all.
        cache_enabled: Whether casts of weights are cached within a forward; None for torch's default.

    Example:
        >>> AutocastKwargs(cache_enabled=True).to_kwargs()
        {'cache_enabled': True}
    """

    enabled: bool = True
    cache_enabled: bool | None = None

    def __post_init__(self) -> None:
        self.validate()


@dataclass
class PrecisionKwargs(Options):
    """What a mixed precision does with outputs and with modules that suffer from it.

    Args:
        output_dtype: "float32": half-precision outputs of a prepared model become float32, as losses want them; "compute": they stay as they are.
        keep_in_fp32: Patterns of modules that compute in float32 (and, in pure bf16, keep float32 parameters): names such as "blocks.*.norm",
            last parts of names ("lm_head"), or class names ("LayerNorm").

    Example:
        >>> PrecisionKwargs(keep_in_fp32=["*Norm", "lm_head"]).to_kwargs()
        {'keep_in_fp32': ['*Norm', 'lm_head']}
    """

    output_dtype: Literal["float32", "compute"] = "float32"
    keep_in_fp32: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        given: Any = self.keep_in_fp32
        self.keep_in_fp32 = list(given) if isinstance(given, tuple) else given
        self.validate()


@dataclass
class PureBF16Kwargs(Options):
    """How ``mixed_precision="pure-bf16"`` makes steps that are smaller than a bfloat16 weight's last digit.

    Args:
        weights: "master": float32 weights are kept in the optimizer's state, 4 more bytes a parameter; "stochastic": each step is rounded up or down by
            chance, so that it is right on average, without more memory.

    Example:
        >>> PureBF16Kwargs(weights="stochastic").to_kwargs()
        {'weights': 'stochastic'}
    """

    weights: Literal["master", "stochastic"] = "master"

    def __post_init__(self) -> None:
        self.validate()


@dataclass
class GradScalerKwargs(Options):
    """How the loss is scaled in fp16.

    Args:
        init_scale: First scale.
        growth_factor: What the scale is multiplied with after ``growth_interval`` steps without overflow; 1 makes it static upwards.
        backoff_factor: What it is multiplied with after an overflow; below 1.
        growth_interval: Steps.
        enabled: Whether the loss is scaled at all.

    Example:
        >>> GradScalerKwargs(init_scale=1024.0).to_kwargs()
        {'init_scale': 1024.0}
    """

    init_scale: Positive = 65536.0
    growth_factor: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    backoff_factor: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    growth_interval: Count = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        self.validate()


@dataclass
class InitProcessGroupKwargs(Options):
    """How processes meet.

    Args:
        backend: torch.distributed's backend; None for that of the device.
        init_method: URL of the meeting point (``tcp://host:port``, ``file:///path``); None for what the cluster says.
        timeout: Seconds, or a `datetime.timedelta`, after which a collective is given up; None for torch's default.

    Example:
        >>> InitProcessGroupKwargs(timeout=datetime.timedelta(minutes=90)).timeout
        5400.0
        >>> InitProcessGroupKwargs(timeout=60).to_kwargs()
        {'timeout': datetime.timedelta(seconds=60)}
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: float | datetime.timedelta | None = None

    def __post_init__(self) -> None:
        if isinstance(self.timeout, int | float | datetime.timedelta) and not isinstance(self.timeout, bool):
            self.timeout = seconds(self.timeout)
        self.validate()
        if isinstance(self.timeout, float) and self.timeout <= 0:
            raise ConfigurationError(f"InitProcessGroupKwargs: timeout={self.timeout} must be above 0 seconds.")

    def to_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of ``torch.distributed.init_process_group``, which wants its timeout as a timedelta."""
        kwargs = self.explicit()
        if isinstance(self.timeout, int | float):
            kwargs["timeout"] = datetime.timedelta(seconds=self.timeout)
        return kwargs


_SCHEDULE = ("wait", "warmup", "active", "repeat", "skip_first", "skip_first_wait")


@dataclass
class ProfileKwargs(Options):
    """How ``accelerator.profile()`` profiles.

    Args:
        activities: "cpu", "cuda", "xpu", "mtia", "hpu"; None for all that are there.
        schedule_option: Arguments of ``torch.profiler.schedule``: wait, warmup, active, repeat, skip_first, skip_first_wait (in steps).
        on_trace_ready: Called with the profiler when a trace is ready.
        record_shapes: Record shapes of inputs.
        profile_memory: Record allocations.
        with_stack: Record source lines.
        with_flops: Estimate floating-point operations.
        with_modules: Record module names.
        output_trace_dir: Where ``accelerator.profile()`` writes one Chrome trace per rank; None for none.

    Example:
        >>> ProfileKwargs(activities=["cpu"], schedule_option={"wait": 1, "active": 2}).record_shapes
        False
    """

    activities: list[Literal["cpu", "cuda", "xpu", "mtia", "hpu"]] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        self.validate()
        for key in self.schedule_option or ():
            if key not in _SCHEDULE:
                raise ConfigurationError(f"ProfileKwargs: schedule_option has no {key!r}.{nearest(key, _SCHEDULE)}")

    def build(self) -> torch.profiler.profile:
        """Make the profiler that these options describe; imports torch.

        Raises:
            ConfigurationError: If torch has no such activity, or none of them can be recorded here.
        """
        import torch

        activities = None
        if self.activities is not None:
            activities = [_activity(torch.profiler.ProfilerActivity, name) for name in self.activities]
            possible = torch.profiler.supported_activities()
            if not possible.intersection(activities):
                names = ", ".join(sorted(a.name.lower() for a in possible))
                raise ConfigurationError(
                    f"ProfileKwargs: activities={self.activities} can't be recorded here. Possible: {names or 'none'}."
                )
        schedule = None
        if self.schedule_option is not None:
            arguments = {"wait": 0, "warmup": 0, "active": 1, **self.schedule_option}
            schedule = torch.profiler.schedule(**arguments)
        return torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


def _activity(activities: Any, name: str) -> Any:
    try:
        return getattr(activities, name.upper())
    except AttributeError:
        raise ConfigurationError(f"ProfileKwargs: this PyTorch has no profiler activity {name!r}.") from None


@dataclass
class GradientAccumulationPlugin(Options):
    """How gradients are accumulated.

    Args:
        num_steps: Micro-batches per optimizer step; None for ``gradient_accumulation_steps``.
        adjust_scheduler: Count scheduler steps in optimizer steps.
        sync_with_dataloader: End a window with the data, so that its last micro-batches are not left over for the next epoch.
        sync_each_batch: Reduce gradients at every micro-batch: less memory with sharded gradients, more communication.

    Example:
        >>> GradientAccumulationPlugin(num_steps=4).to_kwargs()
        {'num_steps': 4}
    """

    num_steps: Count | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        self.validate()


@dataclass
class TorchDynamoPlugin(Options):
    """How models are compiled with `torch.compile`.

    Args:
        backend: Name of a compiler backend ("inductor", "aot_eager", "eager", ...), any case; "no" to not compile; None for ``dynamo_backend``.
        mode: "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs".
        fullgraph: Refuse graph breaks.
        dynamic: Compile for changing shapes; None to find out.
        options: The compiler backend's own options; exclude ``mode``.
        disable: Make ``torch.compile`` do nothing.
        use_regional_compilation: Compile each repeated block by itself, which compiles faster.

    Example:
        >>> TorchDynamoPlugin(backend="INDUCTOR", fullgraph=True, use_regional_compilation=True).to_kwargs()
        {'backend': 'inductor', 'fullgraph': True}
    """

    backend: str | None = None
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    options: dict[str, str | int | float | bool] | None = None
    disable: bool = False
    use_regional_compilation: bool = False

    def __post_init__(self) -> None:
        value = getattr(self.backend, "value", self.backend)
        self.backend = value.lower() if isinstance(value, str) else value
        self.validate()
        if self.mode is not None and self.options is not None:
            raise ConfigurationError("TorchDynamoPlugin: mode= and options= exclude each other in torch.compile.")

    @property
    def enabled(self) -> bool:
        """Whether models are compiled."""
        return self.backend not in (None, "no") and not self.disable

    def to_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of ``torch.compile``."""
        return {k: v for k, v in self.explicit().items() if k != "use_regional_compilation" and v is not None}


class CoreOption(NamedTuple):
    """One of core's own options classes.

    Args:
        target: ``"package.module:Name"``.
        keyword: Argument of the Accelerator that takes an instance, besides ``kwargs_handlers``; empty if there is none.
    """

    target: str
    keyword: str = ""

    @property
    def class_name(self) -> str:
        """Name of the class."""
        return self.target.partition(":")[2]


_HERE = "drivetrain.config.handlers"
#: Core's own options classes by the name of their section in files and variables.
CORE_OPTIONS: Mapping[str, CoreOption] = {
    "autocast": CoreOption(f"{_HERE}:AutocastKwargs"),
    "precision": CoreOption(f"{_HERE}:PrecisionKwargs"),
    "grad_scaler": CoreOption(f"{_HERE}:GradScalerKwargs"),
    "process_group": CoreOption(f"{_HERE}:InitProcessGroupKwargs"),
    "profile": CoreOption(f"{_HERE}:ProfileKwargs"),
    "gradient_accumulation": CoreOption(f"{_HERE}:GradientAccumulationPlugin", "gradient_accumulation_plugin"),
    "dynamo": CoreOption(f"{_HERE}:TorchDynamoPlugin", "dynamo_plugin"),
    "project": CoreOption("drivetrain.checkpoint.project:ProjectConfiguration", "project_config"),
    "data_loader": CoreOption("drivetrain.data.config:DataLoaderConfiguration", "dataloader_config"),
    "tracking": CoreOption("drivetrain.tracking.options:TrackingOptions"),
    "parallelism": CoreOption("drivetrain.parallel.config:ParallelismConfig", "parallelism_config"),
    "activation_checkpointing": CoreOption("drivetrain.memory.activations:ActivationCheckpointing"),
    "planning": CoreOption("drivetrain.memory.options:PlanningOptions"),
}

#: Sections that others read, before there is an Accelerator.
OTHER_SECTIONS: Mapping[str, str] = {"launch": "drivetrain.launch.options:LaunchOptions"}
