"""What DeepSpeed would take and get wrong, or the loop of a script can't drive: refused before an engine is made, on every rank alike."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from drivetrain.errors import ConfigurationError, EnvironmentDetectionError, UnsupportedError
from drivetrain.parallel.object_collectives import all_gather_object

__all__ = ["check_config", "check_disk", "check_engine", "check_model"]

Config = Mapping[str, Any]


def _enabled(config: Config, *path: str) -> bool:
    """Whether a section is there and isn't switched off."""
    section: Any = config
    for key in path:
        section = section.get(key) if isinstance(section, Mapping) else None
    return bool(section.get("enabled", True) if isinstance(section, Mapping) else section)


def _stage(config: Config) -> int:
    return int(config["zero_optimization"]["stage"])


def _sizes(config: Config, section: str, key: str) -> bool:
    return int((config.get(section) or {}).get(key, 1) or 1) > 1


#: What is refused: whether a configuration asks for it, and what to say.
_REFUSED: tuple[tuple[Callable[[Config], bool], str], ...] = (
    (
        lambda c: _sizes(c, "tensor_parallel", "autotp_size"),
        '"tensor_parallel": {"autotp_size"} divides layers, and loaders, item weights and checkpoints here take an engine\'s parameters for whole. '
        "Leave it out; the backend 'fsdp' divides layers: ParallelismConfig(tp_size=...).",
    ),
    (
        lambda c: int(c.get("sequence_parallel_size", 1) or 1) > 1,
        '"sequence_parallel_size" (Ulysses) would sum the gradients of parts of a sequence, and they are averaged here. Leave it out, and give '
        "ParallelismConfig(sp_size=...) and maybe_context_parallel(), which divide batches, too.",
    ),
    (
        lambda c: _enabled(c, "hybrid_engine"),
        '"hybrid_engine" replaces the engine by one that generates between steps. Leave it out.',
    ),
    (
        lambda c: _enabled(c, "zero_optimization", "zenflow"),
        '"zenflow" steps some parameters late, beside the window of the script. Leave it out.',
    ),
    (
        lambda c: _stage(c) == 1 and c["zero_optimization"].get("overlap_comm") is True,
        '"overlap_comm" at stage 1: gradients are reduced after the last backward, since nobody knows before which one that is. Leave it out, or '
        "use stage 2, where they are reduced during each.",
    ),
    (
        lambda c: c["zero_optimization"].get("compute_grad_norm") is False,
        '"compute_grad_norm": false: clip_grad_norm_ and the search for overflows need the norm. Leave it out.',
    ),
    (
        lambda c: _stage(c) == 0 and _enabled(c, "fp16"),
        "fp16 at stage 0: DeepSpeed doesn't scale the loss there, and still divides gradients by the scale. Use zero_stage=1.",
    ),
    (
        lambda c: (
            _stage(c) == 1
            and _enabled(c, "bf16")
            and (c.get("data_types") or {}).get("grad_accum_dtype") in ("fp32", "float32")
        ),
        '"data_types": {"grad_accum_dtype": "fp32"} with bf16 at stage 1 makes another optimizer, which keeps gradients elsewhere. Use zero_stage=2 '
        "with it, or leave it out.",
    ),
    (
        lambda c: (
            _enabled(c, "torch_autocast")
            and "16" in str(c["torch_autocast"].get("dtype", "bfloat16")).replace("bfloat16", "")
        ),
        '"torch_autocast" in float16: each optimizer would scale and skip for itself. Use mixed_precision="fp16", or autocast in bfloat16.',
    ),
    (
        lambda c: bool(c.get("gradient_predivide_factor", 1.0) != 1.0 and not c.get("prescale_gradients")),
        '"gradient_predivide_factor" has no effect without "prescale_gradients": true. Leave it out.',
    ),
)


def check_config(config: Config) -> None:
    """Refuse settings of a resolved configuration.

    Raises:
        UnsupportedError: With what to do instead.

    Example:
        >>> check_config({"zero_optimization": {"stage": 2}})
    """
    for asked, sentence in _REFUSED:
        if (config.get("zero_optimization") or {}) and asked(config):
            raise UnsupportedError(f"DeepSpeed's configuration: {sentence}")


