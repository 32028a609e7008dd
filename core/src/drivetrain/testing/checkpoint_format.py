"""Conformance of checkpoint formats: subclass `CheckpointFormatConformance` in a test file, say which format, and run pytest.

class TestToyFormat(CheckpointFormatConformance):
    spec = TOY
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain._lazy import load_target
from drivetrain.checkpoint import CheckpointManager, checksum_file
from drivetrain.interfaces.checkpoint_format import CheckpointFormat
from drivetrain.specs import CheckpointFormatSpec
from drivetrain.testing.sessions import PlainSession

__all__ = ["DTYPES", "HARD_STRINGS", "SHAPES", "CheckpointFormatConformance"]

#: Dtypes that models, optimizers and loaders hold.
DTYPES: tuple[torch.dtype, ...] = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
)

#: 0-dim, empty, and others.
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (2, 0, 3), (1,), (7,), (3, 5), (2, 3, 4, 5))

#: Names and metadata that have broken formats.
HARD_STRINGS: tuple[str, ...] = (
    "weight",
    "module.layers.0.weight",
    "a/b",
    "../x",
    "with space",
    "é ü 漢",
    '"quoted" \\ back',
    "line\nbreak",
    "x" * 500,
    "format",
    "__metadata__x",
)


class _Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _filled(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """All bytes differ, so that order shows; booleans are 0 or 1."""
    count = 1
    for n in shape:
        count *= n
    if dtype is torch.bool:
        return (torch.arange(count) % 3 == 0).view(shape)
    raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).mul(37).add(11).remainder(251).to(torch.uint8)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


class CheckpointFormatConformance:
    """What every checkpoint format must do: the promises of `drivetrain.interfaces.CheckpointFormat`.

    Attributes:
        spec: The format's descriptor.

    Example:
        >>> class TestSafetensors(CheckpointFormatConformance):
        ...     spec = CheckpointFormatSpec(
        ...         name="safetensors", suffix=".safetensors", target="drivetrain.checkpoint.safetensors_format:SafetensorsFormat"
        ...     )
        >>> TestSafetensors().make_format().spec.name
        'safetensors'
    """

    spec: CheckpointFormatSpec

    def make_format(self) -> CheckpointFormat:
        """A new instance."""
        made: CheckpointFormat = load_target(self.spec.target)(self.spec)
        return made

    def path(self, directory: Path) -> Path:
        """A file that doesn't exist yet."""
        return directory / f"tensors{self.spec.suffix}"

    def store(self, directory: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
        """Write a file and check the checksum that came of it."""
        path = self.path(directory)
        checksum = self.make_format().write(path, tensors, metadata or {})
        assert checksum in (None, checksum_file(path)), (
            f"write() returned the checksum {checksum}, not {checksum_file(path)}"
        )
        return path

    def check(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        """Each tensor is read once, with its dtype, shape and every bit, on the CPU."""
        read = list(self.make_format().read(path))
        names = [name for name, _ in read]
        assert sorted(names) == sorted(tensors), f"stored {sorted(tensors)}, read {sorted(names)}"
        for name, tensor in read:
            expected = tensors[name]
            assert tensor.device.type == "cpu"
            assert tensor.dtype is expected.dtype, f"{name!r} was {expected.dtype}, and is {tensor.dtype}"
            assert tensor.shape == expected.shape, f"{name!r} was {tuple(expected.shape)}, and is {tuple(tensor.shape)}"
            assert torch.equal(_bits(tensor), _bits(expected.detach().resolve_conj())), (
                f"the values of {name!r} changed"
            )

    # -- what is stored --------------------------------------------------------------------------------------------------------

    def test_its_suffix(self) -> None:
        """Begins with a dot, so that files are known by it."""
        assert self.spec.suffix.startswith(".") and len(self.spec.suffix) > 1, f"the suffix is {self.spec.suffix!r}"

    def test_every_dtype_and_shape(self, tmp_path: Path) -> None:
        """`DTYPES` and `SHAPES`, bit for bit, in one file."""
        tensors = {f"{str(d)[6:]}{list(s)}": _filled(d, s) for d in DTYPES for s in SHAPES}
        self.check(self.store(tmp_path, tensors), tensors)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
    def test_special_values(self, tmp_path: Path, dtype: torch.dtype) -> None:
        """NaN, infinities, minus zero, the smallest and the largest number."""
        limits = torch.finfo(dtype)
        values = [float("nan"), float("inf"), -float("inf"), -0.0, limits.tiny, limits.max, limits.smallest_normal / 2]
        tensors = {"special": torch.tensor(values, dtype=dtype)}
        self.check(self.store(tmp_path, tensors), tensors)

    def test_tensors_of_any_layout(self, tmp_path: Path) -> None:
        """Transposed, expanded, strided, sharing memory, with gradients, channels last, conjugated, parameters."""
        base = torch.arange(24.0).view(4, 6)
        tensors = {
            "transposed": base.T,
            "expanded": base[:1].expand(3, 6),
            "strided": base[::2, 1::2],
            "shared": base[1:],
            "shared again": base[1:],
            "with gradient": (base.clone().requires_grad_() * 2),
            "parameter": torch.nn.Parameter(base.clone()),
            "channels last": torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "conjugated": torch.complex(base, -base).conj(),
            "offset": torch.arange(10, dtype=torch.int64)[3:],
        }
        self.check(self.store(tmp_path, tensors), tensors)
        assert base.is_contiguous() and base.requires_grad is False, "writing changed the tensors"

    def test_hard_names(self, tmp_path: Path) -> None:
        """`HARD_STRINGS` as names of tensors; nothing is written elsewhere."""
        tensors = {name: torch.full((2,), float(i)) for i, name in enumerate(HARD_STRINGS)}
        room = tmp_path / "a" / "b"
        room.mkdir(parents=True)
        path = self.store(room, tensors)
        self.check(path, tensors)
        assert [p for p in tmp_path.rglob("*") if p.is_file()] == [path], "files were written beside the one asked for"

    def test_no_tensors_and_many(self, tmp_path: Path) -> None:
        """None at all, and 2,000."""
        (tmp_path / "none").mkdir()
        self.check(self.store(tmp_path / "none", {}, {"a": "b"}), {})
        tensors = {f"t{i}": torch.full((i % 3,), i) for i in range(2000)}
        self.check(self.store(tmp_path, tensors), tensors)

    def test_metadata(self, tmp_path: Path) -> None:
        """The strings given to ``write``, and no others; also without any."""
        metadata = {text: text[::-1] for text in HARD_STRINGS} | {"empty": ""}
        path = self.store(tmp_path, {"w": torch.ones(2)}, metadata)
        assert self.make_format().metadata(path) == metadata
        (tmp_path / "none").mkdir()
        assert (
            self.make_format().metadata(self.store(tmp_path / "none", {"w": torch.ones(2, dtype=torch.uint16)})) == {}
        )

    def test_what_is_written_is_on_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The file is fsynced, whole, before ``write`` returns."""
        synced: list[tuple[int, int]] = []

        def watch(name: str) -> None:
            real: Callable[[int], None] = getattr(os, name)

            def sync(descriptor: Any) -> None:
                number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
                real(number)
                state = os.fstat(number)
                synced.append((state.st_ino, state.st_size))

            monkeypatch.setattr(os, name, sync)

        for name in ("fsync", "fdatasync"):
            if hasattr(os, name):
                watch(name)
        path = self.store(tmp_path, {"w": torch.ones(100_000)})
        state = path.stat()
        assert (state.st_ino, state.st_size) in synced, "the file wasn't fsynced when it was whole"

    # -- how it is read --------------------------------------------------------------------------------------------------------

    def test_reading_runs_nothing(self, tmp_path: Path) -> None:
        """A file whose content is a pickle, as ``torch.save`` writes it or bare, alone or behind a file of this format, makes nothing run."""
        trap = tmp_path / "sprung"
        good = self.store(tmp_path, {"w": torch.ones(2)}).read_bytes()
        bare = pickle.dumps(_Trap(trap))
        torch.save({"w": _Trap(trap)}, tmp_path / "saved")
        for number, content in enumerate((bare, (tmp_path / "saved").read_bytes(), good + bare, bare + good)):
            path = tmp_path / f"bad{number}{self.spec.suffix}"
            path.write_bytes(content)
            for use in (self._read_all, self._open_all, lambda p: self.make_format().metadata(p)):
                with _any_error():
                    use(path)
                assert not trap.exists(), "reading a file ran what stood in it"

    def test_damage_is_an_error(self, tmp_path: Path) -> None:
        """A file that is cut short, empty, or something else entirely is never read as if it were whole."""
        tensors = {"a": torch.arange(1000.0), "b": torch.arange(1000)}
        good = self.store(tmp_path, tensors).read_bytes()
        for number, content in enumerate((good[: len(good) // 2], good[:-1], good[:4], b"", b"\xff" * 64, b"text")):
            path = tmp_path / f"bad{number}{self.spec.suffix}"
            path.write_bytes(content)
            with pytest.raises(Exception) as error:
                self._read_all(path)
            assert not isinstance(error.value, MemoryError), "a damaged file made it ask for all memory"

    def test_random_access(self, tmp_path: Path) -> None:
        """``open``: names, shapes, dtypes, blocks of a tensor in memory of their own, and views; for each dtype."""
        tensors = {str(dtype): _filled(dtype, (6, 5)) for dtype in DTYPES} | {"scalar": torch.tensor(3.5)}
        path = self.store(tmp_path, tensors, {"key": "value"})
        region = (slice(2, 5), slice(1, 2))
        with self.make_format().open(path) as reader:
            assert sorted(reader.names()) == sorted(tensors)
            assert reader.metadata == {"key": "value"}, f"the reader's metadata is {reader.metadata}"
            for name, tensor in tensors.items():
                assert reader.shape(name) == tuple(tensor.shape) and reader.dtype(name) is tensor.dtype, name
                block = tensor[region] if tensor.ndim else tensor
                for got in (
                    reader.read(name, region if tensor.ndim else None),
                    reader.view(name, region if tensor.ndim else None),
                ):
                    assert got.dtype is tensor.dtype and got.shape == block.shape, f"a block of {name}"
                    assert torch.equal(_bits(got), _bits(block)), f"a block of {name} has other values"
            mine = reader.read("torch.float32")
            mine.fill_(0)
            assert torch.equal(reader.read("torch.float32"), tensors["torch.float32"]), "read() shares memory"
            empty = reader.read("torch.float32", (slice(3, 3), slice(0, 5)))
            assert empty.shape == (0, 5)
        assert torch.equal(mine, torch.zeros(6, 5)), "what was read doesn't outlive the reader"

    def _read_all(self, path: Path) -> Any:
        return dict(self.make_format().read(path))

    def _open_all(self, path: Path) -> Any:
        with self.make_format().open(path) as reader:
            return [reader.read(name) for name in reader.names()]

    # -- in a checkpoint -------------------------------------------------------------------------------------------------------

    def test_a_checkpoint_in_this_format(self, tmp_path: Path) -> None:
        """Saved, verified and loaded: model, optimizer, and a tied parameter, bit for bit."""
        model, optimizer = _trained()
        made = self.make_format()
        saving = CheckpointManager(PlainSession([model], [optimizer]), format=made, find_format=lambda name: made)
        directory = tmp_path / "checkpoint"
        saving.save_state(directory)
        files = list(directory.rglob(f"*{self.spec.suffix}"))
        assert files, "the checkpoint has no file of this format"
        other, other_optimizer = _trained(steps=0)
        CheckpointManager(
            PlainSession([other], [other_optimizer]), format=made, find_format=lambda name: made
        ).load_state(directory)
        for name, value in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], value), f"{name} changed on its way through a checkpoint"
        for mine, theirs in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
            assert all(torch.equal(torch.as_tensor(theirs[k]), torch.as_tensor(v)) for k, v in mine.items())


class _any_error:
    """A block in which errors are fine."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        return isinstance(error, Exception)


def _trained(steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(steps)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3, dtype=torch.bfloat16)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.ones(2, 3)
        (model["a"](x).sum() + model["b"](x.bfloat16()).sum().float()).backward()
        optimizer.step()
    return model, optimizer
