"""Each promise of CheckpointFormatConformance is shown to be checked: a format that breaks it fails the test of that promise."""

import os
import pickle
import zlib

import pytest
import torch

from drivetrain.checkpoint.safetensors_format import SafetensorsFormat, SafetensorsReader
from drivetrain.interfaces import CheckpointFormat
from drivetrain.interfaces.checkpoint_format import TensorReader
from drivetrain.specs import CheckpointFormatSpec
from drivetrain.testing.checkpoint_format import CheckpointFormatConformance

SPEC = CheckpointFormatSpec(name="planted", suffix=".bin")


class Kit(CheckpointFormatConformance):
    def __init__(self, fault, suffix=".bin"):
        self.fault = fault
        self.spec = CheckpointFormatSpec(name="planted", suffix=suffix)

    def make_format(self):
        return self.fault(self.spec)


class Changed(SafetensorsFormat):
    """What is written passes through `change`."""

    def change(self, name, tensor):
        return name, tensor

    def write(self, path, tensors, metadata):
        return super().write(path, dict(self.change(n, t) for n, t in tensors.items()), metadata)


class WidensBFloat16(Changed):
    def change(self, name, tensor):
        return name, tensor.float() if tensor.dtype is torch.bfloat16 else tensor


class MakesScalarsVectors(Changed):
    def change(self, name, tensor):
        return name, tensor.reshape(1) if tensor.ndim == 0 else tensor


class LosesEmptyTensors(SafetensorsFormat):
    def write(self, path, tensors, metadata):
        return super().write(path, {n: t for n, t in tensors.items() if t.numel()}, metadata)


class BooleansAsBytes(Changed):
    def change(self, name, tensor):
        return name, tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor


class ThroughNumbers(Changed):
    """As text would: minus zero and the payload of NaN are lost."""

    def change(self, name, tensor):
        return name, tensor.detach().nan_to_num(nan=0.0) if tensor.is_floating_point() else tensor


class IgnoresStrides(Changed):
    def change(self, name, tensor):
        flat = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,)) if tensor._is_view() else tensor
        return name, flat.clone().reshape(tensor.shape)


class SanitizesNames(Changed):
    def change(self, name, tensor):
        return name.replace("/", "."), tensor


class LiesAboutTheChecksum(SafetensorsFormat):
    def write(self, path, tensors, metadata):
        super().write(path, tensors, metadata)
        return "crc32:00000000"


@pytest.mark.parametrize(
    ("fault", "name", "message"),
    [
        (WidensBFloat16, "test_every_dtype_and_shape", "was torch.bfloat16, and is torch.float32"),
        (MakesScalarsVectors, "test_every_dtype_and_shape", r"was \(\), and is \(1,\)"),
        (LosesEmptyTensors, "test_every_dtype_and_shape", "stored"),
        (BooleansAsBytes, "test_every_dtype_and_shape", "was torch.bool"),
        (IgnoresStrides, "test_tensors_of_any_layout", "the values of .* changed"),
        (SanitizesNames, "test_hard_names", "stored"),
        (LiesAboutTheChecksum, "test_no_tensors_and_many", "returned the checksum"),
    ],
)
def test_contents(tmp_path, fault, name, message):
    with pytest.raises(AssertionError, match=message):
        getattr(Kit(fault), name)(tmp_path)


def test_special_values(tmp_path):
    with pytest.raises(AssertionError, match="the values of 'special' changed"):
        Kit(ThroughNumbers).test_special_values(tmp_path, torch.float32)


@pytest.mark.parametrize("suffix", ["", "bin", "."])
def test_suffixes(suffix):
    with pytest.raises(AssertionError, match="the suffix is"):
        Kit(SafetensorsFormat, suffix).test_its_suffix()


def test_files_elsewhere(tmp_path):
    class WritesNotes(SafetensorsFormat):
        def write(self, path, tensors, metadata):
            path.with_suffix(".note").write_text("x")
            return super().write(path, tensors, metadata)

    with pytest.raises(AssertionError, match="written beside"):
        Kit(WritesNotes).test_hard_names(tmp_path)