def check_disk(
    config: Config, optimizer: Any = None, *, parameters: int = 0, processes: int = 1, here: int = 1
) -> None:
    """Refuse offload to a disk on which state can't be kept. Collective where there is such offload: what one process finds all raise.

    Args:
        config: A resolved configuration.
        optimizer: What keeps state.
        parameters: Number of the model's elements.
        processes: Number of processes that divide them.
        here: How many of these share this machine's disk.

    Raises:
        ConfigurationError: For a folder that isn't there, or takes no files, or lies on a disk with too little room.
        EnvironmentDetectionError: Where DeepSpeed can't compile what it reads and writes with; says what to install.

    Example:
        >>> check_disk({"zero_optimization": {"stage": 3}})
        >>> check_disk({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nowhere"}}})
        Traceback (most recent call last):
        ...
        drivetrain.errors.ConfigurationError: offload_param_nvme_path='/nowhere': there is no such folder. Make it, on a disk of each machine.
    """
    zero = config["zero_optimization"]
    used = [k for k in ("offload_optimizer", "offload_param") if (zero.get(k) or {}).get("device") == "nvme"]
    if not used:
        return
    from deepspeed.ops.op_builder import AsyncIOBuilder

    found = ""
    kind: type[ConfigurationError | EnvironmentDetectionError] = ConfigurationError
    for key in used:
        # At least: float32 weights and the optimizer's state, or weights in two bytes each for the computation.
        width = 4 * (1 + _kept_per_element(optimizer)) if key == "offload_optimizer" else 2
        least = width * parameters * here // processes
        found = found or _unfit_folder(f"{key}_nvme_path", str(zero[key].get("nvme_path")), least)
    if not found and not AsyncIOBuilder().is_compatible(verbose=False):
        kind = EnvironmentDetectionError
        found = (
            f'{used[0]}_device="nvme": DeepSpeed reads and writes with libaio, and there are no headers of it. Install them (Debian: libaio-dev), with a '
            "C++ compiler and ninja, or offload to the CPU."
        )
    everywhere = all_gather_object((kind, found)) if processes > 1 else [(kind, found)]
    failed = {rank: entry for rank, entry in enumerate(everywhere) if entry[1]}
    if failed:
        first, (kind, sentence) = min(failed.items(), key=lambda entry: entry[1][0] is not ConfigurationError)
        count = len(everywhere)
        raise kind(
            sentence
            if len(failed) == count
            else f"{sentence} (on rank {first}; {len(failed)} of {count} ranks can't use it)"
        )


def _kept_per_element(optimizer: Any) -> int:
    """How many numbers of state an optimizer keeps of each element, by a step on a few; 0 where that can't be found out."""
    if not isinstance(optimizer, torch.optim.Optimizer) or not optimizer.param_groups:
        return 0
    parameter = torch.nn.Parameter(torch.zeros(8))
    parameter.grad = torch.zeros(8)
    tried = copy.copy(optimizer)
    tried.state = defaultdict(dict)
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):  # they are for the script's own steps
        setattr(tried, name, OrderedDict())
    tried.param_groups = [{**optimizer.param_groups[0], "params": [parameter]}]
    try:
        type(tried).step(tried)  # schedulers put a function of the original into its place
    except Exception:
        return 0
    return sum(isinstance(v, torch.Tensor) and v.shape == parameter.shape for v in tried.state[parameter].values())


def _unfit_folder(field: str, path: str, least: int) -> str:
    """Why state can't be kept there, or nothing."""
    folder = Path(path)
    said = f"{field}={path!r}"
    if not folder.is_dir():
        if folder.exists():
            return f"{said}: this is a file. Give a folder, on a disk of each machine."
        return f"{said}: there is no such folder. Make it, on a disk of each machine."
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return f"{said}: files can't be written there ({error.strerror}). Choose a folder that this user may write to, on a disk that isn't full."
    # DeepSpeed writes over what an earlier run has left there.
    left = sum(file.stat().st_size for file in folder.glob("zero_stage_3/*/rank*/*.swp"))
    free = shutil.disk_usage(folder).free + left
    if free < least:
        return f"{said}: {free / 1e9:.2f} GB are free there, and this machine's processes keep at least {least / 1e9:.2f} GB. Make room, or choose another disk."
    return ""


def check_model(model: torch.nn.Module, *, placement: bool, device: torch.device) -> None:
    """Refuse models that an engine can't take.

    Args:
        model: The user's model.
        placement: Whether it may be moved to the device.
        device: Where the engine computes.

    Raises:
        UnsupportedError: With what to do instead.
        ConfigurationError: For a model without parameters to train.

    Example:
        >>> check_model(torch.nn.Linear(2, 2), placement=True, device=torch.device("cpu"))
    """
    from deepspeed.pipe import PipelineModule

    name = type(model).__name__
    if isinstance(model, PipelineModule):
        raise UnsupportedError(
            f"{name} is a PipelineModule, whose engine runs forward and backward of all micro-batches by itself (train_batch). Give the model "
            "itself to prepare()."
        )
    if not placement and device.type != "cpu":
        raise UnsupportedError(
            f"device_placement=False: DeepSpeed's engine moves {name} to {device}. Leave it out; offload_param_device keeps parameters elsewhere."
        )
    if any(getattr(p, "ds_is_replaced_module", False) for p in model.parameters()):
        raise UnsupportedError(
            f"{name} went through deepspeed.tp_model_init, and holds parts of its layers: loaders, item weights and checkpoints here take an engine's "
            "parameters for whole. Give the model as it was; the backend 'fsdp' divides layers: ParallelismConfig(tp_size=...)."
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigurationError(f"{name} has an optimizer, and no parameter that requires a gradient.")


def check_engine(engine: Any) -> None:
    """Refuse what only an engine's making has shown.

    Raises:
        UnsupportedError: With what to do instead.
    """
    if hasattr(engine.optimizer, "fp32_groups_flat"):
        raise UnsupportedError(
            'DeepSpeed\'s fused optimizers at stage 0 in half precision keep other copies of the weights. Add "torch_adam": true to the parameters of '
            "the optimizer in the configuration, or use zero_stage=1."
        )
