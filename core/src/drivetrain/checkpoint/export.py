"""Weights alone, as other tools read and write them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint._files import explain_os_error, fsync_directory, temporary_name, write_file
from drivetrain.checkpoint.layout import shard_file, shard_names
from drivetrain.checkpoint.location import Location, RemotePath, locate
from drivetrain.checkpoint.safetensors_format import SafetensorsReader, write_safetensors
from drivetrain.checkpoint.tensors import is_dtensor, tensor_identity
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.specs import ProcessInfo

__all__ = ["load_model_weights", "parse_size", "read_weights", "save", "save_model", "without_aliases"]

_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_size(size: int | str) -> int:
    """Bytes of a size.

    Raises:
        ConfigurationError: If it is none.

    Example:
        >>> parse_size("10GB"), parse_size("1.5 MiB"), parse_size(5)
        (10000000000, 1572864, 5)
    """
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", size)
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigurationError(
            f"{size!r} is no size: write a number and KB, MB, GB, TB, KiB, MiB, GiB or TiB, as in '10GB'"
        )
    return int(float(match[1]) * _UNITS[match[2].upper()])


def save_model(
    state: Mapping[str, Any],
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> list[Location]:
    """Save a model's weights in the layout of ``save_pretrained``: ``model.safetensors``, or shards with ``model.safetensors.index.json``.

    Tied weights are stored once, with their other names in the file's metadata. Each file appears whole or not at all; files of an earlier save that
    this one doesn't replace are removed. Not collective: call it on the process that writes.

    Args:
        state: Tensors by name, put together (no DTensors); other values are refused, but for None.
        directory: Where to, a path or a URL of fsspec's; made if it doesn't exist.
        max_shard_size: Largest file, in bytes or as in "10GB"; a larger tensor has a file of its own.
        safe_serialization: With False, ``pytorch_model.bin`` in pickle format, for tools that read nothing else.

    Returns:
        The files, the index last.

    Raises:
        CheckpointError: If they can't be written, or a value is no dense tensor.

    Example:
        >>> import tempfile
        >>> files = save_model(torch.nn.Linear(2, 2).state_dict(), tempfile.mkdtemp(), max_shard_size=16)
        >>> [f.name for f in files]
        ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors', 'model.safetensors.index.json']
    """
    place = locate(directory)
    if isinstance(place, RemotePath):
        return _save_remote(state, place, max_shard_size, safe_serialization)
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: give save_model a directory")
    stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
    tensors, aliases = without_aliases(state)
    if not safe_serialization:
        aliases, tensors = {}, dict(_checked(state))  # torch.save keeps sharing within a file by itself
    limit = parse_size(max_shard_size)
    shards = shard_names({name: t.nbytes for name, t in tensors.items()}, limit) or [[]]
    written: list[Location] = []
    with explain_os_error(f"the weights can't be saved in {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        for i, names in enumerate(shards):
            path = folder / (shard_file(stem, i, len(shards)) + suffix)
            part = {name: tensors[name] for name in names}
            with _replacing(path) as temporary:
                if safe_serialization:
                    others = {a: kept for a, kept in aliases.items() if kept in part and a != "format"}
                    write_safetensors(temporary, part, {"format": "pt", **others})
                else:
                    _pickle(part, temporary)
            written.append(path)
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
                "weight_map": {name: path.name for path, names in zip(written, shards, strict=True) for name in names},
            }
            path = folder / f"{stem}{suffix}.index.json"
            with _replacing(path) as temporary:
                write_file(temporary, json.dumps(index, indent=2).encode())
            written.append(path)
        _remove_stale(folder, stem, suffix, keep=written)
        fsync_directory(folder)
    return written


def _save_remote(
    state: Mapping[str, Any], place: RemotePath, max_shard_size: int | str, safe_serialization: bool
) -> list[Location]:
    """Through a temporary directory; the index, or the only file, appears last."""
    with tempfile.TemporaryDirectory() as folder:
        files = save_model(state, folder, max_shard_size=max_shard_size, safe_serialization=safe_serialization)
        with explain_os_error(f"the weights can't be saved in {place}"):
            for file in files:
                assert isinstance(file, Path)
                (place / file.name).upload(file)
            stem, suffix = ("model", ".safetensors") if safe_serialization else ("pytorch_model", ".bin")
            pattern, kept = _files_of(stem, suffix), {file.name for file in files}
            for name in place.sizes():
                if pattern.fullmatch(name) and name not in kept:
                    (place / name).remove()
    return [place / file.name for file in files]


def read_weights(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """All weights of a safetensors file, of a sharded set (by its directory or index), or of the first model of a checkpoint.

    Other names of tied weights are filled in. Pickle files are refused: nothing here runs code that stands in a file.

    Raises:
        CheckpointError: If there are none, or they are damaged.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> _ = save_model({"w": torch.ones(1)}, folder)
        >>> read_weights(folder)
        {'w': tensor([1.])}
    """
    place = locate(path)
    if isinstance(place, RemotePath):
        return _read_remote(place)
    weights: dict[str, torch.Tensor] = {}
    for file, names in _weight_files(Path(path)):
        with SafetensorsReader(file) as reader:
            present = set(reader.names())
            if names is not None and not names <= present:
                raise CheckpointError(
                    f"{file} lacks {', '.join(sorted(names - present)[:5])}, which the index says it has"
                )
            weights.update((name, reader.read(name)) for name in (reader.names() if names is None else sorted(names)))
            others = {a: k for a, k in reader.metadata.items() if k in present and a not in present and a != "format"}
        weights.update((alias, weights[kept]) for alias, kept in others.items() if kept in weights)
    return weights


def _read_remote(place: RemotePath) -> dict[str, torch.Tensor]:
    """Through copies in a temporary directory."""
    with tempfile.TemporaryDirectory() as folder, explain_os_error(f"{place} can't be read"):
        single = place.is_file()
        names = (
            [place.name] if single else [n for n in place.sizes() if _files_of("model", ".safetensors").fullmatch(n)]
        )
        base = place.parent if single else place
        if single and place.name.endswith(".json"):
            names = [n for n in base.sizes() if n == place.name or n.endswith(".safetensors")]
        for name in names:
            (base / name).download(Path(folder, name))
        try:
            return read_weights(Path(folder, place.name) if single else folder)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(folder, str(base))) from None


def load_model_weights(
    model: torch.nn.Module, path: str | os.PathLike[str], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load weights that `save_model`, a checkpoint or another tool saved into a model that isn't prepared yet.

    Args:
        model: The model.
        path: As for `read_weights`.
        strict: Whether missing and unexpected names are an error.

    Returns:
        Names that are missing and names that are unexpected. A name that is tied to one that was loaded isn't missing.

    Raises:
        CheckpointError: If names or shapes don't fit.
    """
    weights = read_weights(path)
    template = model.state_dict()
    loaded = {tensor_identity(t) for n, t in template.items() if n in weights and isinstance(t, torch.Tensor)}
    missing = [
        n
        for n, t in template.items()
        if n not in weights and not (isinstance(t, torch.Tensor) and tensor_identity(t) in loaded)
    ]
    unexpected = [n for n in weights if n not in template]
    problems = [
        f"{n} has shape {list(weights[n].shape)} in the file and {list(t.shape)} in the model"
        for n, t in template.items()
        if n in weights and isinstance(t, torch.Tensor) and t.shape != weights[n].shape
    ]
    if strict:
        problems += [
            f"{kind}: {', '.join(n[:10])}" for kind, n in (("missing", missing), ("unexpected", unexpected)) if n
        ]
    if problems:
        raise CheckpointError(f"{path} doesn't fit {type(model).__name__}: {'; '.join(problems)}")
    model.load_state_dict(weights, strict=False)
    return missing, unexpected


