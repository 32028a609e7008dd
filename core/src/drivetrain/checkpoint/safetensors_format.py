"""The builtin checkpoint format: safetensors, which holds numbers and nothing that could run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from drivetrain.checkpoint._files import ChecksummedFile, FileRecord
from drivetrain.checkpoint.tensors import dtype_from_name, dtype_name, raw_view
from drivetrain.errors import CheckpointError
from drivetrain.interfaces.checkpoint_format import CheckpointFormat, TensorReader

__all__ = ["SafetensorsFormat", "SafetensorsReader", "write_safetensors"]

#: Dtypes that every version of the library reads. Others are stored as bytes, with the dtype's name in the metadata.
_NATIVE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES_KEY = "drivetrain.dtypes"


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write one safetensors file, fsynced, without a second copy of the data in memory.

    Tensors may live on any device (each is copied to the host when its turn comes), be non-contiguous or share memory. Dtypes that not all readers
    know are stored as bytes.

    Args:
        path: The file; must not exist.
        tensors: Dense tensors by name.
        metadata: Strings for the header.

    Raises:
        OSError: If the file can't be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.safetensors")
        >>> write_safetensors(path, {"w": torch.ones(2, dtype=torch.bfloat16)}, {"format": "pt"}).size == path.stat().st_size
        True
        >>> with SafetensorsReader(path) as reader:
        ...     reader.read("w")
        tensor([1., 1.], dtype=torch.bfloat16)
    """
    # Wide types first keeps every tensor aligned in a mapped file.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize if item[1].dtype in _NATIVE else 0)
    header: dict[str, Any] = {}
    foreign: dict[str, str] = {}
    end = 0
    for name, tensor in ordered:
        kind, shape = _NATIVE.get(tensor.dtype), list(tensor.shape)
        if kind is None:
            foreign[name] = dtype_name(tensor.dtype)
            kind, shape = "U8", [*shape, tensor.dtype.itemsize]
        start, end = end, end + math.prod(tensor.shape) * tensor.dtype.itemsize
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    strings = dict(metadata)
    if foreign:
        strings[_DTYPES_KEY] = json.dumps(foreign)
    text = json.dumps({"__metadata__": strings, **header} if strings else header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with ChecksummedFile(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            file.write(raw_view(tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()))
    return file.record


def _open(path: Path) -> Any:
    return safe_open(path, framework="pt")


class SafetensorsReader(TensorReader):
    """Random access to a safetensors file through a memory map: only what is asked for is read.

    Args:
        path: The file.

    Raises:
        CheckpointError: If it isn't whole, or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = _open(path)
            super().__init__({}, self._file.metadata() or {})
            self._names: list[str] = list(self._file.keys())
            self._foreign = dict(json.loads(self.metadata.pop(_DTYPES_KEY, "{}")))
        except (SafetensorError, OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path} can't be read as safetensors: {error}") from error

    def names(self) -> list[str]:  # noqa: D102
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:  # noqa: D102
        shape = tuple(self._file.get_slice(name).get_shape())
        return shape[:-1] if name in self._foreign else shape

    def dtype(self, name: str) -> torch.dtype:  # noqa: D102
        if name in self._foreign:
            return dtype_from_name(self._foreign[name])
        kind = self._file.get_slice(name).get_dtype()
        dtype = next((d for d, code in _NATIVE.items() if code == kind), None)
        return self.read(name).dtype if dtype is None else dtype  # written by another tool

    def read(self, name: str, region: tuple[slice, ...] | None = None) -> torch.Tensor:  # noqa: D102
        return self.view(name, region).clone(memory_format=torch.contiguous_format)

    def view(self, name: str, region: tuple[slice, ...] | None = None) -> torch.Tensor:  # noqa: D102
        shape = self.shape(name)
        sizes = shape if region is None else tuple(s.stop - s.start for s in region)
        if 0 in sizes:
            return torch.empty(sizes, dtype=self.dtype(name))
        tensor: torch.Tensor = self._file.get_tensor(name) if sizes == shape else self._file.get_slice(name)[region]
        if name in self._foreign:
            tensor = tensor.clone(memory_format=torch.contiguous_format)  # the bytes may lie unaligned
            tensor = tensor.view(dtype_from_name(self._foreign[name])).squeeze(-1)
        return tensor

    def close(self) -> None:  # noqa: D102
        self._file.__exit__(None, None, None)


class SafetensorsFormat(CheckpointFormat):
    """Safetensors files, readable by every tool that knows them.

    Example:
        >>> from drivetrain.specs import CheckpointFormatSpec
        >>> SafetensorsFormat(CheckpointFormatSpec(name="safetensors", suffix=".safetensors")).spec.suffix
        '.safetensors'
    """

    def write(self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:  # noqa: D102
        return write_safetensors(path, tensors, metadata).checksum

    def read(self, path: Path) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: D102
        with self.open(path) as reader:
            for name in reader.names():
                yield name, reader.read(name)

    def metadata(self, path: Path) -> dict[str, str]:  # noqa: D102
        with self.open(path) as reader:
            return reader.metadata

    def open(self, path: Path) -> SafetensorsReader:  # noqa: D102
        return SafetensorsReader(path)
