"""Weights in files that other programs wrote: pickles of ``torch.save``, and directories of torch's distributed checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint.export import read_weights
from drivetrain.checkpoint.unpickling import load_plain, load_records
from drivetrain.errors import CheckpointError

__all__ = ["ForeignWeights", "read_foreign_weights"]

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_INDEX = "pytorch_model.bin.index.json"


@dataclass(slots=True)
class ForeignWeights:
    """What was read.

    Args:
        weights: Tensors by name.
        left_out: Names of other things that stood there.
    """

    weights: dict[str, torch.Tensor]
    left_out: list[str] = field(default_factory=list)


def read_foreign_weights(path: Path, *, key: str = "", progress: Callable[[int], None] | None = None) -> ForeignWeights:
    """Weights of a ``.bin`` or ``.pt`` file, of a directory with such files, or of a distributed checkpoint of torch's. Runs nothing that stands in them.

    Args:
        path: The file or directory.
        key: The entry that holds the weights, where there are others (``"model"``); with dots for nested ones.
        progress: Called with the bytes of each piece that was read.

    Raises:
        CheckpointError: If they can't be read, hold more than plain data, or ``key`` must be given.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.pt")
        >>> torch.save({"model": {"w": torch.ones(2)}, "epoch": 3}, path)
        >>> read_foreign_weights(path)
        ForeignWeights(weights={'w': tensor([1., 1.])}, left_out=['epoch'])
    """
    tell = progress or (lambda nbytes: None)
    if not path.exists():
        raise CheckpointError(f"{path} doesn't exist")
    if not path.is_dir():
        if path.suffix not in _PICKLES:
            raise CheckpointError(f"{path} is none of the files that are converted: {', '.join(_PICKLES)}")
        return _from_pickle(path, key, tell)
    if (path / ".metadata").is_file():
        return _from_distributed(path, key, tell)
    if (path / _INDEX).is_file():
        return _from_shards(path, key, tell)
    found = sorted(p for p in path.iterdir() if p.suffix in _PICKLES and "model" in p.name)
    if len(found) == 1:
        return _from_pickle(found[0], key, tell)
    if list(path.glob("*.safetensors")):
        read_weights(path)
        raise CheckpointError(f"{path} holds safetensors already, which everything here reads as they are")
    names = ", ".join(p.name for p in found) or "none"
    raise CheckpointError(f"{path} holds no weights that are known by their names (found: {names}): give the file")


def _from_pickle(path: Path, key: str, tell: Callable[[int], None]) -> ForeignWeights:
    content = load_plain(path)
    tell(path.stat().st_size)
    return _choose(content, key, str(path))


def _from_shards(folder: Path, key: str, tell: Callable[[int], None]) -> ForeignWeights:
    try:
        table = json.loads((folder / _INDEX).read_bytes())["weight_map"]
        files = sorted({str(name) for name in table.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / _INDEX} is no index of weights: {error}") from error
    result = ForeignWeights({})
    for name in files:
        if "/" in name or "\\" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{folder / _INDEX} names a file outside of its directory: {name!r}")
        part = _from_pickle(folder / name, key, tell)
        result.weights.update(part.weights)
        result.left_out += part.left_out
    missing = sorted(set(table) - set(result.weights))
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing[:5])}, which its index says it has")
    return result


def _choose(content: Any, key: str, where: str) -> ForeignWeights:
    """The mapping of names to tensors in a nest of mappings."""
    for part in filter(None, key.split(".")):
        if not isinstance(content, Mapping) or part not in content:
            known = ", ".join(map(str, content)) if isinstance(content, Mapping) else "nothing"
            raise CheckpointError(f"{where} has no entry {key!r}; it has {known}")
        content = content[part]
    if isinstance(content, torch.Tensor):
        return ForeignWeights({key.rpartition(".")[2] or "tensor": content})
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{where} holds a {type(content).__name__}, not weights by name")
    if any(isinstance(value, torch.Tensor) for value in content.values()):
        weights = {str(n): v for n, v in content.items() if isinstance(v, torch.Tensor)}
        return ForeignWeights(weights, [str(n) for n in content if str(n) not in weights])
    inside = [str(name) for name, value in content.items() if _holds_weights(value)]
    if len(inside) == 1:
        chosen = _choose(content[inside[0]], "", where)
        return ForeignWeights(chosen.weights, chosen.left_out + [str(n) for n in content if str(n) != inside[0]])
    what = f"several sets of weights ({', '.join(inside)}): choose one with --key" if inside else "no weights by name"
    raise CheckpointError(f"{where} holds {what}")


def _holds_weights(value: Any) -> bool:
    return isinstance(value, Mapping) and any(isinstance(v, torch.Tensor) for v in value.values())


def _from_distributed(folder: Path, key: str, tell: Callable[[int], None]) -> ForeignWeights:
    records = load_records(folder / ".metadata")
    try:
        entries = dict(records.state_dict_metadata)
        storage = dict(records.storage_data)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / '.metadata'} is no table of contents: {error}") from error
    prefix = _prefix(entries, key, folder)
    result = ForeignWeights({})
    for name, entry in entries.items():
        if not name.startswith(prefix) or not hasattr(entry, "chunks"):
            result.left_out.append(name)
            continue
        result.weights[name.removeprefix(prefix)] = tensor = _assemble(folder, name, entry, storage)
        tell(tensor.nbytes)
    return result


def _prefix(entries: Mapping[str, Any], key: str, folder: Path) -> str:
    tops = list(dict.fromkeys(name.partition(".")[0] for name in entries))
    if not key and "model" in tops:
        key = "model"
    if key:
        if not any(name.startswith(f"{key}.") for name in entries):
            raise CheckpointError(f"{folder} has no entry {key!r}; it has {', '.join(tops[:20])}")
        return f"{key}."
    if any(top in ("optim", "optimizer") for top in tops):
        raise CheckpointError(f"{folder} holds {', '.join(tops[:20])}: choose the weights with --key")
    return ""


def _assemble(folder: Path, name: str, entry: Any, storage: Mapping[Any, Any]) -> torch.Tensor:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    try:
        whole = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        covered = 0
        for chunk in entry.chunks:
            info = storage[MetadataIndex(name, torch.Size(chunk.offsets))]
            part = _chunk(folder, name, info)
            if tuple(part.shape) != tuple(chunk.sizes) or part.dtype != whole.dtype:
                raise CheckpointError(f"{folder}: a piece of {name} has another shape than the table of contents says")
            region = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[region].copy_(part)
            covered += part.numel()
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: {name} can't be put together: {type(error).__name__}: {error}") from error
    if covered != whole.numel():
        raise CheckpointError(f"{folder}: pieces of {name} are missing: {covered} of {whole.numel()} values found")
    return whole


def _chunk(folder: Path, name: str, info: Any) -> torch.Tensor:
    path = str(info.relative_path)
    if "/" in path or "\\" in path or path in ("", ".", ".."):
        raise CheckpointError(f"{folder / '.metadata'} names a file outside of its directory: {path!r}")
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"{folder}: {name} is stored compressed ({info.transform_descriptors}), which isn't read here"
        )
    try:
        with (folder / path).open("rb") as file:
            file.seek(info.offset)
            data = file.read(info.length)
    except OSError as error:
        raise CheckpointError(f"{folder / path} can't be read: {error.strerror}") from error
    tensor = load_plain(data, name=f"{folder / path} ({name})")
    if not isinstance(tensor, torch.Tensor):
        raise CheckpointError(f"{folder / path} holds a {type(tensor).__name__} for {name}")
    return tensor
