"""Core's own settings: what ``Accelerator(...)``, the environment and the top level of a configuration file can say."""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from drivetrain.config.options import Options

__all__ = ["PREFIX", "STOPPED_FILE", "CoreSettings", "variable"]

#: Every variable that Drivetrain reads starts with it.
PREFIX = "DRIVETRAIN_"

#: Names a file that a run makes when SIGTERM or SIGUSR1 has ended it before its time, for whoever must start it again. One process of each
#: machine writes it; a script that stops by itself may do the same.
STOPPED_FILE = f"{PREFIX}STOPPED_FILE"


@dataclass(frozen=True)
class CoreSettings(Options):
    """The settings that belong to no plugin.

    Args:
        backend: Name of a backend, or "auto".
        device: Name of a device, or "auto".
        cpu: Use the CPU even where an accelerator is present.
        mixed_precision: Name of a precision or an alias ("no", "bf16", "fp16").
        gradient_accumulation_steps: Micro-batches per optimizer step.
        log_with: Names of trackers; "all" for every one that is installed.
        project_dir: Directory for checkpoints and logs.
        logging_dir: Directory for logs; default: ``project_dir``.
        dynamo_backend: Compiler backend of ``torch.compile``; "no" to not compile.
        step_scheduler_with_optimizer: Schedulers step only when their optimizer did.
        step_scheduler_per_process: Accelerate's stepping: a scheduler steps as often per optimizer step as there are processes (once with
            ``split_batches``), for totals that were multiplied by their number.
        on_nonfinite: What happens when a loss or a gradient is NaN or infinite: "raise" an error that names rank, step and samples; "skip" the
            step with a warning that names them; or nothing ("ignore").
        rng_types: Generators whose state is made equal on all ranks at the start of each epoch.
        device_placement: Move models, optimizers and batches to the device.
        debug: Gathering different numbers of rows is an error, and torch compares every collective of every rank before it runs, also those
            of a model's gradients, which is slow. (Drivetrain's own collectives are always compared.)
        checkpoint_format: Name of a checkpoint format.
        resume: "auto" goes on from the newest whole checkpoint in ``<project_dir>/checkpoints``, or starts afresh if there is none; a path from that
            checkpoint. Loaded where ``accelerator.epochs`` or ``accelerator.resume`` is called.
        config_file: Path of the configuration file.

    Example:
        >>> CoreSettings(mixed_precision="bf16").explicit()
        {'mixed_precision': 'bf16'}
        >>> variable("mixed_precision")
        'DRIVETRAIN_MIXED_PRECISION'
    """

    backend: str = "auto"
    device: str = "auto"
    cpu: bool = False
    mixed_precision: str = "no"
    gradient_accumulation_steps: Annotated[int, msgspec.Meta(ge=1)] = 1
    log_with: tuple[str, ...] = ()
    project_dir: str | None = None
    logging_dir: str | None = None
    dynamo_backend: str = "no"
    step_scheduler_with_optimizer: bool = True
    step_scheduler_per_process: bool = False
    on_nonfinite: Literal["ignore", "raise", "skip"] = "ignore"
    rng_types: tuple[str, ...] = ("generator",)
    device_placement: bool = True
    debug: bool = False
    checkpoint_format: str = "safetensors"
    resume: str | None = None
    config_file: str | None = None

    @classmethod
    def convert(cls, name: str, value: Any, *, strict: bool = True) -> Any:
        """Convert one value from Python, a file or text; enums, paths and single names in place of lists are understood.

        Raises:
            ConfigurationError: For an unknown name (with the nearest match) or a value of a wrong type.
        """
        if isinstance(value, enum.Enum):
            value = value.value
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if name in ("log_with", "rng_types") and strict:
            value = [value] if isinstance(value, str | enum.Enum) else value
            value = (
                [v.value if isinstance(v, enum.Enum) else v for v in value]
                if isinstance(value, list | tuple)
                else value
            )
        value = super().convert(name, value, strict=strict)
        return value.lower() if name in _CASELESS and isinstance(value, str) else value


#: Settings whose values are names: "INDUCTOR" is "inductor".
_CASELESS = frozenset({"backend", "device", "mixed_precision", "dynamo_backend"})


def variable(field: str, section: str = "") -> str:
    """Name of the environment variable of a core setting, or of a field of the options of ``section``.

    Example:
        >>> variable("bucket_size", "my-backend")
        'DRIVETRAIN_MY_BACKEND_BUCKET_SIZE'
    """
    middle = f"{section.upper().replace('-', '_')}_" if section else ""
    return f"{PREFIX}{middle}{field.upper()}"
