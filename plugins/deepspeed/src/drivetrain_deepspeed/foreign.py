"""Reading checkpoints in DeepSpeed's own format, without DeepSpeed and without running what stands in them.

``engine.save_checkpoint`` writes a folder for each tag: ``mp_rank_00_model_states.pt`` (at stage 3 one for each process), and at stages 1 to 3 one
``*_optim_states.pt`` for each process with its part of the float32 values and of the optimizer's state, flat, several parameters in one tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from drivetrain.checkpoint.adopting import ForeignState
from drivetrain.checkpoint.unpickling import load_plain
from drivetrain.errors import CheckpointError
from drivetrain_deepspeed.flat import Layout, cut

__all__ = ["read_checkpoint"]

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_DIVIDED = re.compile(r"layer_\d+.*_model_states\.pt|.*expert_\d+.*\.pt")


class _Record:
    """Stands for an object of DeepSpeed's, of which only the values are kept."""


#: What DeepSpeed's files mention. Nothing of it is imported.
_STAND_INS: Mapping[str, type] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _Record,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _Record,
    "deepspeed.utils.tensor_fragment.fragment_address": _Record,
}


def read_checkpoint(folder: Path) -> ForeignState | None:
    """What ``engine.save_checkpoint`` wrote, at any stage and number of processes.

    Args:
        folder: The folder given to it, whose ``latest`` names the tag, or that of a tag.

    Returns:
        Weights in float32, optimizer state by names (by positions at stage 0), scheduler and steps; None if the folder is none of DeepSpeed's.

    Raises:
        CheckpointError: If parts are missing or damaged, or of a kind that isn't read: models divided by layers or tensors, experts.

    Example:
        >>> import tempfile
        >>> read_checkpoint(Path(tempfile.mkdtemp())) is None
        True
    """
    tagged = _tagged(folder)
    if tagged is None:
        return None
    files = _files(tagged)
    first = _load(files.models[0])
    try:
        if files.optimizers:
            return _from_shards(tagged, first, files)
        return _from_whole(tagged, first)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{tagged} isn't laid out as DeepSpeed's checkpoints are: {type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Files:
    """Files of a tag, in the order of ranks."""

    models: list[Path]
    optimizers: list[Path]


def _tagged(folder: Path) -> Path | None:
    """The folder of the tag; None if nothing looks like DeepSpeed."""
    if any(_MODEL.fullmatch(p.name) for p in folder.iterdir()):
        return folder
    latest = folder / "latest"
    if not latest.is_file() or latest.stat().st_size > 4096:
        return None
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()
    if not tag or "/" in tag or "\\" in tag or tag in (".", ".."):
        return None
    if not (folder / tag).is_dir():
        inside = ", ".join(sorted(p.name for p in folder.iterdir() if p.is_dir())) or "none"
        raise CheckpointError(
            f"{latest} names {tag!r}, which isn't there (folders: {inside}): convert the folder of a tag"
        )
    if not any(_MODEL.fullmatch(p.name) for p in (folder / tag).iterdir()):
        raise CheckpointError(f"{folder / tag} has no *_model_states.pt: the save didn't finish, or files were lost")
    return folder / tag


def _files(tagged: Path) -> _Files:
    models: dict[int, Path] = {}
    optimizers: dict[int, Path] = {}
    for path in sorted(tagged.iterdir()):
        if _DIVIDED.fullmatch(path.name):
            _refuse(f"{path} belongs to a model that is divided by layers or experts")
        for pattern, found in ((_MODEL, models), (_OPTIMIZER, optimizers)):
            if match := pattern.fullmatch(path.name):
                if int(match[2]) > 0:
                    _refuse(f"{path} belongs to a model that is divided by tensors")
                found[int(match[1] or 0)] = path
    for found, what in ((models, "model_states"), (optimizers, "optim_states")):
        missing = sorted(set(range(max(found, default=-1) + 1)) - set(found))
        if missing:
            raise CheckpointError(f"{tagged} lacks *_{what}.pt of rank {', '.join(map(str, missing[:5]))}")
    return _Files([models[r] for r in sorted(models)], [optimizers[r] for r in sorted(optimizers)])


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(f"{what}, which isn't read here: let DeepSpeed's engine load it and save whole weights")


def _load(path: Path) -> Any:
    content = load_plain(path, stand_ins=_STAND_INS)
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not what DeepSpeed writes")
    return content


def _from_shards(tagged: Path, first: Mapping[str, Any], files: _Files) -> ForeignState:
    parts = [_load(path)["optimizer_state_dict"] for path in files.optimizers]
    stage = int(parts[0]["zero_stage"]) if "zero_stage" in parts[0] else -1
    if stage not in (1, 2, 3):
        raise CheckpointError(f"{files.optimizers[0]} was written at stage {stage}, which isn't known: 1, 2 and 3 are")
    count = parts[0]["partition_count"]
    world_size = max(count) if isinstance(count, Sequence) else int(count)
    if len(parts) != world_size or (stage == 3 and len(files.models) != world_size):
        raise CheckpointError(
            f"{tagged} was written by {world_size} processes, and has *_optim_states.pt of {len(parts)} and "
            f"*_model_states.pt of {len(files.models)} of them: files are missing"
        )
    inner = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    flat = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    bases = [part[inner] for part in parts]
    if not isinstance(bases[0], Mapping):
        raise CheckpointError(
            f"{tagged} was saved with elastic_checkpoint, which leaves out what optimizers count: save it without"
        )
    weights: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    order: list[list[str]] = []
    paddings = parts[0].get("param_alignment_paddings")
    for i, shapes in enumerate(first["param_shapes"]):
        layout = Layout(shapes, stage=stage, paddings=None if paddings is None else paddings[i])
        flats = [part[flat][i] for part in parts]
        weights.update(cut([f.float() for f in flats], layout, tagged))
        order.append(list(shapes))
        for key, value in bases[0]["state"].get(i, {}).items():
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                if value.numel() < flats[0].numel():  # the values lack the padding at the end, which the state has
                    raise CheckpointError(f"{tagged}: the optimizer's {key} isn't cut as its parameters are")
                pieces = cut([base["state"][i][key] for base in bases], layout, tagged)
            else:
                pieces = {name: value.clone() if isinstance(value, torch.Tensor) else value for name in shapes}
            for name, piece in pieces.items():
                state.setdefault(name, {})[key] = piece
    groups = [
        {**{k: v for k, v in group.items() if k != "params"}, "params": [n for i in group["params"] for n in order[i]]}
        for group in bases[0]["param_groups"]
    ]
    weights.update(_frozen(first, files, stage))
    return _state(first, weights, {"state": state, "param_groups": groups}, world_size)


def _frozen(first: Mapping[str, Any], files: _Files, stage: int) -> dict[str, torch.Tensor]:
    """Parameters that aren't trained: whole, or at stage 3 a part in each process's file."""
    shapes = first.get("frozen_param_shapes") or {}
    if not shapes:
        return {}
    held = [first] if stage < 3 else [first, *map(_load, files.models[1:])]
    fragments = [content["frozen_param_fragments"] for content in held]
    return {
        name: torch.cat([f[name].flatten() for f in fragments])[: math.prod(shape)].view(tuple(shape)).float()
        for name, shape in shapes.items()
    }


def _from_whole(tagged: Path, first: Mapping[str, Any]) -> ForeignState:
    """Stage 0: module and optimizer as PyTorch has them; positions are all that is known of parameters."""
    if first.get("param_shapes") and any(
        v.numel() == 0 for v in first["module"].values() if isinstance(v, torch.Tensor)
    ):
        raise CheckpointError(f"{tagged} holds parts of parameters, and no *_optim_states.pt: files are missing")
    saved = first.get("optimizer")
    optimizer = None
    if saved is not None:
        if "param_groups" not in saved:
            raise CheckpointError(
                f"{tagged} was saved at stage 0 with the engine's own bf16 or fp16, whose state is tied to it. "
                "Load it with DeepSpeed and save it at stage 1"
            )
        groups = [{**group, "params": [str(p) for p in group["params"]]} for group in saved["param_groups"]]
        optimizer = {**saved, "state": {str(p): v for p, v in saved["state"].items()}, "param_groups": groups}
    weights = {n: v for n, v in first["module"].items() if isinstance(v, torch.Tensor)}
    return _state(first, weights, optimizer, int(first.get("dp_world_size") or 1))


def _state(
    first: Mapping[str, Any],
    trained: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Any] | None,
    world_size: int,
) -> ForeignState:
    buffers = set(first.get("buffer_names") or ())
    weights = dict(trained)
    for name, value in first["module"].items():
        if name in buffers and isinstance(value, torch.Tensor):
            weights[name] = value.float() if value.is_floating_point() else value
    for alias, name in dict(first.get("shared_params") or {}).items():
        if name in weights:
            weights[alias] = weights[name]
    # Names in the order of the module's own state, where that has them.
    known = [n for n in first["module"] if n in weights]
    ordered = {n: weights[n] for n in (*known, *(n for n in weights if n not in first["module"]))}
    scheduler = first.get("lr_scheduler")
    return ForeignState(
        weights=ordered,
        optimizer=optimizer,
        by_position=optimizer is not None and bool(first.get("optimizer")),
        schedulers=[] if scheduler is None else [dict(scheduler)],
        step=int(first.get("global_steps") or 0) - int(first.get("skipped_steps") or 0),
        world_size=world_size,
        notes=["loss scales of fp16 start afresh"],
    )
