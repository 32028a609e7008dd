"""Reading files that other programs pickled, by a fixed list of what may be built. Only conversions use it.

A pickle is a program. Here it may build numbers, strings, containers, tensors and NumPy arrays, and, for the table of contents of torch's distributed
checkpoints, the few records that stand in it; the first mention of anything else ends the reading.
"""

from __future__ import annotations

import codecs
import io
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drivetrain.errors import CheckpointError

__all__ = ["load_plain", "load_records"]

_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
}
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)|Trying to call (?:reduce|instantiate)[^`]*`?([\w.]+)")


def load_plain(source: Path | bytes, *, name: str = "", stand_ins: Mapping[str, type] | None = None) -> Any:
    """What ``torch.save`` wrote, if it is plain data, tensors and NumPy arrays; on the CPU, and from a file mapped where that goes.

    Args:
        source: A file, or its content.
        name: For messages.
        stand_ins: Classes that are built instead of those that the file names, by their dotted names: plain ones, such as ``int`` for an enumeration.
            What the file names is never imported.

    Raises:
        CheckpointError: If it holds anything else, or is damaged.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "a.bin")
        >>> torch.save({"w": torch.ones(2)}, path)
        >>> load_plain(path)
        {'w': tensor([1., 1.])}
    """
    name = name or str(source)
    mapped = isinstance(source, Path) and zipfile.is_zipfile(source)
    added = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # what others allow in this process isn't allowed here
    try:
        with torch.serialization.safe_globals(
            [*_numpy_globals(), *((kind, found) for found, kind in (stand_ins or {}).items())]
        ):
            where = source if isinstance(source, Path) else io.BytesIO(source)
            return torch.load(where, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        found = _GLOBAL.search(str(error))
        what = next(filter(None, found.groups()), "") if found else ""
        what = f"mentions {what}, which is no plain data" if what else "holds more than plain data"
        raise CheckpointError(f"{name} {what}: it was not read") from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{name} can't be read: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error
    finally:
        torch.serialization.add_safe_globals(added)


def load_records(path: Path) -> Any:
    """The table of contents of a distributed checkpoint of torch's.

    Raises:
        CheckpointError: If it mentions anything that doesn't belong there, or is damaged.
    """
    try:
        with path.open("rb") as file:
            return _Records(file, str(path)).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises what it likes
        raise CheckpointError(f"{path} can't be read: {type(error).__name__}: {error}") from error


class _Records(pickle.Unpickler):
    def __init__(self, file: Any, name: str) -> None:
        super().__init__(file)
        self._name = name

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module == "builtins" and name in ("set", "frozenset"):
            return {"set": set, "frozenset": frozenset}[name]
        if name in _RECORDS.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(f"{self._name} mentions {module}.{name}, which doesn't belong there: it was not read")

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointError(f"{self._name} refers to data elsewhere: it was not read")


def _numpy_globals() -> list[Any]:
    """What NumPy arrays of numbers consist of, under the names of both of its generations."""
    reconstruct = np.empty(0).__reduce__()[0]
    kinds = [type(np.dtype(kind)) for kind in ("u1", "i4", "u4", "i8", "u8", "f4", "f8")]
    return [
        (reconstruct, "numpy.core.multiarray._reconstruct"),
        (reconstruct, "numpy._core.multiarray._reconstruct"),
        np.ndarray,
        np.dtype,
        (codecs.encode, "_codecs.encode"),
        *kinds,
    ]