def save(
    obj: Any,
    f: str | os.PathLike[str],
    *,
    process: ProcessInfo | None = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Save an object to a file on the main process (of each machine); does nothing on the others. The file appears whole or not at all.

    Args:
        obj: Anything that ``torch.save`` takes, or, with ``safe_serialization``, tensors by name.
        f: The file.
        process: Who this process is.
        save_on_each_node: Whether the main process of each machine writes.
        safe_serialization: As safetensors instead of a pickle.

    Raises:
        CheckpointError: If it can't be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "w.safetensors")
        >>> save({"w": torch.ones(1)}, path, safe_serialization=True)
        >>> read_weights(path)
        {'w': tensor([1.])}
    """
    process = process or ProcessInfo()
    if (process.local_rank if save_on_each_node else process.rank) != 0:
        return
    place = locate(f)
    if isinstance(place, RemotePath):
        with tempfile.TemporaryDirectory() as folder, explain_os_error(f"{place} can't be saved"):
            save(obj, Path(folder, place.name), safe_serialization=safe_serialization)
            place.upload(Path(folder, place.name))
        return
    path = Path(f)
    with explain_os_error(f"{path} can't be saved"), _replacing(path) as temporary:
        if safe_serialization:
            tensors, aliases = without_aliases(obj)
            write_safetensors(temporary, tensors, {"format": "pt", **aliases})
        else:
            _pickle(obj, temporary)


def _pickle(obj: Any, path: Path) -> None:
    # Through a file of Python's, which reports a missing folder or a full disk as what it is.
    with path.open("xb") as file:
        torch.save(obj, file)
        file.flush()
        os.fsync(file.fileno())


def _checked(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in state.items():
        if value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_meta:
            raise CheckpointError(
                f"{name} is no dense tensor with values ({type(value).__name__}): weights can only be tensors"
            )
        if is_dtensor(value):
            raise CheckpointError(f"{name} is sharded: pass what accelerator.get_state_dict(model) returns")
        yield name, value.detach()


def without_aliases(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Weights with tied ones once, and the other names of those."""
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, tensor in _checked(state):
        kept = first.setdefault(tensor_identity(tensor), name)
        if kept == name:
            tensors[name] = tensor
        else:
            aliases[name] = kept
    return tensors, aliases


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Write to the temporary file given; if that goes well it gets the name."""
    temporary = path.parent / temporary_name(path.name, "saving")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _files_of(stem: str, suffix: str) -> re.Pattern[str]:
    return re.compile(re.escape(stem) + r"(-\d{5}-of-\d{5})?" + re.escape(suffix) + r"(\.index\.json)?")


def _remove_stale(folder: Path, stem: str, suffix: str, *, keep: Iterable[Location]) -> None:
    pattern = _files_of(stem, suffix)
    kept = set(keep)
    for path in folder.iterdir():
        if pattern.fullmatch(path.name) and path not in kept:
            path.unlink()


def _weight_files(path: Path) -> Iterator[tuple[Path, set[str] | None]]:
    """Files of weights, with the names to take from each; None for all."""
    if path.is_dir():
        index = path / "model.safetensors.index.json"
        single = path / "model.safetensors"
        path = index if index.is_file() else single
        if not path.is_file():
            raise CheckpointError(f"{path.parent} has neither {index.name} nor {single.name}.{_pickles(path.parent)}")
    if not path.name.endswith(".json"):
        if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"):
            raise CheckpointError(
                f"{path} is a pickle, which could run code when it is read: `drivetrain checkpoint convert` makes safetensors of it, and runs nothing"
            )
        yield path, None
        return
    try:
        table = json.loads(path.read_bytes())["weight_map"]
        files: dict[str, set[str]] = {}
        for name, file in table.items():
            files.setdefault(file, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of weights: {error}") from error
    for file, names in files.items():
        if file in ("", ".", "..") or "/" in file or "\\" in file:
            raise CheckpointError(f"{path} names a file outside of its directory: {file!r}")
        yield path.parent / file, names


def _pickles(folder: Path) -> str:
    found = sorted(p.name for p in folder.glob("*.bin"))
    return (
        f" {found[0]} is a pickle, which could run code when it is read: `drivetrain checkpoint convert` makes safetensors of it, and runs nothing"
        if found
        else ""
    )
