"""One model or one optimizer in a directory, under Accelerate's names.

What is written is a checkpoint of `drivetrain.checkpoint` that holds nothing else: by shards, without pickles, whole or absent, and read at any number of processes.
`accelerator.save_state()` saves all of a training in one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from drivetrain.checkpoint import CheckpointManager
from drivetrain.errors import ConfigurationError, NotPreparedError, UnsupportedError
from drivetrain.interfaces import Backend, Precision
from drivetrain.specs import ProcessInfo

if TYPE_CHECKING:
    from drivetrain import Accelerator
    from drivetrain_fsdp.options import FullyShardedDataParallelPlugin

__all__ = ["load_fsdp_model", "load_fsdp_optimizer", "save_fsdp_model", "save_fsdp_optimizer"]

Directory = str | os.PathLike[str]


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    accelerator: Accelerator,
    model: torch.nn.Module,
    output_dir: Directory,
    model_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Save a prepared model to ``<output_dir>/pytorch_model_fsdp_<model_index>``. Collective.

    Args:
        fsdp_plugin: The Accelerator's settings; None for those.
        accelerator: Prepared the model.
        model: The prepared model.
        output_dir: Where the model's directory goes.
        model_index: Tells several models apart.
        adapter_only: Not offered: peft's own ``save_pretrained`` does it.

    Raises:
        CheckpointError: On every process, if it can't be written.
        ConfigurationError: If other settings are given than the Accelerator has.
        UnsupportedError: For ``adapter_only``.

    Example:
        >>> import tempfile, torch
        >>> from drivetrain import Accelerator
        >>> accelerator = Accelerator(cpu=True, backend="fsdp")
        >>> model = accelerator.prepare(torch.nn.Linear(2, 1))
        >>> directory = tempfile.mkdtemp()
        >>> save_fsdp_model(None, accelerator, model, directory)
        >>> load_fsdp_model(None, accelerator, model, directory)
        >>> accelerator.end_training()
    """
    _check(fsdp_plugin, accelerator, adapter_only)
    _save(_Part(accelerator=accelerator, models=[model]), output_dir, f"pytorch_model_fsdp_{model_index}")


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    accelerator: Accelerator,
    model: torch.nn.Module,
    input_dir: Directory,
    model_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Load what `save_fsdp_model` saved, at this or another number of processes. Collective. The arguments are the same."""
    _check(fsdp_plugin, accelerator, adapter_only)
    _load(_Part(accelerator=accelerator, models=[model]), input_dir, f"pytorch_model_fsdp_{model_index}")


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    accelerator: Accelerator,
    optimizer: Any,
    model: torch.nn.Module,
    output_dir: Directory,
    optimizer_index: int = 0,
) -> None:
    """Save a prepared optimizer's state to ``<output_dir>/optimizer_<optimizer_index>``. Collective.

    Args:
        fsdp_plugin: The Accelerator's settings; None for those.
        accelerator: Prepared both.
        optimizer: The prepared optimizer.
        model: The prepared model whose parameters it updates.
        output_dir: Where the optimizer's directory goes.
        optimizer_index: Tells several optimizers apart.

    Raises:
        CheckpointError: On every process, if it can't be written.
        ConfigurationError: If other settings are given than the Accelerator has.
    """
    _check(fsdp_plugin, accelerator, False)
    part = _Part(accelerator=accelerator, optimizers=[(_inner(optimizer), [model])])
    _save(part, output_dir, f"optimizer_{optimizer_index}")


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    accelerator: Accelerator,
    optimizer: Any,
    model: torch.nn.Module,
    input_dir: Directory,
    optimizer_index: int = 0,
    adapter_only: bool = False,
) -> None:
    """Load what `save_fsdp_optimizer` saved, at this or another number of processes. Collective. The arguments are the same."""
    _check(fsdp_plugin, accelerator, adapter_only)
    part = _Part(accelerator=accelerator, optimizers=[(_inner(optimizer), [model])])
    _load(part, input_dir, f"optimizer_{optimizer_index}")


def _check(plugin: Any, accelerator: Accelerator, adapter_only: bool) -> None:
    own = accelerator.backend.context.options
    if plugin is not None and plugin != own:
        raise ConfigurationError(
            "The fsdp_plugin given isn't the Accelerator's: its own settings say how the model is sharded. Pass accelerator.state.fsdp_plugin, or None."
        )
    if adapter_only:
        raise UnsupportedError(
            "adapter_only=True isn't offered here: use peft's model.save_pretrained(..., state_dict=accelerator.get_state_dict(model)) "
            "and set_peft_model_state_dict."
        )


def _inner(optimizer: Any) -> Any:
    inner = getattr(optimizer, "optimizer", None)
    if inner is None:
        raise NotPreparedError("Pass the optimizer that accelerator.prepare() returned.")
    return inner


def _save(part: _Part, directory: Directory, name: str) -> None:
    manager = CheckpointManager(part)
    try:
        manager.save_state(Path(directory) / name)
    finally:
        manager.close()


def _load(part: _Part, directory: Directory, name: str) -> None:
    manager = CheckpointManager(part)
    try:
        manager.load_state(Path(directory) / name)
    finally:
        manager.close()


@dataclass(kw_only=True)
class _Part:
    """A session that has some models or optimizers of an Accelerator, and nothing else."""

    accelerator: Accelerator
    models: Sequence[torch.nn.Module] = ()
    optimizers: Sequence[tuple[Any, Sequence[torch.nn.Module]]] = ()
    schedulers: Sequence[Any] = ()
    loaders: Sequence[Any] = ()
    custom_objects: Sequence[Any] = ()
    mid_window: bool = False
    window_reduction: Literal["sum", "mean"] = "mean"

    @property
    def process(self) -> ProcessInfo:
        return self.accelerator.plan.process

    @property
    def backend(self) -> Backend:
        return self.accelerator.backend

    @property
    def precision(self) -> Precision:
        return self.accelerator.backend.precision

    def window_state(self) -> Mapping[str, float]:
        return {}

    def set_window_state(self, state: Mapping[str, float]) -> None:
        pass

    def counters(self) -> Mapping[str, Any]:
        return {}

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        pass

    def rng_state(self) -> Any:
        return {}

    def set_rng_state(self, state: Any) -> None:
        pass

    def plan_facts(self) -> Mapping[str, Any]:
        return {}

    def tracker_run_ids(self) -> Mapping[str, str]:
        return {}

    def set_tracker_run_ids(self, run_ids: Mapping[str, str]) -> None:
        pass