class LosesMetadata(SafetensorsFormat):
    def write(self, path, tensors, metadata):
        return super().write(path, tensors, {k: v for k, v in metadata.items() if v})


class AddsMetadata(SafetensorsFormat):
    def write(self, path, tensors, metadata):
        return super().write(path, tensors, {**metadata, "format": "pt"})


@pytest.mark.parametrize("fault", [LosesMetadata, AddsMetadata])
def test_metadata(tmp_path, fault):
    with pytest.raises(AssertionError):
        Kit(fault).test_metadata(tmp_path)


class PickleFormat(CheckpointFormat):
    """Reads with pickle, which runs what stands in a file; never syncs."""

    def write(self, path, tensors, metadata):
        path.write_bytes(pickle.dumps(({n: t.detach().clone() for n, t in tensors.items()}, dict(metadata))))

    def read(self, path):
        yield from pickle.loads(path.read_bytes())[0].items()

    def metadata(self, path):
        return pickle.loads(path.read_bytes())[1]


def test_running_what_is_read(tmp_path):
    with pytest.raises(AssertionError, match="ran what stood in it"):
        Kit(PickleFormat).test_reading_runs_nothing(tmp_path)


def test_syncing(tmp_path, monkeypatch):
    class SyncsHalf(PickleFormat):
        def write(self, path, tensors, metadata):
            with path.open("wb") as file:
                file.write(b"x")
                file.flush()
                os.fsync(file.fileno())
            super().write(path, tensors, metadata)

    for fault in (PickleFormat, SyncsHalf):
        (tmp_path / fault.__name__).mkdir()
        with pytest.raises(AssertionError, match="wasn't fsynced when it was whole"):
            Kit(fault).test_what_is_written_is_on_disk(tmp_path / fault.__name__, monkeypatch)
        monkeypatch.undo()


def test_damage(tmp_path):
    class FillsUp(CheckpointFormat):
        """What is missing at the end is read as zeros."""

        def write(self, path, tensors, metadata):
            path.write_bytes(zlib.crc32(b"").to_bytes(4, "little") + tensors["b"].numpy().tobytes())

        def read(self, path):
            data = path.read_bytes()[4:].ljust(8000, b"\0")
            yield "b", torch.frombuffer(bytearray(data[: len(data) // 8 * 8]), dtype=torch.int64)

    with pytest.raises(BaseException, match="DID NOT RAISE"):
        Kit(FillsUp).test_damage_is_an_error(tmp_path)


class SharingReader(SafetensorsReader):
    def read(self, name, region=None):
        if region is None:
            self._kept = getattr(self, "_kept", {})
            return self._kept.setdefault(name, super().read(name))
        return super().read(name, region)


class WholeReader(SafetensorsReader):
    def view(self, name, region=None):
        return super().view(name)


def reading_with(reader):
    class Reads(SafetensorsFormat):
        def open(self, path):
            return reader(path)

    return Reads


class ForgetsMetadata(SafetensorsFormat):
    def open(self, path):
        return TensorReader(dict(self.read_plainly(path)), {})

    def read_plainly(self, path):
        with SafetensorsReader(path) as reader:
            return {n: reader.read(n) for n in reader.names()}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (reading_with(SharingReader), "shares memory"),
        (reading_with(WholeReader), "a block of"),
        (ForgetsMetadata, "metadata"),
    ],
)
def test_random_access(tmp_path, fault, message):
    with pytest.raises(AssertionError, match=message):
        Kit(fault).test_random_access(tmp_path)


def test_checkpoints(tmp_path):
    with pytest.raises(AssertionError, match="changed on its way"):
        Kit(RoundsWeights).test_a_checkpoint_in_this_format(tmp_path)


class RoundsWeights(Changed):
    def change(self, name, tensor):
        return name, tensor.bfloat16().to(tensor.dtype) if tensor.dtype is torch.float32 else tensor
